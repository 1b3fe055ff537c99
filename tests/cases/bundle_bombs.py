"""`status --from` of a file of 4 MiB whose header says that the next name has 1 GiB.

The command asked for that memory, and ended in a traceback.
"""

import gzip
import tarfile
import tempfile
from pathlib import Path

from tests.cases.box import run_agent, verdict

KINDS = {
    "pax header": (tarfile.XHDTYPE, "x"),
    "long name": (tarfile.GNUTYPE_LONGNAME, "././@LongLink"),
}
wrong = []
with tempfile.TemporaryDirectory() as root:
    for what, (kind, name) in KINDS.items():
        member = tarfile.TarInfo(name)
        member.size, member.type = 1 << 30, kind
        path = Path(root) / "bundle.tgz"
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.write(member.tobuf(tarfile.GNU_FORMAT))
            for _ in range(1 << 6):
                file.write(bytes(1 << 24))
        code, text = run_agent("status", "--from", path, memory=768 << 20)
        print(f"{what}: {path.stat().st_size >> 20} MiB, exit {code}: {text.strip()[-200:]}")
        wrong += [what] if code != 3 or "Traceback" in text else []
verdict(right=not wrong, wrong=f"{', '.join(wrong)}: not refused in a sentence with exit code 3")
