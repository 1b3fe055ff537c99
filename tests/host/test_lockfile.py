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


def test_a_file_left_behind_is_no_obstacle_and_names_the_new_holder(tmp_path):
    path = tmp_path / "lock"
    assert "" == LockFile(path).holder()
    path.write_text("pid 1 and a long tail of an older holder\n")
    lock = LockFile(path)

    assert lock.try_take()
    assert f"pid {os.getpid()}" == LockFile(path).holder()
    other = LockFile(path)
    assert not other.try_take()
    for _ in range(2):
        lock.release()
    assert other.try_take()
    other.release()


def test_a_lock_whose_file_was_removed_between_is_not_a_lock(tmp_path, monkeypatch):
    lock = LockFile(tmp_path / "lock")
    real = fcntl.flock
    for replace in (False, True):

        def removed(handle, operation, replace=replace):
            real(handle, operation)
            (tmp_path / "lock").unlink()
            if replace:
                (tmp_path / "lock").write_text("")

        monkeypatch.setattr(fcntl, "flock", removed)
        assert not lock.try_take()
    monkeypatch.undo()

    assert lock.try_take()
    lock.release()


def test_what_cannot_be_locked_is_said_and_left_as_it_is(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "fifo")
    theirs = tmp_path / "theirs"
    theirs.write_text("pid 1\n")
    os.chown(theirs, 65534 if os.geteuid() == 0 else -1, -1)
    wrong = {
        tmp_path / "file" / "lock": "cannot be locked",
        tmp_path / "link": "cannot be locked",
        tmp_path / "fifo": "is not a file",
        theirs: "is not a file of user 0.*remove it",
    }
    for place, why in wrong.items():
        if place != theirs or os.geteuid() == 0:
            with pytest.raises(PermissionFault, match=f"{place} {why}"):
                LockFile(place).try_take()
    assert (False, "pid 1\n") == ((tmp_path / "target").exists(), theirs.read_text())
    assert "" == LockFile(tmp_path).holder()

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(PermissionFault, match="cannot be locked: No locks available"):
        LockFile(path).try_take()


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

        done = subprocess.run(  # noqa: S603 -- our own interpreter and arguments
            [sys.executable, "-S", "-c", STRANGER, path],
            capture_output=True,
            text=True,
            check=False,
        )

        assert ("kept out\n", "") == (done.stdout, done.stderr)
        assert lock.try_take()
        lock.release()


def test_a_file_of_an_older_agent_loses_its_rights_for_others_while_somebody_holds_it(tmp_path):
    path = tmp_path / "lock"
    holder, standby = LockFile(path), LockFile(path)
    assert holder.try_take()
    path.chmod(0o644)

    assert not standby.try_take()

    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    holder.release()
