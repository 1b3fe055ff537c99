"""Full, read-only and removed directories are told from those that are well."""

import asyncio
import errno
import os
import shutil
import socket
from types import SimpleNamespace

import pytest
from grpclib.protocol import H2Protocol

from agent.kit.disk import DIRECTORY, check_writable, remove_stepwise
from agent.kubelet.door import peer_uid
from agent.witness import UnixChannel

WELL = {"f_blocks": 100, "f_bfree": 50, "f_bavail": 40, "f_files": 100, "f_ffree": 50, "f_flag": 0}
ORDER = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail")


@pytest.mark.parametrize(
    ("code", "user", "found"),
    [
        (0, 0, {}),
        (errno.EROFS, 0, {"f_flag": os.ST_RDONLY}),
        (errno.ENOSPC, 0, {"f_bfree": 0, "f_bavail": 0}),
        (errno.ENOSPC, 0, {"f_ffree": 0}),
        (0, 0, {"f_bavail": 0}),  # what is set aside for root counts for root alone
        (errno.ENOSPC, 1000, {"f_bavail": 0}),
        (0, 0, dict.fromkeys(("f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree"), 0)),
    ],
)
def test_what_a_file_system_tells_of_itself_decides(tmp_path, code, user, found):
    facts = WELL | found
    result = os.statvfs_result([facts.get(name, 0) for name in (*ORDER, "f_flag", "f_namemax")])
    directory, error = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY), OSError()
    try:
        check_writable(directory, "there", lambda _: result, lambda: user)
    except OSError as raised:
        error = raised
    os.close(directory)

    assert (code, "there") == (error.errno, error.filename) if code else error.errno is None


def test_a_directory_of_this_machine_takes_writes_until_it_is_removed(tmp_path):
    (tmp_path / "gone").mkdir()
    opened = os.open(tmp_path / "gone", os.O_RDONLY | os.O_DIRECTORY)
    check_writable(opened, "there")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError):
        check_writable(opened, "there")
    os.close(opened)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_another_process_removes_meanwhile_does_not_remain(tmp_path, monkeypatch, depth):
    rename, others = os.rename, ["a", "a/b"][:depth]
    (tmp_path / "home" / "a" / "b" / "c").mkdir(parents=True)

    def overtaken(name, target, **directories):
        if len(others) and (tmp_path / "home" / others[-1]).exists():
            shutil.rmtree(tmp_path / "home" / others.pop())
        rename(name, target, **directories)

    monkeypatch.setattr(os, "rename", overtaken)
    above = os.open(tmp_path, DIRECTORY)
    for _ in remove_stepwise("home", above):
        pass
    os.close(above)

    assert [] == list(tmp_path.iterdir())


# Who calls is what the kernel says, and nobody where it says nothing; servers that hang up.


def test_the_caller_is_known_on_a_unix_socket_and_nobody_elsewhere():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs, socket.socket(socket.AF_INET) as over_tcp:
        for opened, uid in ((ours, os.geteuid()), (over_tcp, None), (None, None)):
            transport = SimpleNamespace(get_extra_info={"socket": opened}.get)
            assert uid == peer_uid(transport)  # type: ignore[arg-type]
    assert peer_uid(None) is None


class SlowChannel(UnixChannel):
    """The loop comes back to it after everything that lies there was read."""

    async def _create_connection(self) -> H2Protocol:
        protocol = await super()._create_connection()
        await asyncio.sleep(0.05)
        return protocol


@pytest.mark.looptime(False)
async def test_a_server_that_hangs_up_while_the_connection_opens_is_an_os_error(tmp_path):
    path = tmp_path / "s.sock"
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), path)
    async with server, SlowChannel(path=str(path)) as channel:
        with pytest.raises(ConnectionResetError, match="was lost while it was opened"):
            await channel.__connect__()
