"""NVML in this process: the library's file and errors, the threads that call it, the session.

The module `pynvml` implements the calls; tests use their own. Importing it costs memory and time,
so only what opens a real driver imports this file.
"""

import asyncio
import collections
import contextlib
import ctypes
import os
import queue
import re
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pynvml
import structlog

from agent.errors import DriverError, DriverMissing, GpuError, cap
from agent.kit.tasks import show_thread_name
from agent.kit.timing import NOISE, Lag, await_event, until_tick
from agent.model import DriverEvent, EventKind, GpuUuid, Trouble

log = structlog.get_logger(__name__)

T = TypeVar("T")

# The library's file, and what its errors mean.

SONAME: Final = "libnvidia-ml.so.1"
MAPS: Final = Path("/proc/self/maps")
_MAPPED: Final = re.compile(r"(/(?:.*/)?libnvidia-ml\.so[^/\n]*?)(?: \(deleted\))?$", re.MULTILINE)
_TRIPLES: Final = ("lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
PLACES: Final = (
    *(f"{top}/{name}" for top in ("usr", ".") for name in ("lib64", *_TRIPLES)),
    *(f"usr/{name}/nvidia/current" for name in _TRIPLES),
    "usr/lib/wsl/lib",  # before usr/lib, where WSL may have a file of the distribution
    "usr/lib",
    "usr/lib/nvidia/tesla",
    "usr/local/lib",
    "usr/local/glibc/usr/lib",
    "run/opengl-driver/lib",
    "home/kubernetes/bin/nvidia/lib64",
    "opt/nvidia/lib64",
)
"""Directories of the driver's library on a host.

Debian and RHEL, Debian's alternatives, WSL, Arch, Bottlerocket, Talos (two), NixOS, Google's COS.
"""

FIELD_RECOVERY_ACTION: Final = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION. Older releases of pynvml do not name it."""

DRIVER: Final = "the driver"
"""The name in place of a GPU's for calls about the whole driver."""

NO_ANSWER: Final = "no answer in time"

Handle = Any
"""The library's opaque pointer to a GPU."""

_TROUBLES: Final = {
    pynvml.NVML_ERROR_GPU_IS_LOST: Trouble.LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: Trouble.LOST,
    pynvml.NVML_ERROR_NOT_FOUND: Trouble.LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: Trouble.RESET,
    pynvml.NVML_ERROR_NO_PERMISSION: Trouble.DENIED,
    pynvml.NVML_ERROR_NOT_SUPPORTED: Trouble.UNSUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: Trouble.UNSUPPORTED,
}
_MISSING: Final = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        f"{SONAME} is not found",
        (
            "install the NVIDIA driver on this node, let the container runtime mount it, or name "
            "the file with --nvml-library"
        ),
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "the NVIDIA kernel module is not loaded",
        "load it (modprobe nvidia) or install the driver for this kernel",
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the driver's library and kernel module differ in version",
        "reboot, or reload the module and restart the agent",
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "the driver may not be used: /dev/nvidiactl cannot be opened by this process",
        "run as a user who may open it, or let the container runtime give it",
    ),
}
"""What is missing, and the remedy."""


_GRAVE: Final = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})


class CallFailed(GpuError):  # noqa: N818 -- names what happened
    """A call about one GPU failed, or has not returned in time (SILENT)."""

    def __init__(self, gpu: str, text: str, trouble: Trouble) -> None:
        super().__init__(gpu, text, lost=trouble is Trouble.LOST)
        self.trouble = trouble


NvmlLibrary = Any
"""The module pynvml, which has no types, or one with its functions.

Each call may raise its `NVMLError`, whose `value` is the code. Functions that have versions are
called by their version: with an older driver, the unversioned ones of pynvml raise another kind of
error.
"""


def library_below(root: Path | None) -> Path | None:
    """Find the library's file below a directory laid out like a host's `/`, or return None.

    Source: NVIDIA k8s-device-plugin internal/lm and go-nvlib, which search these places.
    """
    places = (root / place / SONAME for place in PLACES) if root is not None else ()
    return next((path for path in places if path.is_file()), None)


def bind(library: NvmlLibrary, path: Path | None) -> None:
    """Make `library` use the file at `path` instead of the soname. May block (dlopen).

    pynvml loads the soname only while its `nvmlLib` is None, so this sets it first and drops the
    kept function pointers of another library. It resolves links: a new version behind the same link
    is another library.

    Raises DriverMissing.
    """
    # The loader keeps the file that it has for the soname: to load it again changes nothing.
    if path is None and library.nvmlLib is not None:
        return

    file = Path(os.path.realpath(path)) if path is not None else library_below(Path("/"))
    if file is None or getattr(library.nvmlLib, "_name", None) == str(file):
        return

    try:
        if file.is_file() and _is_cut_off(file):  # the loader would end the process with SIGBUS
            raise _refused_by_loader(str(path or file), "its end is missing")
        if path is None:
            return  # pynvml loads it, by the soname

        loaded = ctypes.CDLL(str(file))
    except OSError as error:
        raise _refused_by_loader(str(path or file), str(error)) from error

    getattr(library, "_nvmlGetFunctionPointer_cache", {}).clear()
    library.nvmlLib = loaded


def _is_cut_off(file: Path) -> bool:
    """Whether an ELF file ends before its table of sections, which is the last part of it.

    Raises OSError. Source: elf(5), Elf64_Ehdr; the machines with such drivers are little-endian.
    """
    with file.open("rb") as opened:
        header = opened.read(64)

    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        return False  # the loader says what it is

    start, size, count = struct.unpack_from("<Q10x2H", header, 40)
    return int(start + size * count) > file.stat().st_size


def missing(library: NvmlLibrary, error: Exception, sys_root: Path) -> DriverMissing | None:
    """What is missing for nvmlInit where the code of `error` does not tell; None: it does.

    Without its device files it says that the kernel's module is not loaded. NVIDIA's runtime covers
    /proc/driver/nvidia in containers, but not /sys.
    """
    if code(error) == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        # Why the loader does not take the library that is there; None: there is none. It passes
        # over a file of another architecture as if it were not there.
        for place in (SONAME, library_below(Path("/"))):
            try:
                ctypes.CDLL(str(place or SONAME))
            except OSError as refusal:
                text = str(refusal)
                if place is not None and (place != SONAME or "No such file" not in text):
                    return _refused_by_loader(str(place), text)
        return None

    # Another library has the name, such as a stub of a container's image.
    if code(error) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
        file = getattr(library.nvmlLib, "_name", None) or SONAME
        return _refused_by_loader(str(file), "it has no function nvmlInit_v2")

    is_loaded = (sys_root / "module/nvidia").exists()
    if code(error) != pynvml.NVML_ERROR_DRIVER_NOT_LOADED or not is_loaded:
        return None

    return DriverMissing(
        "the NVIDIA kernel module is loaded, and this process has no device file of it "
        "(/dev/nvidiactl)",
        remedy="let the container runtime give the agent the GPUs (runtimeClassName, "
        "NVIDIA_VISIBLE_DEVICES), or make the files with nvidia-modprobe -u -c 0 on the host",
    )


def _refused_by_loader(file: str, text: str) -> DriverMissing:
    # The loader passes over such a file as if it were not there.
    names = file, os.path.realpath(file)
    if text.startswith(names) and "No such file" in text and Path(file).is_file():
        text = "it is built for another architecture"

    # The soname is no path: what the loader searched for by it is somewhere. A path may be wrong.
    return DriverMissing(
        f"{file} cannot be loaded as the driver's library ({cap(text)})",
        remedy="install the driver of this node's architecture again, or name another file with "
        "--nvml-library"
        if os.access(file, os.F_OK) or file == SONAME
        else "correct --nvml-library or omit it",
    )


def successor(library: NvmlLibrary, path: Path | None, maps: Path = MAPS) -> Path | None:
    """The file that a new process would load in place of the loaded library; None: the same.

    An upgrade of the driver changes the target of the soname's link, but the loader keeps the file
    that it has for the soname.
    """
    ours = _loaded(library, maps)
    by_link = {file.with_name(SONAME).resolve() for file in ours}
    theirs = {Path(os.path.realpath(path))} if path is not None and ours else by_link
    return next((file for file in sorted(theirs - ours) if file.is_file()), None)


def removed(library: NvmlLibrary, maps: Path = MAPS) -> Path | None:
    """The loaded library if neither it nor the soname's link beside it is there, else None."""
    ours = _loaded(library, maps)
    is_there = any(file.is_file() or file.with_name(SONAME).is_file() for file in ours)
    return None if is_there else min(ours, default=None)


def _loaded(library: NvmlLibrary, maps: Path) -> set[Path]:
    """The library's files in this process: by its path, or as the loader mapped the soname."""
    name = str(getattr(library.nvmlLib, "_name", None) or "")
    if "/" in name:
        return {Path(name)}

    # ctypes keeps the soname as it was given; only the kernel knows the file behind it.
    text = ""
    with contextlib.suppress(OSError):
        text = maps.read_text(encoding="utf-8", errors="replace")
    return set(map(Path, _MAPPED.findall(text)))


def code(error: Exception) -> int:
    """The code of an NVMLError."""
    return int(getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN))


def is_unable(error: Exception) -> bool:
    """True when this GPU or driver does not support the call."""
    return _TROUBLES.get(code(error)) is Trouble.UNSUPPORTED


def maybe(
    library: NvmlLibrary, ask: Callable[..., T], *args: object, is_sign: bool = False
) -> T | None:
    """Return the answer, or None if this GPU or driver does not support the call.

    A sign alone proves no fault: it is None also if the call fails in another way.

    Raises other NVMLErrors; for a sign only that the GPU is lost, must be reset, or the driver is
    gone.
    """
    try:
        return ask(*args)
    except library.NVMLError as error:
        is_grave = code(error) in _GRAVE or driver_wide(error) is not None
        if is_unable(error) or (is_sign and not is_grave):
            return None
        raise


def driver_wide(error: Exception, *, about_gpu: bool = True) -> DriverError | None:
    """The DriverError for `error` if it concerns the whole driver, or None: it concerns one GPU.

    NO_PERMISSION concerns the driver only if the call was not `about_gpu`: a GPU's device file may
    be closed to the agent, or its processes belong to another user.
    """
    missing = _MISSING.get(code(error))
    if missing is not None and not (about_gpu and code(error) == pynvml.NVML_ERROR_NO_PERMISSION):
        reason, remedy = missing
        return DriverMissing(reason, remedy=remedy)

    if code(error) == pynvml.NVML_ERROR_UNINITIALIZED:
        return DriverError("the driver ended the session; a new one begins")

    return None


def failure(error: Exception, gpu: str) -> DriverError | CallFailed:
    """What the error of a call means for `gpu`, which may be DRIVER."""
    if isinstance(error, TimeoutError):
        what, otherwise, found = "the driver does not answer", NO_ANSWER, Trouble.SILENT
    elif isinstance(error, ValueError):  # the binding could not decode a text
        what, otherwise, found = "the driver's answer cannot be decoded", "", Trouble.FAILED
    else:
        what, otherwise = "the driver answers with an error", f"error {code(error)}"
        found = _TROUBLES.get(code(error), Trouble.FAILED)

    text = cap(str(error)) or otherwise
    return DriverError(f"{what}: {text}") if gpu == DRIVER else CallFailed(gpu, text, found)


def text_of(value: str | bytes) -> str:
    """Decode a string of the library: fields of structures are bytes, results are str."""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


# The threads that make calls, which may never return.

PATIENCE: Final = 0.02
"""Seconds between looks at calls that wait. While each thread is in a call, another is started."""


class _Call(msgspec.Struct, eq=False):
    """One call about a GPU. `end`: of its deadline, by the clock of Lag."""

    gpu: str
    work: Callable[[], Any]
    end: float
    answer: Any


class GpuThreads:
    """Runs blocking calls, of each GPU one after the other. Call all methods on the loop.

    - At rest one thread makes all calls, and wakes the loop once after the last of them. A call
      that does not return in PATIENCE keeps its thread, and a new thread makes those behind it.
    - A call that exceeds its deadline is given up. Further calls about that GPU are refused until
      it returns; then `on_return` is called.
    - A GPU's name is its UUID, or its index while the UUID is unknown: a GPU that hangs then may
      hold a second thread. One more name is for the whole driver.
    """

    def __init__(self, deadline: float, on_return: Callable[[], object] = lambda: None) -> None:
        self._deadline = deadline
        self._on_return = on_return
        self._loop = asyncio.get_running_loop()
        self._lag = Lag()

        self._calls: dict[str, _Call] = {}
        """The call about each GPU that waits for a thread, is on one, or has just returned."""
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        """The calls that wait; None ends the thread that takes it."""
        self._inside: set[_Call] = set()
        self._returned: collections.deque[tuple[_Call, Callable[[], None]]] = collections.deque()
        """The calls that have returned, and what hands each answer to its caller."""
        self._threads = 0
        self._spare = 1
        """How many threads stay that are in no call."""
        self._timer: asyncio.TimerHandle | None = None

    async def call(self, gpu: str, work: Callable[[], T], deadline: float | None = None) -> T:
        """Run `work` on a thread after earlier calls about that GPU; return or raise its result.

        Raises TimeoutError after the deadline, which starts again once the earlier calls have
        returned; and at once while one of them is stuck. Cancelling the caller does not stop a
        call.
        """
        with contextlib.suppress(TimeoutError):
            async with self._lag.within(self._deadline):
                while gpu in self._calls and not self._is_stuck(self._calls[gpu]):
                    await asyncio.wait([self._calls[gpu].answer])

        if gpu in self._calls:
            raise TimeoutError(f"an earlier call about {gpu} has not returned")

        seconds = deadline or self._deadline
        answer: asyncio.Future[T] = self._loop.create_future()
        call = _Call(gpu, work, self._lag.clock() + seconds - NOISE, answer)
        self._calls[gpu] = call
        # Not before this turn of the loop has ended: beside a running loop, the thread would wait
        # for the interpreter at each call.
        self._loop.call_soon(self._dispatch, call)

        async with self._lag.within(seconds):
            return await asyncio.shield(answer)

    async def drained(self) -> bool:
        """Wait until every call has left or exceeded its deadline. False: one is still inside."""
        while self._calls:
            left = max(call.end for call in self._calls.values()) - self._lag.clock()
            if left <= 0:
                return False
            await asyncio.wait([call.answer for call in self._calls.values()], timeout=left)

        return True

    def close(self) -> None:
        """End all threads; one that hangs stays until it is back or the process ends."""
        self._spare = 0
        self._loop.call_soon(self._dispatch)  # after the calls of this turn

    def _is_stuck(self, call: _Call) -> bool:
        # By the time in which the loop ran: a starved process blames no GPU.
        return self._lag.clock() >= call.end

    def _dispatch(self, fresh: _Call | None = None) -> None:
        """Queue a call, hand on what has returned, and keep as many threads as are needed."""
        if fresh is not None:
            self._queue.put(fresh)

        if self._timer is not None:
            self._timer.cancel()

        # Before the answers are taken: a thread adds its answer and then takes the next call. If
        # it did so in between, the queue would seem empty here, and no timer would look again.
        is_empty = self._queue.empty()
        while self._returned:
            call, settle = self._returned.popleft()
            del self._calls[call.gpu]
            if self._is_stuck(call):
                self._loop.call_soon(self._on_return)
            settle()
            # Read here: asyncio would log an error where the caller was given up before.
            call.answer.exception()

        if is_empty:
            for _ in range(self._threads - len(self._inside) - self._spare):
                self._queue.put(None)
                self._threads -= 1
            return

        # A thread that is in no call takes the next one. A busy machine may let it wait.
        if len(self._inside) >= self._threads:
            # The loop's own executor joins its threads at exit, and one that hangs would hold it.
            thread = threading.Thread(target=self._make_calls, name="nvml calls", daemon=True)
            with contextlib.suppress(
                RuntimeError
            ):  # a limit of the unit: the next look tries again
                thread.start()
                self._threads += 1

        self._timer = self._loop.call_later(PATIENCE, self._dispatch)

    def _make_calls(self) -> None:
        """Make the calls that wait, until there are threads enough. Runs on a thread."""
        show_thread_name("nvml calls")
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while (call := self._queue.get()) is not None:
                self._inside.add(call)
                try:
                    settle = partial(call.answer.set_result, call.work())
                except BaseException as error:  # noqa: BLE001 -- raised in the caller
                    settle = partial(call.answer.set_exception, error)
                self._inside.discard(call)
                self._returned.append((call, settle))
                # One wake-up of the loop for all calls of a round. If the next call hangs, the
                # timer hands on what this one has answered.
                if self._queue.empty():
                    self._loop.call_soon_threadsafe(self._dispatch)

            # What waited behind the last call may have been the word to end.
            self._loop.call_soon_threadsafe(self._dispatch)


# The wait for events, on a thread of its own.

_KINDS: Final = {
    pynvml.nvmlEventTypeXidCriticalError: EventKind.XID,
    pynvml.nvmlEventTypeDoubleBitEccError: EventKind.ECC_DOUBLE,
    pynvml.nvmlEventMigConfigChange: EventKind.CHANGED,
}
WANTED: Final = sum(_KINDS)  # each is one bit

WAIT_MS: Final = 1000
"""Milliseconds of one wait in the library, which only an event ends sooner.

Stopping takes as long. An idle wait costs one wake-up and 0.01 % of a core.
"""

STALL: Final = 2.5
"""Seconds (2.5 x WAIT_MS): a wait longer than two of these does not return."""

CLOSED: Final = "the driver session was closed"

FAREWELL: Final = 1.2
"""Seconds for the thread to end: a wait, and a late turn of a busy machine."""


Registered = tuple[GpuUuid, str, int]
"""A GPU: its UUID, why it sends no events (empty: it does), and its handle's address."""


class EventStream:
    """The events of one event set, which the stream makes and frees.

    Events that nobody has taken yet wait in the order in which they came first, equal ones counted
    together: a storm hides no fatal XID.
    """

    def __init__(self, library: NvmlLibrary) -> None:
        self._event_set: Any = None
        self.ended = asyncio.Event()
        """Set once the thread has left the library and will not return to it."""
        self.obstacles: dict[str, str] = {}
        """Of each GPU that was asked (its UUID, or `index N`) why it does not report to this
        stream; empty: it does."""
        self.known: dict[int, GpuUuid] = {}
        """The GPU of each handle's address; another dict once the indexes have changed."""
        self._library = library
        self._loop = asyncio.get_running_loop()
        self._waiting: collections.Counter[DriverEvent] = collections.Counter()
        self._failure: DriverError | None = None
        self._news = asyncio.Event()
        self._turns = 0
        self.begun = threading.Event()
        """Set it to let the thread wait for events; if the stream has failed, it frees the set."""
        self._lock = threading.Lock()
        self._users = 1

    # On the loop.

    @property
    def is_open(self) -> bool:
        """True while GPUs can be registered; soon its thread waits for their events."""
        return self._event_set is not None and self._failure is None

    def start(self) -> None:
        """Start the thread, which waits for `begun`. Raises DriverError if there is none."""
        try:
            threading.Thread(target=self._serve, name="nvml-events", daemon=True).start()
        except RuntimeError as error:
            raise DriverError(f"no thread can be started to wait for events: {error}") from error

    def settle(self, gpu: str, obstacle: str, where: int | None = None) -> None:
        """Note the answer of a GPU to its registration, and log once why it does not report.

        `where`: its handle's address.
        """
        if where is not None:
            # Where it was before, another GPU may be now, although no scan has seen the change yet.
            for old in [old for old, known in self.known.items() if known == gpu]:
                del self.known[old]
            self.known[where] = GpuUuid(gpu)

        if obstacle and self.obstacles.get(gpu) != obstacle:
            log.warning("driver.no_events", gpu=gpu, err=obstacle)
        self.obstacles[gpu] = obstacle

    async def next(self) -> DriverEvent:
        """Wait for the next event. Raises DriverError once it failed and is empty.

        A wait of the thread that does not return is a failure.
        """
        while True:
            self._news.clear()
            if self._waiting:
                with self._lock:
                    event = next(iter(self._waiting))
                    self._waiting[event] -= 1
                    self._waiting = +self._waiting  # without those that nobody waits for any more
                return event

            if self._failure is not None:
                raise self._failure

            # A stopped or starved process gets two periods: in the second one the thread runs.
            turns = self._turns
            for _ in range(2):
                has_news = await await_event(self._news, until_tick(STALL) + STALL)
                if has_news or turns != self._turns:
                    break
            else:
                self.fail(DriverError("the driver does not return from a wait for events"))

    def fail(self, error: DriverError) -> None:
        """End the stream: its reader raises `error`, and the thread ends after its wait.

        Also of a stream that has never begun: its thread frees the set.
        """
        self._failure = self._failure or error
        self._news.set()
        self.begun.set()

    async def stop(self) -> bool:
        """End the thread. False when it does not end in time: then do not touch the set."""
        self.fail(DriverError(CLOSED))
        return await await_event(self.ended, FAREWELL)

    # On the threads that make calls.

    def create(self) -> None:
        """Create the set. Blocks. Raises NVMLError, DriverError when the stream has ended."""
        with self._inside():
            self._event_set = self._library.nvmlEventSetCreate()

    def register(self, open_gpu: Callable[[], Handle]) -> Registered:
        """Register a GPU with the set. Blocks. A GPU without events is an answer too.

        Raises NVMLError, GpuError, ValueError (undecodable text): these failures may pass.
        Raises DriverError when the stream has ended.
        """
        library, refused = self._library, ""
        with self._inside():
            handle = open_gpu()
            # Read here, because a lost GPU cannot tell it when its event comes: NVIDIA's plugin
            # asks then, and marks all GPUs unhealthy without an answer (internal/rm/health.go).
            uuid = GpuUuid(text_of(library.nvmlDeviceGetUUID(handle)))
            try:
                mask = library.nvmlDeviceGetSupportedEventTypes(handle) & WANTED
                if mask:  # an empty mask is an invalid argument
                    library.nvmlDeviceRegisterEvents(handle, mask, self._event_set)
                if not mask & pynvml.nvmlEventTypeXidCriticalError:
                    refused = "it does not report XIDs"
            except library.NVMLError as error:
                # NVIDIA's plugin serves such a GPU as "too old to support healthchecking", without
                # a word in its list. Here it is unmonitored, and probes watch it.
                if not is_unable(error):
                    raise
                refused = f"it has no events: {error}"

        return uuid, refused, _address(handle)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Keep the set while the block uses it. Raises DriverError when the stream has ended."""
        with self._lock:
            if not self._users:
                raise DriverError("the stream of events has ended")
            self._users += 1

        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        """Free the set after its last user: a call may last longer than the waiting thread."""
        # To free a set while another thread registers a GPU with it is undefined in NVML.
        with self._lock:
            self._users -= 1
            is_last = not self._users

        if is_last and self._event_set is not None:
            with contextlib.suppress(self._library.NVMLError):
                self._library.nvmlEventSetFree(self._event_set)

    # On its own thread.

    def _serve(self) -> None:
        """Run the thread and report its end: a silent end would look like healthy GPUs."""
        show_thread_name("nvml-events")
        self.begun.wait()
        try:
            while self._failure is None:
                self._turns += 1
                self._wait_in_library()
        except Exception as error:  # noqa: BLE001 -- any error that ends the thread is reported
            text = f"the thread that waits for events has died: {error!r}"
            self._tell(self.fail, error if isinstance(error, DriverError) else DriverError(text))

        self._leave()
        self._tell(self.ended.set)

    def _wait_in_library(self) -> None:
        """Wait for one event, at most WAIT_MS. Raises DriverError."""
        try:
            data = self._library.nvmlEventSetWait_v2(self._event_set, WAIT_MS)
        except self._library.NVMLError as error:
            if code(error) == pynvml.NVML_ERROR_TIMEOUT:
                return
            if (failure := driver_wide(error)) is not None:
                raise failure from error
            # One lost GPU fails the wait for all. NVIDIA's plugin then marks all GPUs unhealthy
            # (checkHealth, "Error waiting for event"); who listens here scans and probes each.
            raise DriverError(f"waiting for events failed: {error}") from error

        is_xid = data.eventType & pynvml.nvmlEventTypeXidCriticalError
        kind = EventKind.XID if is_xid else _KINDS.get(data.eventType)
        if kind is not None:
            xid = int(data.eventData) if is_xid else None
            self.put(DriverEvent(kind, self._uuid(data.device), xid))

    def _uuid(self, handle: Handle) -> GpuUuid | None:
        """The GPU of a handle, first by its address: a lost GPU does not answer with its UUID."""
        with contextlib.suppress(self._library.NVMLError, ValueError):
            known = self.known.get(_address(handle))
            return known or GpuUuid(text_of(self._library.nvmlDeviceGetUUID(handle)))
        return None

    def put(self, event: DriverEvent) -> None:
        """Add an event, from any thread."""
        with self._lock:
            # A broken GPU can report 10,000 XIDs a second, but few different ones: the catalog has
            # 172 numbers.
            self._waiting[event] += 1

        if not self._news.is_set():
            self._tell(self._news.set)

    def _tell(self, callback: Callable[..., object], *args: object) -> None:
        """Call back on the loop; a closed loop ends the stream."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._failure = self._failure or DriverError(CLOSED)


def _address(handle: Handle) -> int:
    """The address that a handle points to, which identifies the GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


# The session with the library: it begins when it is needed, and again after it broke.

OPEN_DEADLINE: Final = 10.0
"""Seconds: without a persistence daemon, the first call wakes the GPUs, which takes seconds."""

CLOSE_DEADLINE: Final = 3.0
"""Seconds, one wait for events (WAIT_MS) and a call: each step of shut() has a deadline of its own,
and a driver that hangs would use up all of them."""

MOST_SESSIONS: Final = 10_000
"""A library that has ended so many, one after the other, does not count them: none is left."""


class OpenedSession(msgspec.Struct, eq=False):
    """A session that has begun. No two are equal, also with the same version.

    `links`: what the driver says of the links between the GPUs of its last scan, by GPU.
    """

    driver_version: str
    links: dict[GpuUuid, Any] = msgspec.field(default_factory=dict)


class NvmlSession:
    """Opens the sessions of the process, one after the other. Call all methods on the loop.

    - `find` returns the library file to use.
    - `stream`: the newest one; it ends with its session. It hears CHANGED when a stuck call has
      returned: a GPU that was silent answers, so all are scanned and probed again.
    - A late answer of an earlier session does not end the current one, and no call of an earlier
      session begins.
    """

    def __init__(
        self, library: NvmlLibrary, find: Callable[[], Path | None], sys_root: Path, deadline: float
    ) -> None:
        self._threads = GpuThreads(deadline, self._on_return)
        self._library = library
        self._find = find
        self._sys_root = sys_root
        self._preparing = asyncio.Lock()
        """Held while a session begins or all end."""
        self._beginning: asyncio.Task[OpenedSession | DriverError] | None = None
        self.current: OpenedSession | None = None
        """The session that has begun and not ended; reading it begins none."""
        self._broken = CLOSED
        self.withheld = ""
        """Why no session may begin; empty: one may."""
        self.stream: EventStream | None = None

    async def open(self) -> OpenedSession:
        """Return the current session, or begin one. Raises DriverMissing, DriverError.

        All who wait share one beginning and its failure. It goes on when they are cancelled or
        time out, so a slow driver is open for a later one.
        """
        if self.withheld:
            raise DriverError(self.withheld)
        if self.current is not None:
            return self.current
        if self._beginning is None or self._beginning.done():
            # It outlives who asks first, and a group would end all with it.
            self._beginning = asyncio.create_task(self._begin())  # noqa: TID251

        opened = await asyncio.shield(self._beginning)
        if isinstance(opened, DriverError):
            raise opened
        return opened

    def check(self, opened: OpenedSession) -> None:
        """Raise DriverError if that session is over."""
        if self.current is not opened:
            raise DriverError(self._broken)

    def end(self, error: DriverError, opened: OpenedSession | None = None) -> None:
        """Note that the session is over, and report it; the next call begins a new one."""
        if self.current is None or opened not in {None, self.current}:
            return

        log.warning("driver.session_ended", err=str(error))
        self.current = None
        self._broken = str(error)
        if self.stream is not None:
            self.stream.fail(error)

    async def call(self, opened: OpenedSession, gpu: str, work: Callable[[], T]) -> T:
        """Make a call about one GPU, or DRIVER.

        Raises CallFailed about a GPU; DriverError, DriverMissing: the session is over, or the call
        about the driver has failed.
        """

        def make() -> T:
            self.check(opened)  # it may have ended while the call waited
            return work()

        return await self._call(gpu, make, opened)

    async def _call(
        self,
        gpu: str,
        work: Callable[[], T],
        opened: OpenedSession | None = None,
        deadline: float | None = None,
    ) -> T:
        """Make a call. An error of the whole driver ends the session `opened`."""
        try:
            return await self._threads.call(gpu, work, deadline)
        except (TimeoutError, ValueError, self._library.NVMLError) as error:
            wide = driver_wide(error, about_gpu=gpu != DRIVER)
            if wide is not None and opened is not None:
                self.end(wide, opened)
            raise wide or failure(error, gpu) from error

    async def new_stream(self) -> EventStream:
        """Start a stream, once the thread of the last one has left the library.

        Raises DriverError.
        """
        if self.stream is not None and not await self.stream.stop():
            raise DriverError("an earlier wait for events has not returned from the driver")

        stream = EventStream(self._library)
        stream.start()
        self.stream = stream
        return stream

    async def shut(self, why: str) -> None:
        """End the session now, which closes all GPUs; a later call begins another.

        Raises DriverError when a call does not return from the library.
        """
        async with self._preparing:
            self.end(DriverError(why))
            if not await self._is_idle():
                raise DriverError("a call has not returned from the driver, which holds all GPUs")
            if await self._call(DRIVER, self._end_all):
                raise DriverError("the driver does not end the session, which holds all GPUs")

    async def close(self) -> None:
        """End the session and all threads; a second call does nothing.

        After CLOSE_DEADLINE the threads are left behind, and the process may end with its session.
        """
        self.withheld = CLOSED
        with contextlib.suppress(DriverError, TimeoutError):
            async with asyncio.timeout(CLOSE_DEADLINE):
                await self.shut(CLOSED)

        self._threads.close()

    async def _is_idle(self) -> bool:
        """Wait until no call and no event thread is in the library; False: some do not leave."""
        are_back = await self._threads.drained()
        return (self.stream is None or await self.stream.stop()) and are_back

    def _on_return(self) -> None:
        if self.stream is not None:
            self.stream.put(DriverEvent(EventKind.CHANGED))

    async def _begin(self) -> OpenedSession | DriverError:
        """Begin a session. Returns the failure: its callers may all have left."""
        try:
            async with self._preparing:
                # To end a session during a call is undefined. A call that returned later would
                # go on in the new session, or in another library.
                begin = partial(self._begin_anew, alone=await self._is_idle())
                return await self._call(DRIVER, begin, deadline=OPEN_DEADLINE)
        except DriverError as error:
            return error

    def _begin_anew(self, *, alone: bool) -> OpenedSession:
        """Load the library and begin a session, unless an earlier beginning has done so since.

        While a call is inside, so not `alone`, the old session stays open beside the new one, and
        no other library is loaded. Runs on a thread.
        """
        library = self._library
        if self.withheld:  # since it was asked for
            raise DriverError(self.withheld)
        if self.current is not None:
            return self.current
        if alone:
            self._end_all()
            bind(library, self._find())

        try:
            # It opens no GPU yet: without a persistence daemon, the first handle of each wakes it.
            library.nvmlInit()
        except library.NVMLError as error:
            if (why := missing(library, error, self._sys_root)) is not None:
                raise why from error
            # An upgrade has replaced the library and reloaded the module, but the loader keeps the
            # file that it mapped for the soname. So the new file is named by its path.
            is_upgraded = code(error) == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
            other = successor(library, self._find()) if is_upgraded and alone else None
            if other is None:
                raise
            bind(library, other)
            library.nvmlInit()

        self.current = OpenedSession(text_of(library.nvmlSystemGetDriverVersion()))
        return self.current

    def _end_all(self) -> str:
        """End all sessions, which the library counts. Returns why not, or an empty text.

        Runs on a thread.
        """
        self.current = None
        try:
            for _ in range(MOST_SESSIONS):
                self._library.nvmlShutdown()
        except self._library.NVMLError as error:
            return "" if code(error) == pynvml.NVML_ERROR_UNINITIALIZED else str(error)

        return ""
