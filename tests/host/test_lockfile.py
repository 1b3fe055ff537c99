"""LockFile: one holder, and no trust in what a file says."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agent.errors import PermissionFault
from agent.host.system import LockFile

HOLDER = """
import sys, pathlib
from agent.host.system import LockFile
lock = LockFile(pathlib.Path(sys.argv[1]))
assert lock.try_take()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


def test_a_file_left_behind_is_no_obstacle_and_names_the_new_holder(path):
    assert "" == LockFile(path).holder()
    path.write_text("pid 1 and a long tail of an older holder\n")
    lock, other = LockFile(path), LockFile(path)

    assert lock.try_take()
    path.chmod(0o644)  # as an older agent made it: rights of others go while somebody holds it
    assert f"pid {os.getpid()}" == LockFile(path).holder()
    assert not other.try_take()
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    for _ in range(2):
        lock.release()
    assert other.try_take()
    other.release()


@pytest.mark.parametrize("replaces", [False, True])
def test_a_lock_whose_file_was_removed_between_is_not_a_lock(path, monkeypatch, replaces):
    lock, real = LockFile(path), fcntl.flock

    def removed(handle, operation):
        real(handle, operation)
        path.unlink()
        if replaces:
            path.touch()

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(fcntl, "flock", removed)
        assert not lock.try_take()

    assert lock.try_take()
    lock.release()


def theirs(path):
    path.write_text("pid 1\n")
    os.chown(path, 65534, -1)


WRONG = {
    "a link": (lambda path: path.symlink_to(path.with_name("target")), "cannot be locked"),
    "a pipe": (os.mkfifo, "is not a file"),
    "a directory": (lambda path: path.mkdir(), "cannot be locked: Is a directory"),
    "another user's": (theirs, "is not a file of user 0.*remove it"),
}


@pytest.mark.parametrize(("make", "why"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_locked_is_said_and_left_as_it_is(path, make, why):
    if make is theirs and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    make(path)
    before = path.lstat().st_ctime_ns

    with pytest.raises(PermissionFault, match=f"{path} {why}"):
        LockFile(path).try_take()
    assert before == path.lstat().st_ctime_ns
    assert not path.with_name("target").exists()


def test_a_file_system_without_locks_and_a_directory_that_is_none_are_said(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(PermissionFault, match="cannot be locked: No locks available"):
        LockFile(path).try_take()
    path.unlink()
    path.parent.rmdir()
    path.parent.touch()
    with pytest.raises(PermissionFault, match=f"{path} cannot be locked"):
        LockFile(path).try_take()


@pytest.mark.process
@pytest.mark.timeout(30)
def test_the_kernel_frees_the_lock_of_a_killed_process(path):
    command = [sys.executable, "-c", HOLDER, str(path)]
    pipe, lock = subprocess.PIPE, LockFile(path)
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as holder:  # noqa: S603 -- our own program
        assert b"held\n" == holder.stdout.readline()
        assert not lock.try_take()
        assert f"pid {holder.pid}" == lock.holder()
        holder.send_signal(signal.SIGKILL)
        holder.wait()

    for _ in range(2):
        assert lock.try_take()
    lock.release()


STRANGER = """
import fcntl, os, sys
os.setresuid(*3 * [65534])
try:
    handle = os.open(sys.argv[1], os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    print("locked")
except PermissionError:
    print("kept out")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try as somebody else")
@pytest.mark.parametrize("older", [False, True])
def test_another_user_of_the_host_cannot_lock_it(older):
    """As where the kubelet made the run directory: everybody may pass through it."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        path = Path(directory) / "lock"
        if older:
            path.write_text("pid 4711\n")
            path.chmod(0o666)
        lock = LockFile(path)
        lock.try_take()
        lock.release()

        command = [sys.executable, "-S", "-c", STRANGER, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- our own

        assert ("kept out\n", "") == (done.stdout, done.stderr)
        assert lock.try_take()
        lock.release()
