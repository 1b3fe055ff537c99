"""Allows one agent per host, by an exclusive lock that the kernel releases when its holder dies."""

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

import structlog

from agent.core.errors import PermissionFault, cap

log = structlog.get_logger(__name__)

MODE = 0o600

POLL = 0.2
"""Seconds between two tries of a standby agent: it takes over within one second."""


class LockFile:
    """The lock at `path`; a missing directory is made (0750).

    The file names its holder for people. Only the kernel's lock counts, so a file that a dead
    process left is no obstacle. A user who can open the file could lock it and keep the agent out:
    only its owner may (0600), also if an older agent left the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    @property
    def held(self) -> bool:
        """True while this process holds the lock."""
        return self._handle is not None

    def try_take(self) -> bool:
        """Take the lock if it is free; True if this process holds it. Raises PermissionFault."""
        if self._handle is not None:
            return True
        try:
            self._handle = self._locked()
        except OSError as error:
            raise PermissionFault(
                f"{self._path} cannot be locked: {error.strerror}; let the agent's user own its "
                "directory."
            ) from error
        return self._handle is not None

    async def take(self) -> None:
        """Wait in standby until this process holds the lock. Raises PermissionFault."""
        if self.try_take():
            return
        log.info("lock.standby", path=str(self._path), holder=self.holder())
        while not self.try_take():  # noqa: ASYNC110 -- flock gives no notice of a release
            await asyncio.sleep(POLL)
        log.info("lock.taken", path=str(self._path))

    def holder(self) -> str:
        """What the file says about its holder, for people; empty when it says nothing."""
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return ""
        try:
            return cap(os.read(handle, 64).decode(errors="replace"), 64)
        except OSError:
            return ""
        finally:
            os.close(handle)

    def release(self) -> None:
        """Release the lock; a second call does nothing. The file stays: removing it would race."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _locked(self) -> int | None:
        self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self._path, flags, MODE)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, handle)
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise PermissionFault(
                    f"{self._path} is not a file of user {os.geteuid()}, as whom the agent runs: "
                    "remove it."
                )
            if stat.S_IMODE(status.st_mode) != MODE:
                os.fchmod(handle, MODE)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
                    return None
                raise
            try:
                is_at_path = os.path.samestat(os.fstat(handle), self._path.lstat())
            except FileNotFoundError:
                is_at_path = False
            if not is_at_path:
                return None  # the file was removed or replaced meanwhile
            os.ftruncate(handle, 0)
            os.write(handle, f"pid {os.getpid()}\n".encode())
            undo.pop_all()
        return handle
