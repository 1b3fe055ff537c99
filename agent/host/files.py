"""Files of the host: blocking calls on threads, the state's disk, settings files, watches."""

import asyncio
import contextlib
import errno
import functools
import os
import queue
import stat
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Self, TypeVar, TypeVarTuple

import structlog
from asyncinotify import Event, Inotify, Mask

from agent.errors import KubeletError, SettingsError, StateError
from agent.kit.disk import check_writable
from agent.kit.tasks import Offload, show_thread_name
from agent.kit.timing import await_event, until_tick
from agent.ledger import KubeletEpoch

log = structlog.get_logger(__name__)

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

# Runs blocking work in order on one daemon thread, with a bounded queue.
#
# The loop's own executor joins its threads at exit: one disk that does not answer would keep the
# process from ever ending.

MOST_CALLS: Final = 1000
"""Calls that wait for one thread, at most; only a disk that does not answer has so many."""


class Worker:
    """An Offload (agent.kit.tasks). Use it as an async context manager.

    Leaving it finishes the queued work, for at most `patience` seconds. Then the thread is
    abandoned, which does not keep the process from ending.
    """

    def __init__(self, name: str, patience: float = 2.0) -> None:
        self._name = name
        self._patience = patience
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._queue = queue.SimpleQueue()
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
        """Run `work(*args)` on the thread and return its result, or raise its error.

        If the caller is cancelled, queued work is dropped and begun work goes on.

        Raises:
            StateError: the worker is not running, or too many calls wait for it.
        """
        if not self._is_running:
            raise StateError(f"Thread {self._name} is not running: the agent is about to end.")
        if self._queue.qsize() >= MOST_CALLS:
            raise StateError(f"Thread {self._name} has too much to do: its disk may hang.")

        future: Future[R] = Future()
        self._queue.put((future, functools.partial(work, *args)))
        return await asyncio.wrap_future(future)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        show_thread_name(self._name)
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
#
# One replace is one call on the worker thread: a call for each step would cost more than the steps.

SIZE_LIMIT = 64 * 1024 * 1024
"""The most bytes of a file that are read."""

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""How the directory and its files are opened. A pipe in the place of a file does not block."""

ADVICE = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "raise the quota or free some space there",
    errno.EROFS: "mount it read-write",
    errno.EACCES: "let the agent's user own it",
    errno.EPERM: "let the agent's user own it",
    errno.ENOENT: "the directory was removed while the agent ran: restart the agent",
    errno.EIO: "look for disk errors in the kernel's log",
}
"""What to do about an error of the disk."""


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
        """Open the directory; make it (0750) if it is missing. Take write from others.

        Raises StateError.
        """
        directory = await offload.call(_open_directory, path)
        return cls(path, directory, files(directory), offload)

    async def read(self, name: str) -> bytes | None:
        """Return the content, or None when the file is absent. Raises StateError."""
        with _state_errors(self._path / _checked(name), "read"):
            return await self._offload.call(_read, self._directory, self._path / name)

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        """Replace the content durably; the file `keep` receives the old content.

        Raises StateError, see replace().
        """
        if keep is not None:
            _checked(keep)
        with _state_errors(self._path / _checked(name), "written"):
            await self._offload.call(replace, self._files, name, data, keep)

    async def check(self) -> None:
        """Check without writing that files can be replaced. Raises StateError."""
        with _state_errors(self._path, "written"):
            await self._offload.call(check_writable, self._directory, self.place)

    def close(self) -> None:
        """Close the directory; no call may follow."""
        os.close(self._directory)


def _checked(name: str) -> str:
    if not name or name.startswith(".") or "/" in name:
        raise ValueError(f"{name!r} is not the name of a state file")
    return name


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

    mode = stat.S_IMODE(os.fstat(directory).st_mode)
    if mode & stat.S_IWOTH:  # a user who can write there can replace the state
        log.warning("state.open_to_all", directory=str(path), mode=f"{mode:04o}")
        with contextlib.suppress(PermissionError):
            os.fchmod(directory, mode & ~stat.S_IWOTH)
    return directory


@contextlib.contextmanager
def _state_errors(path: Path, what: str) -> Iterator[None]:
    """Turn an OSError into a StateError that says what to do."""
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "look at the directory and its file system")
        reason = error.strerror or type(error).__name__
        raise StateError(f"{path} cannot be {what}: {reason}; {advice}.") from error


# Reads small files that people write, up to a size limit.


def read_file(path: Path, limit: int, *, needed: bool = True) -> bytes | None:
    """Return the content of a file of at most `limit` bytes; None: it is missing, if not `needed`.

    Blocks for as long as the file system hangs. Raises SettingsError.
    """
    try:
        # Not is_file(): from Python 3.14 on, a file that cannot be reached is a missing one to it.
        mode = path.stat().st_mode
        if not needed and not stat.S_ISREG(mode):
            return None

        # A pipe may block for ever. /dev/stdin may be one.
        if stat.S_ISFIFO(mode) and path.parent != Path("/dev"):
            said = "is a pipe, which may block for ever; name a regular file"
            raise SettingsError(f"{path}: {said}")

        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        if not needed and error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            return None
        said = f"cannot be read: {error.strerror or error}; check the path and its rights"
        raise SettingsError(f"{path}: {said}") from error

    check_size(path, content, limit)
    return content


def check_size(path: Path, content: bytes, limit: int) -> None:
    """Raise SettingsError for more than `limit` bytes."""
    if len(content) > limit:
        raise SettingsError(f"{path}: is larger than {limit // 1024} KiB; is it the right file?")


# Watches the kubelet's device plugin directory, with its sockets.
#
# It is on the node's disk, and an Allocate needs its state at once: the loop inspects it.

POLL = 5.0
"""Seconds after which the directory is watched anew: so long, nothing that inotify missed stays
unseen."""

AGAIN = 0.2
"""Seconds after which the directory is inspected again while inotify cannot watch it."""

ENDS = Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.UNMOUNT | Mask.IGNORED | Mask.Q_OVERFLOW
"""After these events, the directory at this path may be another one, or events are missing."""

WATCHED = Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO | ENDS | Mask.ONLYDIR

EVERYTHING = ""


class DirectoryWatch:
    """The SocketWatch port over `directory`. `kubelet`: the name of the kubelet's own socket."""

    def __init__(self, directory: Path, kubelet: str = "kubelet.sock") -> None:
        self._directory = directory
        self._kubelet = kubelet

    def epoch(self) -> KubeletEpoch | None:
        """The kubelet's present socket, or None. Raises KubeletError."""
        return self._seen(self._kubelet)

    def exists(self, name: str) -> bool:
        """True when `name` exists. Raises KubeletError."""
        return self._seen(name) is not None

    async def changes(self) -> AsyncGenerator[str, None]:
        """Yield names that were created, removed or replaced. Never ends.

        The empty name means: any may have changed. It comes first, and after POLL seconds at most;
        every AGAIN seconds while the directory is missing or inotify cannot be used.
        """
        loop, obstacle = asyncio.get_running_loop(), ""
        with contextlib.ExitStack() as stack:
            # Kept for good: a user has 128 of them, and others may have taken the last one.
            inotify: Inotify | None = None
            while True:
                try:
                    inotify = inotify or stack.enter_context(Inotify(sync_timeout=0))
                    inotify.add_watch(self._directory, WATCHED)
                    due = loop.time() + until_tick(POLL)
                except OSError as error:
                    reason = error.strerror or str(error)
                    if reason != obstacle:
                        log.info("watch.polling", directory=str(self._directory), err=reason)
                    obstacle, due = reason, loop.time() + AGAIN
                yield EVERYTHING

                is_over = False
                while not is_over and loop.time() < due:
                    events = await _events(inotify, due - loop.time())
                    for name in dict.fromkeys(str(event.name) for event in events if event.name):
                        yield name
                    is_over = any(event.mask & ENDS for event in events)

    def _seen(self, name: str) -> KubeletEpoch | None:
        path = self._directory / name
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise KubeletError(
                f"{path} cannot be looked at: {error.strerror}; let the agent read the kubelet's "
                "device plugin directory."
            ) from error
        return KubeletEpoch(inode=status.st_ino, ctime_ns=status.st_ctime_ns)


async def _events(inotify: Inotify | None, seconds: float) -> list[Event]:
    """Wait for the next events, so long at most; none come without inotify."""
    if inotify is None:
        await asyncio.sleep(seconds)
        return []

    loop, news = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(inotify.fd, news.set)
    try:
        await await_event(news, seconds)
    finally:
        loop.remove_reader(inotify.fd)

    # Not Inotify.get(): it loses events when its caller is cancelled.
    return list(iter(inotify.sync_get, None))
