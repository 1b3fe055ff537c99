"""The host: blocking calls on threads, the state's disk, settings files, lock, systemd."""

import asyncio
import contextlib
import errno
import fcntl
import functools
import os
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Self, TypeVar, TypeVarTuple

import structlog

from agent.errors import PermissionFault, SettingsError, StateError, cap
from agent.kit.disk import check_writable
from agent.kit.tasks import Offload
from agent.kit.timing import await_event

log = structlog.get_logger(__name__)

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Worker:
    """An Offload (agent.kit.tasks) on one daemon thread. Use it as an async context manager.

    Leaving it finishes the queued work, for at most `patience` seconds. Then the thread is
    abandoned. The loop's own executor joins its threads at exit: one disk that does not answer
    would keep the process from ever ending.
    """

    def __init__(self, name: str, patience: float = 2.0) -> None:
        self._name = name
        self._patience = patience
        self._queue = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        self._is_running = False

    async def __aenter__(self) -> Self:
        self._is_running = True
        self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._work, args=(loop,), name=self._name, daemon=True).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_running = False
        self._queue.put(None)
        if not await await_event(self._ended, self._patience):
            log.warning("worker.abandoned", worker=self._name, after=self._patience)

    async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        """Run `work(*args)` on the thread. Raises its error, or StateError: it is not running.

        If the caller is cancelled, queued work is dropped and begun work goes on.
        """
        if not self._is_running:
            raise StateError(f"Thread {self._name} is not running: the agent is about to end.")

        future: Future[R] = Future()
        self._queue.put((future, functools.partial(work, *args)))
        return await asyncio.wrap_future(future)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (queued := self._queue.get()) is not None:
            future, work = queued
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 -- raised in the caller
                    future.set_exception(error)
            del queued, future, work  # the next call may come late

        with contextlib.suppress(RuntimeError):  # the loop may be closed
            loop.call_soon_threadsafe(self._ended.set)


# The state directory: a crash at any step of a replace leaves one complete generation of a file.
#
# The order makes it safe: write and sync the new content beside the old, give the old one a second
# name, sync the directory, rename the new one into place, sync the directory again.

SIZE_LIMIT = 64 * 1024 * 1024  # bytes of a file that are read

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""How the directory and its files are opened. A pipe in the place of a file does not block."""


class DirectoryFiles:
    """The steps of a replace in `directory`, an open descriptor. All raise OSError."""

    def __init__(self, directory: int) -> None:
        self._directory = directory

    def write(self, name: str, data: bytes) -> None:
        """Make a file that only its owner may read; return once its content is on disk."""
        with os.fdopen(os.open(name, CREATE, 0o600, dir_fd=self._directory), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def link(self, name: str, second: str) -> None:
        """Give a file a second name, which no file has."""
        here = self._directory
        os.link(name, second, src_dir_fd=here, dst_dir_fd=here, follow_symlinks=False)

    def rename(self, name: str, target: str) -> None:
        """Rename the file `name` to `target`; a file named `target` loses that name."""
        os.rename(name, target, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def unlink(self, name: str) -> None:
        """Remove a name."""
        os.unlink(name, dir_fd=self._directory)

    def sync(self) -> None:
        """Return once the names are on disk."""
        os.fsync(self._directory)


def replace(files: DirectoryFiles, name: str, data: bytes, keep: str | None = None) -> None:
    """Replace the content of `name`; the old content gets the name `keep`. Raises OSError.

    After an error `name` has its old content. Exception: if the last sync fails, it may have the
    new content, as after a crash.
    """
    fresh = f".{name}.new"
    try:
        # A new inode: after a failed sync, pages of the old one may be lost.
        with contextlib.suppress(FileNotFoundError):
            files.unlink(fresh)
        files.write(fresh, data)

        if keep:
            with contextlib.suppress(FileNotFoundError):
                files.unlink(keep)
            with contextlib.suppress(FileNotFoundError):  # there is no old content
                files.link(name, keep)
            files.sync()
        files.rename(fresh, name)
    except OSError:
        with contextlib.suppress(OSError):
            files.unlink(fresh)
        raise
    files.sync()


class HostDisk:
    """The Disk port over the directory `path`, which is opened once; `offload` runs all calls."""

    def __init__(self, path: Path, directory: int, files: DirectoryFiles, offload: Offload) -> None:
        self.place = str(path)
        self._path = path
        self._directory = directory
        self._files = files
        self._offload = offload

    @classmethod
    async def open(
        cls, path: Path, offload: Offload, files: Callable[[int], DirectoryFiles] = DirectoryFiles
    ) -> Self:
        """Open the directory, or make it (0750). Take write from others. Raises StateError."""
        directory = await offload.call(_open_directory, path)
        return cls(path, directory, files(directory), offload)

    async def read(self, name: str) -> bytes | None:
        """Return the content, or None when the file is absent. Raises StateError."""
        with _state_errors(self._path / name, "read"):
            return await self._offload.call(_read, self._directory, self._path / name)

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        """Replace the content durably; `keep` receives the old content. Raises StateError."""
        with _state_errors(self._path / name, "written"):
            await self._offload.call(replace, self._files, name, data, keep)

    async def check(self) -> None:
        """Check without writing that files can be replaced. Raises StateError."""
        with _state_errors(self._path, "written"):
            await self._offload.call(check_writable, self._directory, self.place)

    def close(self) -> None:
        """Close the directory; no call may follow."""
        os.close(self._directory)


def _read(directory: int, path: Path) -> bytes | None:
    """The content of the file `path` in the open directory; None when it is absent."""
    try:
        handle = os.open(path.name, READ, dir_fd=directory)
    except FileNotFoundError:
        return None

    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > SIZE_LIMIT:
            raise StateError(f"{path} is not a file of at most {SIZE_LIMIT} bytes: remove it.")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def _open_directory(path: Path) -> int:
    with _state_errors(path, "opened"):
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
        directory = os.open(path, DIRECTORY)

    # A user who can write there can replace the state.
    with contextlib.suppress(PermissionError):
        os.fchmod(directory, stat.S_IMODE(os.fstat(directory).st_mode) & ~stat.S_IWOTH)
    return directory


@contextlib.contextmanager
def _state_errors(path: Path, what: str) -> Iterator[None]:
    """Turn an OSError into a StateError that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        advice = "look at the directory and its file system; restart the agent if it was removed"
        raise StateError(f"{path} cannot be {what}: {reason}; {advice}") from error


def read_file(path: Path, limit: int, *, needed: bool = True) -> bytes | None:
    """Return the content of a file of at most `limit` bytes; None: it is missing, if not `needed`.

    Blocks for as long as the file system hangs. Raises SettingsError.
    """
    try:
        # Not is_file(): from Python 3.14 on, a file that cannot be reached is a missing one to it.
        if not stat.S_ISREG(path.stat().st_mode) and not needed:
            return None

        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        if not needed and error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            return None
        reason = f"{error.strerror or error}; check the path and its rights"
        raise SettingsError(f"{path}: cannot be read: {reason}") from error

    if len(content) > limit:
        raise SettingsError(f"{path}: is larger than {limit // 1024} KiB; is it the right file?")
    return content


# The process on its host: identity, lock, systemd.

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
MACHINE_ID: Final = Path("/etc/machine-id")


def host_name() -> str:
    """This host's name as its Node has it: kubernetes pkg/util/node/node.go GetHostname."""
    return socket.gethostname().strip().lower()


def read_id(path: Path) -> str:
    """The id in a file of one line; empty if there is none."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


MODE = 0o600


class LockFile:
    """One agent per host: a lock at `path` that the kernel releases when its holder dies.

    The file names its holder for people. A user who can open the file could lock it and keep the
    agent out: only its owner may (0600), also if an older agent left the file.
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
            text = f"{self._path} cannot be locked: {error.strerror}"
            raise PermissionFault(f"{text}; let the agent's user own its directory.") from error
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
                text = f"{self._path} is not a file of user {os.geteuid()}, the agent's"
                raise PermissionFault(f"{text}: remove it.")
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
    """Notifies the service manager, if one started this process: sd_notify(3).

    `watchdog`: the longest time in seconds between two messages WATCHDOG=1; 0: it expects none.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        # `@` stands for the zero byte of an abstract address.
        self._address = "\0" + address[1:] if address.startswith("@") else address
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
