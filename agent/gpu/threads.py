"""What runs in the driver's library, on daemon threads because it may never return.

At rest one thread makes calls and one waits for events. Both share a session with the library.
"""

import asyncio
import collections
import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pynvml
import structlog

from agent.errors import DriverError
from agent.gpu import nvml
from agent.gpu.nvml import DRIVER, Handle, NvmlLibrary
from agent.kit.tasks import show_thread_name
from agent.kit.timing import NOISE, Lag, await_event, until_tick
from agent.model import DriverEvent, EventKind, GpuUuid

log = structlog.get_logger(__name__)

PATIENCE: Final = 0.02
"""Seconds between looks at calls that wait. While each thread is in a call, another is started."""

T = TypeVar("T")


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
        self._submitted: list[_Call] = []
        """The calls of this turn of the loop, which are queued together once it has ended."""
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
        self._submitted.append(call)
        self._loop.call_soon(self._dispatch)

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

    def _dispatch(self) -> None:
        """Queue fresh calls, hand on what has returned, and keep as many threads as are needed."""
        for call in self._submitted:
            self._queue.put(call)
        self._submitted.clear()

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


Registered = tuple[int, GpuUuid, str]
"""A GPU with events: its handle's address, its UUID, and why it sends none (empty: it does)."""


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
        self._begun = threading.Event()
        self._lock = threading.Lock()
        self._users = 1

    # On the loop.

    @property
    def is_open(self) -> bool:
        """True while GPUs can be registered; soon its thread waits for their events."""
        return self._event_set is not None and self._failure is None

    def start(self) -> None:
        """Start the thread, which waits for `begin`. Raises DriverError if there is none."""
        try:
            threading.Thread(target=self._serve, name="nvml-events", daemon=True).start()
        except RuntimeError as error:
            text = f"no thread can be started to wait for events: {error}"
            raise DriverError(text) from error

    def begin(self) -> None:
        """Let the thread wait for events; if the stream has failed, it frees the set."""
        self._begun.set()

    def settle(self, where: int, uuid: GpuUuid, obstacle: str) -> None:
        """Note the answer of a GPU to its registration."""
        # Where it was before, another GPU may be now, although no scan has seen the change yet.
        for old in [old for old, known in self.known.items() if known == uuid]:
            del self.known[old]

        self.known[where] = uuid
        self.note_obstacle(uuid, obstacle)

    def note_obstacle(self, gpu: str, obstacle: str) -> None:
        """Note why the GPU does not report, and log it once: only probes watch it."""
        if obstacle and self.obstacles.get(gpu) != obstacle:
            log.warning("driver.no_events", gpu=gpu, err=obstacle)
        self.obstacles[gpu] = obstacle

    def keep(self, gpus: Collection[str]) -> None:
        """Forget all other GPUs; if they come back, they are registered again."""
        self.obstacles = {gpu: why for gpu, why in self.obstacles.items() if gpu in gpus}

    def forget(self) -> None:
        """Forget all GPUs, after their indexes changed: a handle may name another GPU now."""
        self.known, self.obstacles = {}, {}

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
                    if not self._waiting[event]:
                        del self._waiting[event]
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
        self._begun.set()

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
            uuid = GpuUuid(nvml.text_of(library.nvmlDeviceGetUUID(handle)))
            try:
                mask = library.nvmlDeviceGetSupportedEventTypes(handle) & WANTED
                if mask:  # an empty mask is an invalid argument
                    library.nvmlDeviceRegisterEvents(handle, mask, self._event_set)
                if not mask & pynvml.nvmlEventTypeXidCriticalError:
                    refused = "it does not report XIDs"
            except library.NVMLError as error:
                # NVIDIA's plugin serves such a GPU as "too old to support healthchecking", without
                # a word in its list. Here it is unmonitored, and probes watch it.
                if not nvml.is_unable(error):
                    raise
                refused = f"it has no events: {error}"

        return _address(handle), uuid, refused

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
        self._begun.wait()
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
            if nvml.code(error) == pynvml.NVML_ERROR_TIMEOUT:
                return
            if (failure := nvml.driver_wide(error)) is not None:
                raise failure from error
            # One lost GPU fails the wait for all. NVIDIA's plugin then marks all GPUs unhealthy
            # (checkHealth, "Error waiting for event"); who listens here scans and probes each.
            raise DriverError(f"waiting for events failed: {error}") from error

        is_xid = data.eventType & pynvml.nvmlEventTypeXidCriticalError
        kind = EventKind.XID if is_xid else _KINDS.get(data.eventType)
        if kind is not None:
            number = int(data.eventData) if is_xid else None
            self.put(DriverEvent(kind, self._uuid(data.device), number))

    def _uuid(self, handle: Handle) -> GpuUuid | None:
        """The GPU of a handle, first by its address: a lost GPU does not answer with its UUID."""
        known = self.known.get(_address(handle))
        if known is not None:
            return known

        try:
            return GpuUuid(nvml.text_of(self._library.nvmlDeviceGetUUID(handle)))
        except (self._library.NVMLError, ValueError):
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


class OpenedSession(msgspec.Struct, frozen=True, eq=False):
    """A session that has begun. No two are equal, also with the same version."""

    driver_version: str


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
            wide = nvml.driver_wide(error, about_gpu=gpu != DRIVER)
            if wide is not None and opened is not None:
                self.end(wide, opened)
            raise wide or nvml.failure(error, gpu) from error

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

        nvml.bind(library, self._find(), anew=alone)

        try:
            # It opens no GPU yet: without a persistence daemon, the first handle of each wakes it.
            library.nvmlInit()
        except library.NVMLError as error:
            if (why := nvml.missing(library, error, self._sys_root)) is not None:
                raise why from error
            # An upgrade has replaced the library and reloaded the module, but the loader keeps the
            # file that it mapped for the soname. So the new file is named by its path.
            is_upgraded = nvml.code(error) == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
            other = nvml.successor(library, self._find()) if is_upgraded else None
            if other is None:
                raise
            nvml.bind(library, other, anew=alone)
            library.nvmlInit()

        self.current = OpenedSession(nvml.text_of(library.nvmlSystemGetDriverVersion()))
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
            return "" if nvml.code(error) == pynvml.NVML_ERROR_UNINITIALIZED else str(error)

        return ""
