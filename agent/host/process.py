"""The process on its host: clock, identity, lock, threads, systemd."""

import asyncio
import contextlib
import datetime as dt
import fcntl
import functools
import os
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar, TypeVarTuple

import structlog

from agent.errors import PermissionFault, StateError, cap
from agent.kit.tasks import show_thread_name
from agent.kit.timing import await_event


class SystemClock:
    """The Clock port over the system clock."""

    def now(self) -> dt.datetime:
        """The current time, aware, in UTC."""
        return dt.datetime.now(dt.UTC)


# Reads the name of this host and the ids of this boot and this machine.

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

    async def take(self, stop: asyncio.Event) -> bool:
        """Wait in standby until this process holds the lock; False: `stop` was set before that.

        Raises PermissionFault.
        """
        log.info("lock.standby", path=str(self._path), holder=self.holder())
        while not self.try_take():
            # flock gives no notice of a release.
            if await await_event(stop, POLL):
                return False
        log.info("lock.taken", path=str(self._path))
        return True

    def holder(self) -> str:
        """What the file says about its holder, for people; empty when it says nothing."""
        with contextlib.suppress(OSError):
            handle = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                return cap(os.read(handle, 64).decode(errors="replace"), 64)
            finally:
                os.close(handle)
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


# Runs blocking work in order on one daemon thread, with a bounded queue.
#
# The loop's own executor joins its threads at exit: one disk that does not answer would keep the
# process from ever ending.

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Worker:
    """An Offload (agent.kit.tasks) with a queue of at most `limit`; further callers wait.

    Use it as an async context manager. Leaving it finishes the queued work, for at most `patience`
    seconds. Then the thread is abandoned, which does not keep the process from ending.
    """

    def __init__(self, name: str, limit: int, patience: float = 2.0) -> None:
        self._name = name
        self._patience = patience
        self._slots = asyncio.Semaphore(limit)
        self._queue: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None]
        self._queue = queue.SimpleQueue()
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._closed = True

    async def __aenter__(self) -> Self:
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        self._queue.put(None)
        try:
            if not await await_event(self._ended, self._patience):
                log.warning("worker.abandoned", worker=self._name, after=self._patience)
        finally:
            self._abandoned.set()

    async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        """Run `work(*args)` on the thread and return its result, or raise its error.

        If the caller is cancelled, queued work is dropped and begun work goes on. Both keep their
        place in the queue until the thread has passed them.

        Raises:
            StateError: the worker is not running.
        """
        await self._slots.acquire()
        if self._closed:
            self._slots.release()
            raise StateError(f"Thread {self._name} is not running: the agent is about to end.")

        future: asyncio.Future[R] = self._loop.create_future()
        self._queue.put((future, functools.partial(work, *args)))
        return await future

    def _work(self) -> None:
        show_thread_name(self._name)
        while (queued := self._queue.get()) is not None:
            future, work = queued
            result = error = None
            try:
                if self._abandoned.is_set():
                    raise StateError("The agent ended before this was begun.")  # noqa: TRY301 -- as the work's
                if not future.cancelled():
                    result = work()
            except BaseException as caught:  # noqa: BLE001 -- raised in the caller
                error = caught
            self._tell(self._finish, future, result, error)
        self._tell(self._ended.set)

    def _finish(
        self, future: asyncio.Future[Any], result: object, error: BaseException | None
    ) -> None:
        """Let the next caller queue its work, and tell this one, in one call on the loop."""
        self._slots.release()
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _tell(self, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call back on the loop. A closed loop is ignored."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)


class Systemd:
    """Notifies the service manager over the datagram socket `address` (`@…`: an abstract one).

    Without an address there is no service manager, and nothing is sent. A message that cannot be
    sent is logged and lost. Source: sd_notify(3).
    """

    def __init__(self, address: str = "", watchdog: dt.timedelta | None = None) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog = watchdog
        """The longest time allowed between two calls of alive(), or None."""

    def ready(self) -> None:
        """Report that the service serves, at first or again after a reload."""
        self._send("READY=1")

    def status(self, text: str) -> None:
        """Set the line in `systemctl status`."""
        self._send(f"STATUS={' '.join(text.split())}")

    def stopping(self) -> None:
        """Report that the service is about to end."""
        self._send("STOPPING=1")

    def reloading(self) -> None:
        """Report that a reload began, with its time of CLOCK_MONOTONIC (Type=notify-reload)."""
        stamp = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(f"RELOADING=1\nMONOTONIC_USEC={stamp}")

    def alive(self) -> None:
        """Send the watchdog's keep-alive."""
        self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.setblocking(False)
                channel.sendto(message.encode(), self._address)
        except OSError as error:
            word = message.partition("=")[0]
            log.warning("systemd.not_told", message=word, err=error.strerror)


def service_notifier(environment: Mapping[str, str], pid: int) -> Systemd:
    """The notifier for the service manager that started this process (`pid`), if one did."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        if address:
            log.warning("systemd.unknown_address", address=address[:64])
        return Systemd()
    # Whether the watchdog applies to this process: sd_watchdog_enabled(3).
    text = environment.get("WATCHDOG_USEC", "")
    is_ours = environment.get("WATCHDOG_PID", str(pid)) == str(pid)
    if not is_ours or not text.isascii() or not text.isdigit() or not int(text):
        return Systemd(address)
    return Systemd(address, dt.timedelta(microseconds=int(text)))
