"""`hami-agent bundle`: one archive that another machine can read, and that overwrites nothing."""

import gzip
import io
import os
import stat
import tarfile
import tracemalloc

import msgspec
import pytest

from agent.cli import support
from agent.cli.main import dispatch
from agent.status import NodeStatus, StatusDocument, envelope
from tests.builders import NOON

STATUS = StatusDocument(node=NodeStatus(name="gpu-a07", ready=True), gpus=())


@pytest.fixture
def cli(capsys):
    def run(*argv):
        code = dispatch(argv, {})
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def answers(monkeypatch):
    """The agent's answers by path: a status and a text. Tests may change them."""
    found = dict.fromkeys(support.PARTS.values(), (200, "text"))
    found["/api/v1/status"] = 200, envelope("Status", STATUS, NOON).decode()
    monkeypatch.setattr(support, "call", lambda _path, _method, target, _deadline: found[target])
    return found


def test_what_is_bundled_can_be_read_on_another_machine(cli, answers, tmp_path):
    path = tmp_path / "node.tgz"
    before = os.umask(0o022)
    try:
        code, out, _ = cli("bundle", "--file", str(path))
    finally:
        os.umask(before)

    assert (0, True) == (code, out.startswith(f"{path}: status.json, settings.json"))
    assert 0o600 == stat.S_IMODE(path.stat().st_mode), "only its owner may read it"
    code, out, _ = cli("status", "--from", str(path))
    assert (0, True) == (code, "gpu-a07  READY" in out)
    assert f"source: {path}, " in out
    with tarfile.open(path) as archive:
        assert {0o600} == {member.mode for member in archive.getmembers()}


def test_what_the_agent_says_is_bundled_and_what_it_does_not_serve_is_named(cli, answers, tmp_path):
    path = tmp_path / "node.tgz"
    answers["/readyz?verbose"] = 503, "[-]state failed: full\n"
    answers["/metrics"] = 500, "failed"
    code, _, err = cli("bundle", "--file", str(path))

    assert (5, True) == (code, "missing: metrics.txt: /metrics answered 500" in err)
    with tarfile.open(path) as archive:
        file = archive.extractfile("hami-agent/readyz.txt")
        assert file is not None
        assert b"[-]state failed: full\n" == file.read()


def test_an_archive_that_is_there_stays_as_it_is(cli, answers, tmp_path):
    (path := tmp_path / "node.tgz").write_text("old")
    code, _, err = cli("bundle", "--file", str(path))

    assert (74, "old") == (code, path.read_text())
    assert "File exists; choose another --file" in err


def test_without_an_agent_nothing_is_written(cli, tmp_path):
    path = tmp_path / "node.tgz"
    code, _, err = cli("bundle", "--file", str(path), "--socket", str(tmp_path / "no.sock"))

    assert (3, False) == (code, path.exists())
    assert "no.sock does not answer" in err


def an_archive(path, name=support.__name__, content=b"x", kind=tarfile.REGTYPE):
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.size, member.linkname = kind, len(content), "/etc/passwd"
        archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "cannot be read: No such file"),
        (lambda path: path.write_text("hello"), "is not an archive of `hami-agent bundle`"),
        (lambda path: path.write_bytes(b"\x1f\x8b\x08\x00broken"), "is not an archive"),
        (an_archive, "is not an archive of"),
        (lambda path: an_archive(path, "hami-agent/status.json"), "the answer is no Status"),
        (
            lambda path: an_archive(path, "hami-agent/status.json", b"", tarfile.SYMTYPE),
            "is not an archive of",
        ),
        (os.mkfifo, "is not a regular file; name an archive of `hami-agent bundle`"),
        (lambda path: path.mkdir(), "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: os.mknod(path, stat.S_IFSOCK | 0o600), "is not a regular file"),
    ],
)
def test_a_file_that_is_no_bundle_is_refused_in_a_sentence(cli, tmp_path, make, said):
    path = tmp_path / "x.tgz"
    make(path)
    code, out, err = cli("status", "--from", str(path))

    assert (3, "") == (code, out)
    assert said in err


def a_header(name, size=0, kind=tarfile.REGTYPE):
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def with_status(content, before=b""):
    """An archive whose status is that."""
    head = before + a_header("hami-agent/status.json", len(content))
    return gzip.compress(head + content.ljust(-(-len(content) // 512) * 512, b"\0"), 1)


def an_extension(records):
    """What says so of the member after it."""
    info = tarfile.TarInfo("p")
    info.pax_headers = records
    whole = info.create_pax_header(info.get_info(), "utf-8")
    return whole[: len(whole) - 512]  # without the member's own head


KINDS = (b"x", b"g", b"0", b"L", b"K")
EXTENSIONS = (
    {"GNU.sparse.map": "1,2,x"},
    {"GNU.sparse.numblocks": "x", "GNU.sparse.map": "0,5"},
    {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "abc"}
    | {"GNU.sparse.name": "hami-agent/status.json"},
    {"size": "-5"},
    {"size": "9" * 5000},
)


def a_status(data):
    return envelope("Status", msgspec.Raw(data) if isinstance(data, bytes) else data, NOON)


@pytest.mark.parametrize(
    "content",
    [
        # What asks for a GiB: extensions of a member and of all, the names of one, a plain one.
        *(
            (lambda kind=kind: gzip.compress(a_header("x", 1 << 30, kind) + bytes(1 << 26), 1))
            for kind in KINDS
        ),
        *(with_status(a_status(STATUS), an_extension(records)) for records in EXTENSIONS),
        lambda: gzip.compress(a_header("x") * 200_000, 1),
        gzip.compress(a_header("x", kind=tarfile.GNUTYPE_LONGNAME) * 5000),  # each of the next
        with_status(b"{}", a_header("hami-agent", kind=tarfile.DIRTYPE)),
        lambda: b"\x1f\x8b\x08\x08" + bytes(6) + b"a" * (1 << 25),  # gzip's own name of the file
        lambda: gzip.compress(b"") * 500_000,
        gzip.compress(a_header("x", -1024)),
        gzip.compress(a_header("x", 1 << 70)),
        with_status(b"{}", a_header("hami-agent/status.json", 0, tarfile.GNUTYPE_SPARSE)),
        with_status(b"[" * 100_000),
        with_status(a_status(b'{"gpus":' + b"[" * 100_000 + b"]" * 100_000 + b"}")),
        with_status(a_status(b'{"node":{"name":"\xff"},"gpus":[]}')),
        with_status(
            a_status(b'{"node":{"name":"n"},"gpus":[{"uuid":"G","usedMib":1%s}]}' % (b"0" * 400))
        ),
    ],
    ids=range(22),
)
def test_a_file_of_a_stranger_costs_little_and_is_refused_in_a_sentence(cli, tmp_path, content):
    path = tmp_path / "x.tgz"
    path.write_bytes(content() if callable(content) else content)
    tracemalloc.start()
    try:
        code, out, err = cli("status", "--from", str(path))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (3, "", 1) == (code, out, err.count("\n"))
    assert f"hami-agent status: {path}" == err[: len(f"hami-agent status: {path}")]
    assert 64 << 20 > most
