"""One agent per host: an exclusive lock that the kernel lets go when its holder dies."""

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
"""Seconds between two tries of a standby: soon enough to take over within one second."""


class LockFile:
    """The lock at `path`, whose directory is made (0750) if it is missing.

    The file names its holder for people; only the kernel's lock counts, so a file that a dead
    process left behind is no obstacle. Whoever may read it could lock it and keep the agent out,
    so it is its owner's alone (0600), one that was left by an older agent, too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    @property
    def held(self) -> bool:
        """True while this process holds the lock."""
        return self._handle is not None

    def try_take(self) -> bool:
        """Take the lock if it is free; True when it is ours. Raises PermissionFault."""
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
        """Wait in standby until the lock is ours. Raises PermissionFault."""
        if self.try_take():
            return
        log.info("lock.standby", path=str(self._path), holder=self.holder())
        while not self.try_take():  # noqa: ASYNC110 -- flock tells nobody when it comes free
            await asyncio.sleep(POLL)
        log.info("lock.taken", path=str(self._path))

    def holder(self) -> str:
        """What the file says of its holder, for people; empty when it says nothing."""
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
        """Let go; a second call does nothing. The file stays: to remove it would race."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _locked(self) -> int | None:
        self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self._path, flags, MODE)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, handle)
            self._keep_to_ourselves(os.fstat(handle), handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
                    return None
                raise
            if not self._is_at_path(handle):
                return None  # removed or replaced meanwhile: what we locked is nobody's lock
            os.ftruncate(handle, 0)
            os.write(handle, f"pid {os.getpid()}\n".encode())
            undo.pop_all()
        return handle

    def _keep_to_ourselves(self, found: os.stat_result, handle: int) -> None:
        """Take everybody else's rights to the file away. Raises PermissionFault: it is not ours."""
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionFault(
                f"{self._path} is no file of user {os.geteuid()}, whose agent this is: remove it."
            )
        if stat.S_IMODE(found.st_mode) != MODE:
            os.fchmod(handle, MODE)

    def _is_at_path(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), self._path.lstat())
        except FileNotFoundError:
            return False
