"""LockFile: one holder, a standby that takes over, and no trust in what a file says."""

import asyncio
import errno
import os
import signal
import subprocess
import sys

import pytest
import structlog

from agent.core.errors import PermissionFault
from agent.host.lockfile import POLL, LockFile

HOLDER = """
import sys, pathlib
from agent.host.lockfile import LockFile
lock = LockFile(pathlib.Path(sys.argv[1]))
assert lock.try_take()
print("held", flush=True)
sys.stdin.read()
"""


def test_only_one_holds_it(tmp_path):
    first, second = LockFile(tmp_path / "run" / "lock"), LockFile(tmp_path / "run" / "lock")

    assert first.try_take()
    assert first.try_take()
    assert not second.try_take()
    assert (True, False) == (first.held, second.held)
    first.release()
    first.release()
    assert second.try_take()
    second.release()


def test_the_file_names_its_holder(tmp_path):
    path = tmp_path / "lock"
    path.write_text("pid 1 and a long tail of an older holder\n")
    lock = LockFile(path)

    assert lock.try_take()
    assert f"pid {os.getpid()}" == LockFile(path).holder()
    lock.release()


def test_a_file_left_behind_is_no_obstacle_and_says_nothing_when_absent(tmp_path):
    assert "" == LockFile(tmp_path / "lock").holder()
    (tmp_path / "lock").write_text("pid 4711\n")
    lock = LockFile(tmp_path / "lock")

    assert lock.try_take()
    lock.release()


async def test_a_standby_takes_over_within_one_poll(tmp_path):
    loop = asyncio.get_running_loop()
    holder, standby = LockFile(tmp_path / "lock"), LockFile(tmp_path / "lock")
    holder.try_take()

    with structlog.testing.capture_logs() as logs:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(standby.take())
            await asyncio.sleep(100.05)
            assert not waiting.done()
            holder.release()

    assert standby.held
    assert 100.05 < loop.time() <= 100.05 + POLL
    assert [("lock.standby", f"pid {os.getpid()}"), ("lock.taken", None)] == [
        (line["event"], line.get("holder")) for line in logs
    ]
    standby.release()


async def test_a_free_lock_is_taken_at_once(tmp_path):
    lock = LockFile(tmp_path / "lock")

    await lock.take()

    assert 0 == asyncio.get_running_loop().time()
    lock.release()


def test_a_lock_whose_file_was_removed_between_is_not_a_lock(tmp_path, monkeypatch):
    lock = LockFile(tmp_path / "lock")
    real = LockFile._is_at_path
    for replace in (False, True):

        def removed(self, handle, replace=replace):
            self._path.unlink()
            if replace:
                self._path.write_text("")
            return real(self, handle)

        monkeypatch.setattr(LockFile, "_is_at_path", removed)
        assert not lock.try_take()
    monkeypatch.undo()

    assert lock.try_take()
    lock.release()


def test_a_lock_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "target")

    for path in (tmp_path / "file" / "lock", tmp_path / "link"):
        with pytest.raises(PermissionFault, match=f"{path} cannot be locked"):
            LockFile(path).try_take()
    assert not (tmp_path / "target").exists()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)

    with pytest.raises(PermissionFault, match="cannot be locked: No locks available"):
        LockFile(tmp_path / "lock").try_take()


@pytest.mark.process
@pytest.mark.timeout(30)
def test_the_kernel_frees_the_lock_of_a_killed_process(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(  # noqa: S603 -- our own program
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        assert b"held\n" == holder.stdout.readline()
        lock = LockFile(tmp_path / "lock")
        assert not lock.try_take()
        assert f"pid {holder.pid}" == lock.holder()
        holder.send_signal(signal.SIGKILL)
        holder.wait()

    assert lock.try_take()
    lock.release()
