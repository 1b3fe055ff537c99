"""The process on its host: identity, lock, systemd."""

import contextlib
import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog

from agent.errors import PermissionFault, cap

log = structlog.get_logger(__name__)

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""Holds the id of the present boot."""

MACHINE_ID: Final = Path("/etc/machine-id")
"""Holds the id of this machine, the same across boots."""


def host_name() -> str:
    """This host's name, in the form in which the kubelet names its Node.

    Source: kubernetes pkg/util/node/node.go GetHostname.
    """
    return socket.gethostname().strip().lower()


def read_id(path: Path) -> str:
    """The id in a file of one line; empty if there is none."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


# Allows one agent per host, by an exclusive lock that the kernel releases when its holder dies.

MODE = 0o600


class LockFile:
    """The lock at `path`; a missing directory is made (0750).

    The file names its holder for people. Only the kernel's lock counts, so a file that a dead
    process left is no obstacle. A user who can open the file could lock it and keep the agent out:
    only its owner may (0600), also if an older agent left the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

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

    def holder(self) -> str:
        """What the file says about its holder, for people; empty when it says nothing."""
        with contextlib.suppress(OSError):
            return cap(self._path.read_text(encoding="ascii", errors="replace"), 64)
        return ""

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

            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The file may have been removed or replaced meanwhile.
                if os.path.samestat(os.fstat(handle), self._path.lstat()):
                    os.ftruncate(handle, 0)
                    os.write(handle, f"pid {os.getpid()}\n".encode())
                    undo.pop_all()
                    return handle
        return None


class Systemd:
    """Notifies the service manager that started this process, if one did.

    `watchdog`: the longest time in seconds between two messages WATCHDOG=1; 0: it expects none. A
    message that cannot be sent is logged and lost. Source: sd_notify(3), sd_watchdog_enabled(3).
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        # `@` stands for the zero byte of an abstract address.
        self._address = re.sub("^@", "\0", environ.get("NOTIFY_SOCKET", ""))
        usec, pid = environ.get("WATCHDOG_USEC", ""), str(os.getpid())
        is_meant = bool(self._address) and environ.get("WATCHDOG_PID", pid) == pid
        is_number = usec.isascii() and usec.isdigit()
        self.watchdog = int(usec) / 1e6 if is_meant and is_number else 0.0

    def tell(self, message: str) -> None:
        """Send a message of sd_notify(3), such as READY=1."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.setblocking(False)
                channel.sendto(message.encode(), self._address)
        except OSError as error:
            word = message.partition("=")[0]
            log.warning("systemd.not_told", message=word, err=error.strerror)

    def reloading(self) -> None:
        """Report that a reload began, with its time of CLOCK_MONOTONIC (Type=notify-reload)."""
        stamp = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.tell(f"RELOADING=1\nMONOTONIC_USEC={stamp}")
