"""`hami-agent bundle`: one archive that another machine can read, and that overwrites nothing."""

import io
import os
import stat
import tarfile

import pytest

from agent.cli import bundle
from agent.cli.main import dispatch
from agent.codec.status_document import NodeStatus, StatusDocument, encode, envelope
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
    found = dict.fromkeys(bundle.PARTS.values(), (200, "text"))
    found["/api/v1/status"] = 200, envelope("Status", encode(STATUS), NOON).decode()
    monkeypatch.setattr(bundle, "call", lambda _path, _method, target, _deadline: found[target])
    return found


def test_what_is_bundled_can_be_read_on_another_machine(cli, answers, tmp_path):
    path = tmp_path / "node.tgz"
    code, out, _ = cli("bundle", "--file", str(path))

    assert (0, True) == (code, out.startswith(f"{path}: status.json, settings.json"))
    code, out, _ = cli("status", "--from", str(path))
    assert (0, True) == (code, "gpu-a07  READY" in out)
    assert f"source: {path}, " in out
    with tarfile.open(path) as archive:
        assert {0o600} == {member.mode for member in archive.getmembers()}


def test_only_its_owner_may_read_the_archive(cli, answers, tmp_path):
    path = tmp_path / "node.tgz"
    before = os.umask(0o022)
    try:
        cli("bundle", "--file", str(path))
    finally:
        os.umask(before)

    assert 0o600 == stat.S_IMODE(path.stat().st_mode)


def test_an_agent_that_is_not_ready_is_bundled_with_what_is_wrong(cli, answers, tmp_path):
    path = tmp_path / "node.tgz"
    answers["/readyz?verbose"] = 503, "[-]state failed: full\n"

    assert 0 == cli("bundle", "--file", str(path))[0]
    with tarfile.open(path) as archive:
        file = archive.extractfile("hami-agent/readyz.txt")
        assert file is not None
        assert b"[-]state failed: full\n" == file.read()


def test_what_the_agent_does_not_serve_is_named_and_the_rest_is_written(cli, answers, tmp_path):
    path = tmp_path / "node.tgz"
    answers["/metrics"] = 500, "failed"
    code, _, err = cli("bundle", "--file", str(path))

    assert (5, True) == (code, "missing: metrics.txt: /metrics answered 500" in err)
    assert path.exists()


def test_an_archive_that_is_there_stays_as_it_is(cli, answers, tmp_path):
    path = tmp_path / "node.tgz"
    path.write_text("old")
    code, _, err = cli("bundle", "--file", str(path))

    assert (74, True, "old") == (code, "exists already" in err, path.read_text())


def test_without_an_agent_nothing_is_written(cli, tmp_path):
    path = tmp_path / "node.tgz"
    code, _, err = cli("bundle", "--file", str(path), "--socket", str(tmp_path / "no.sock"))

    assert (3, False) == (code, path.exists())
    assert "no.sock does not answer" in err


def an_archive(path, name=bundle.__name__, content=b"x", kind=tarfile.REGTYPE):
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
            "is not a file of at most 8 MiB",
        ),
    ],
)
def test_a_file_that_is_no_bundle_is_refused_in_a_sentence(cli, tmp_path, make, said):
    path = tmp_path / "x.tgz"
    make(path)
    code, out, err = cli("status", "--from", str(path))

    assert (3, "") == (code, out)
    assert said in err
