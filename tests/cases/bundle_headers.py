"""`status --from` of an archive with odd headers: a traceback instead of one sentence."""

import gzip
import tarfile
import tempfile
from pathlib import Path

from tests.cases.box import run_agent, verdict

BODY = (
    b'{"apiVersion":"hami-agent/v1","kind":"Status","generatedAt":"2026-01-01T00:00:00Z",'
    b'"data":{"node":{"name":"n"},"gpus":[]}}'
)
NAME = "hami-agent/status.json"
ODD: list[dict[str, str]] = [
    {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": NAME,
        "GNU.sparse.realsize": "abc",
    },
    {"size": "-5"},
    {"size": "9" * 5000},
    {"GNU.sparse.map": "1,2,x"},
    {"GNU.sparse.size": "x"},
    {"GNU.sparse.numblocks": "x", "GNU.sparse.map": "0,5"},
]


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.USTAR_FORMAT)


def pax(records: dict[str, str]) -> bytes:
    body = b""
    for key, value in records.items():
        rest = f" {key}={value}\n".encode()
        length = len(rest) + 1
        while len(str(length)) + len(rest) != length:
            length += 1
        body += str(length).encode() + rest
    return header("p", len(body), tarfile.XHDTYPE) + body.ljust(-(-len(body) // 512) * 512, b"\0")


failed = 0
with tempfile.TemporaryDirectory() as root:
    for records in ODD:
        path = Path(root) / "bundle.tgz"
        content = pax(records) + header(NAME, len(BODY)) + BODY.ljust(512, b"\0") + bytes(1024)
        path.write_bytes(gzip.compress(content))
        code, text = run_agent("status", "--from", path)
        failed += "Traceback" in text or code != 3
        print(f"exit {code}: {next(iter(records))}: {text.strip()[-120:]}", flush=True)
verdict(right=not failed, wrong=f"{failed} of {len(ODD)} are not refused in a sentence")
