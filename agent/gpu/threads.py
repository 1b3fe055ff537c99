"""What runs in the driver's library, on daemon threads because it may never return.

At rest one thread makes calls and one waits for events. Both share a session with the library.
"""

import asyncio
import collections
import contextlib
import ctypes
import queue
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pynvml
import structlog

from agent.errors import DriverError, cap
from agent.gpu import nvml
from agent.gpu.nvml import CallFailed, Handle, NvmlLibrary
from agent.health.xids import XIDS
from agent.kit.tasks import show_thread_name
from agent.kit.timing import NOISE, Lag, await_event, until_tick
from agent.model import DriverEvent, EventKind, GpuUuid, Trouble

log = structlog.get_logger(__name__)

PATIENCE: Final = 0.02
"""Seconds between looks at calls that wait. While each thread is in a call, another is started."""

T = TypeVar("T")


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
        self._returned: collections.deque[_Call] = collections.deque()
        self._threads = 0
        self._spare = 1
        """How many threads stay that are in no call."""
        self._timer: asyncio.TimerHandle | None = None

    async def call(self, gpu: str, work: Callable[[], T], deadline: float | None = None) -> T:
        """Run `work` on a thread after earlier calls about that GPU; return or raise its result.

        Raises TimeoutError after the deadline, which starts again once the earlier calls have
        returned; and at once while one of them is stuck or no thread can be started. Cancelling the
        caller does not stop a call.
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
        if not self._submitted:
            self._loop.call_soon(self._dispatch)
        self._submitted.append(call)

        async with self._lag.within(seconds):
            return await asyncio.shield(answer)

    async def drained(self) -> bool:
        """Wait until every call has left or exceeded its deadline. False: one is still inside."""
        while self._calls:
            left = max(call.end for call in self._calls.values()) - self._lag.clock()
            if left <= 0:
                return False

            answers = [call.answer for call in self._calls.values()]
            await asyncio.wait(answers, timeout=left, return_when=asyncio.FIRST_COMPLETED)

        return True

    def close(self) -> None:
        """End all threads; one that hangs stays until it is back or the process ends."""
        self._spare = 0
        self._loop.call_soon(self._dispatch)  # after the calls of this turn

    def _is_stuck(self, call: "_Call") -> bool:
        # By the time in which the loop ran: a starved process blames no GPU.
        return self._lag.clock() >= call.end

    def _dispatch(self) -> None:
        """Queue fresh calls, hand on what has returned, and keep as many threads as are needed."""
        for call in self._submitted:
            self._queue.put(call)
        self._submitted.clear()

        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

        # Before the answers are taken: a thread adds its answer and then takes the next call. If
        # it did so in between, the queue would seem empty here, and no timer would look again.
        is_empty = self._queue.empty()
        for _ in range(len(self._returned)):
            # Each in a turn of its own: an error of one must not lose the others' answers.
            self._loop.call_soon(self._on_done, self._returned.popleft())

        if is_empty:
            for _ in range(self._threads - len(self._inside) - self._spare):
                self._queue.put(None)
                self._threads -= 1
            return

        # A thread that is in no call takes the next one. A busy machine may let it wait.
        if len(self._inside) >= self._threads:
            self._start_thread()

        self._timer = self._loop.call_later(PATIENCE, self._dispatch)

    def _start_thread(self) -> None:
        # The loop's own executor joins its threads at exit, and one that hangs would hold it.
        thread = threading.Thread(target=self._make_calls, name="nvml calls", daemon=True)
        try:
            thread.start()
            self._threads += 1
        except RuntimeError as error:  # a limit of the unit or of the machine
            # While there is a thread, it may come back, and the next look tries again.
            while not self._threads and not self._queue.empty():
                if (call := self._queue.get_nowait()) is not None:
                    call.fail(TimeoutError(f"no thread can be started for the call: {error}"))
                    self._loop.call_soon(self._on_done, call)

    def _make_calls(self) -> None:
        """Make the calls that wait, until there are threads enough. Runs on a thread."""
        show_thread_name(threading.current_thread().name)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while (call := self._queue.get()) is not None:
                self._inside.add(call)
                call.make()
                self._inside.discard(call)
                self._returned.append(call)
                # One wake-up of the loop for all calls of a round. If the next call hangs, the
                # timer hands on what this one has answered.
                if self._queue.empty():
                    self._loop.call_soon_threadsafe(self._dispatch)
            if self._returned:  # what waited behind the last call was the word to end
                self._loop.call_soon_threadsafe(self._dispatch)

    def _on_done(self, call: "_Call") -> None:
        """Give the caller its result, if it still waits, and let the next call about the GPU in."""
        del self._calls[call.gpu]
        if self._is_stuck(call):
            self._loop.call_soon(self._on_return)

        call.settle()
        # Read here: asyncio would log an error where the caller was given up before.
        call.answer.exception()


class _Call(msgspec.Struct, eq=False):
    """One call. `end`: of its deadline, by the clock of Lag. `settle` answers, on the loop."""

    gpu: str
    work: Callable[[], Any]
    end: float
    answer: Any
    settle: Callable[[], object] = lambda: None

    def make(self) -> None:
        """Make the call. Runs on a thread."""
        try:
            self.settle = partial(self.answer.set_result, self.work())
        except BaseException as error:  # noqa: BLE001 -- raised in the caller
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        self.settle = partial(self.answer.set_exception, error)


# The session with the library: it begins when it is needed, and again after it broke.

OPEN_DEADLINE: Final = 10.0
"""Seconds: without a persistence daemon, the first call wakes the GPUs, which takes seconds."""

CLOSE_DEADLINE: Final = 3.0
"""Seconds, one wait for events (WAIT_MS) and a call: each step of shut() has a deadline of its own,
and a driver that hangs would use up all of them."""

NO_ANSWER: Final = "no answer in time"

DRIVER: Final = "the driver"
"""The name in place of a GPU's for calls about the whole driver."""

MOST_SESSIONS: Final = 10_000
"""A library that has ended so many, one after the other, does not count them: none is left."""

CLOSED: Final = "the driver session was closed"


class OpenedSession(msgspec.Struct, frozen=True, eq=False):
    """A session that has begun. No two are equal, also with the same version."""

    driver_version: str


class NvmlSession:
    """Opens the sessions of the process, one after the other. Call all methods on the loop.

    - `find` returns the library file to use. `ended` is called when the driver ends a session.
      `on_return` is called when a stuck call has returned.
    - `end_streams` ends all waits for events, and returns whether all have left the library.
    - A late answer of an earlier session does not end the current one, and no call of an earlier
      session begins.
    """

    def __init__(
        self,
        library: NvmlLibrary,
        find: Callable[[], Path | None],
        sys_root: Path,
        deadline: float,
        ended: Callable[[DriverError], None],
        end_streams: Callable[[], Awaitable[bool]],
        on_return: Callable[[], None],
    ) -> None:
        self._threads = GpuThreads(deadline, on_return)
        self._library = library
        self._find = find
        self._sys_root = sys_root
        self._ended = ended
        self._end_streams = end_streams
        self._preparing = asyncio.Lock()
        self.current: OpenedSession | None = None
        """The session that has begun and not ended; reading it begins none."""
        self._failure: Exception = DriverError(CLOSED)
        """Why a beginning failed last; another object after each failure."""
        self._broken = CLOSED
        self.withheld = ""
        """Why no session may begin; empty: one may."""

    async def open(self) -> OpenedSession:
        """Return the current session, or begin one. Raises DriverMissing, DriverError.

        All who wait share one beginning and its failure. It goes on when its caller is cancelled
        or times out, so a slow driver is open for a later one.
        """
        known = self._failure
        with self._translated(None):
            async with self._preparing:
                if self.withheld:
                    raise DriverError(self.withheld)
                if self.current is not None:
                    return self.current

                # To end a session during a call is undefined.
                alone = self._failure is known and await self._is_idle()

                # The beginning that this caller waited for has failed. If each began another in its
                # turn, most would wait in vain and be told of a silent driver.
                if self._failure is not known:
                    raise self._failure

                try:
                    begin = partial(self._begin, alone=alone)
                    return await self._threads.call(DRIVER, begin, OPEN_DEADLINE)
                except TimeoutError as error:
                    self._failure = error
                    raise

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
        self._ended(error)

    async def call(self, opened: OpenedSession, gpu: str, work: Callable[[], T]) -> T:
        """Make a call about one GPU, or DRIVER.

        Raises CallFailed about a GPU; DriverError, DriverMissing: the session is over, or the call
        about the driver has failed.
        """
        with self._translated(opened, gpu):
            return await self._threads.call(gpu, partial(self._make, opened, work))

    async def shut(self, why: str) -> None:
        """End the session now, which closes all GPUs; a later call begins another.

        Raises DriverError when a call does not return from the library.
        """
        async with self._preparing:
            self.end(DriverError(why))
            if not await self._is_idle():
                raise DriverError("a call has not returned from the driver, which holds all GPUs")

            with self._translated(None):
                left_open = await self._threads.call(DRIVER, self._end_all)

            if left_open:
                raise DriverError("the driver does not end the session, which holds all GPUs")

    async def close(self) -> None:
        """End the session and all threads; a second call does nothing.

        After CLOSE_DEADLINE the threads are left behind, and the process may end with its session.
        """
        if self.withheld == CLOSED:
            return

        self.withheld = CLOSED
        with contextlib.suppress(DriverError, TimeoutError):
            async with asyncio.timeout(CLOSE_DEADLINE):
                await self.shut(CLOSED)

        self._threads.close()

    def _make(self, opened: OpenedSession, work: Callable[[], T]) -> T:
        """Make a call unless the session has ended while it waited. Runs on a thread."""
        self.check(opened)
        return work()

    @contextlib.contextmanager
    def _translated(self, opened: OpenedSession | None, gpu: str = DRIVER) -> Iterator[None]:
        """Translate errors; one of the whole driver ends the session `opened`."""

        def failed(what: str, error: Exception, trouble: Trouble, otherwise: str = "") -> Exception:
            text = cap(str(error)) or otherwise
            return (
                DriverError(f"{what}: {text}") if gpu == DRIVER else CallFailed(gpu, text, trouble)
            )

        try:
            yield
        except TimeoutError as error:
            what = "the driver does not answer"
            raise failed(what, error, Trouble.SILENT, NO_ANSWER) from error
        except ValueError as error:  # the binding could not decode a text
            what = "the driver's answer cannot be decoded"
            raise failed(what, error, Trouble.FAILED) from error
        except self._library.NVMLError as error:
            driver_error = nvml.driver_wide(error, about_gpu=gpu != DRIVER)
            if driver_error is not None:
                if opened is not None:
                    self.end(driver_error, opened)
                raise driver_error from error
            what, code = "the driver answers with an error", f"error {nvml.code(error)}"
            raise failed(what, error, nvml.trouble(error), code) from error

    async def _is_idle(self) -> bool:
        """Wait until no call and no event thread is in the library; False: some do not leave."""
        left = await self._threads.drained()
        return await self._end_streams() and left

    def _begin(self, *, alone: bool) -> OpenedSession:
        """Begin a session, unless one began after its caller had left. Runs on a thread."""
        try:
            if self.current is None:
                self.current = OpenedSession(self._begin_anew(alone=alone))
        except Exception as error:
            self._failure = error  # here, because the caller may have left
            raise

        return self.current

    def _begin_anew(self, *, alone: bool) -> str:
        """End the old session, load the library and begin a new session. Returns its version.

        Both only while no call is inside (`alone`): a returning call would continue in the new
        session, or in another library. Otherwise the new session begins beside the old one. Runs
        on a thread.
        """
        library = self._library
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

        return nvml.text_of(library.nvmlSystemGetDriverVersion())

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

EVENT_LIMIT: Final = 4096
FAREWELL: Final = 1.2
"""Seconds for the thread to end: a wait, and a late turn of a busy machine."""


class SetFailed(DriverError):  # noqa: N818 -- names what happened
    """A wait for events failed: one GPU of the set may be lost; the driver may be healthy."""


class EventRegistration(msgspec.Struct, frozen=True):
    """The answer of a GPU to its registration. `refused`: why it sends no events; empty: it does.

    `where` is its handle's address; `known`: the addresses that the stream knew at the call.
    """

    known: dict[int, GpuUuid]
    where: int
    uuid: GpuUuid
    refused: str


class EventStream:
    """The events of one event set, which the stream makes and frees.

    Events that nobody has taken yet wait in the order in which they came first, equal ones counted
    together. Beyond EVENT_LIMIT different ones, XIDs that the table does not name have the number
    0: a storm hides no fatal XID.
    """

    def __init__(self, library: NvmlLibrary) -> None:
        self._event_set: Any = None
        self.ended = asyncio.Event()
        """Set once the thread has left the library and will not return to it."""
        self.settled: set[str] = set()
        """The GPUs that have answered their registration: they are not asked again."""
        self.obstacles: dict[str, str] = {}
        """By GPU (its UUID, or `index N`) why it does not report to this stream."""
        self._known: dict[int, GpuUuid] = {}
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

    def settle(self, answer: EventRegistration) -> None:
        """Note the answer of a GPU, unless the indexes have changed since it was asked."""
        if answer.known is not self._known:
            return

        # Where it was before, another GPU may be now, although no scan has seen the change yet.
        for where in [old for old, uuid in self._known.items() if uuid == answer.uuid]:
            del self._known[where]

        self._known[answer.where] = answer.uuid
        self.settled.add(answer.uuid)

        if answer.refused:
            self.missed(answer.uuid, answer.refused)
        else:
            self.obstacles.pop(answer.uuid, None)

    def missed(self, gpu: str, reason: str) -> None:
        """Note and log why the GPU does not report: only probes watch it."""
        if self.obstacles.get(gpu) != reason:
            log.warning("driver.no_events", gpu=gpu, err=reason)
        self.obstacles[gpu] = reason

    def keep(self, gpus: Collection[str]) -> None:
        """Forget all other GPUs; if they come back, they are registered again."""
        self.settled.intersection_update(gpus)
        self.obstacles = {gpu: why for gpu, why in self.obstacles.items() if gpu in gpus}

    def forget(self) -> None:
        """Forget all GPUs, after their indexes changed: a handle may name another GPU now."""
        self._known = {}
        self.settled.clear()
        self.obstacles.clear()

    async def next(self) -> DriverEvent:
        """Wait for the next event. Raises SetFailed, DriverError once it failed and is empty.

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

            await self._wait()

    async def _wait(self) -> None:
        """Wait for news. A stopped or starved process gets two periods of about STALL seconds."""
        turns = self._turns
        for _ in range(2):
            period = until_tick(STALL)
            if period < STALL / 2:
                period += STALL
            if await await_event(self._news, period) or turns != self._turns:
                return

        self.fail(DriverError("the driver does not return from a wait for events"))

    def fail(self, error: DriverError) -> None:
        """End the stream: its reader raises `error`, and the thread ends after its wait."""
        self._failure = self._failure or error
        self._news.set()
        self._begun.set()

    def end(self) -> None:
        """End the stream, also one that has never begun: its thread frees the set."""
        self.fail(DriverError(CLOSED))

    async def stop(self) -> bool:
        """End the thread. False when it does not end in time: then do not touch the set."""
        self.end()
        return await await_event(self.ended, FAREWELL)

    # On the threads that make calls.

    def create(self) -> None:
        """Create the set. Blocks. Raises NVMLError, DriverError when the stream has ended."""
        with self._inside():
            self._event_set = self._library.nvmlEventSetCreate()

    def register(self, open_gpu: Callable[[], Handle]) -> EventRegistration:
        """Register a GPU with the set. Blocks. A GPU without events is an answer too.

        Raises NVMLError, GpuError, ValueError (undecodable text): these failures may pass.
        Raises DriverError when the stream has ended.
        """
        known, library, refused = self._known, self._library, ""
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

        return EventRegistration(known, _address(handle), uuid, refused)

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
            last = not self._users

        if last and self._event_set is not None:
            with contextlib.suppress(self._library.NVMLError):
                self._library.nvmlEventSetFree(self._event_set)

    # On its own thread.

    def _serve(self) -> None:
        """Run the thread and report its end: a silent end would look like healthy GPUs."""
        show_thread_name(threading.current_thread().name)
        self._begun.wait()
        try:
            while self._failure is None:
                self._turns += 1
                self._wait_in_library()
        except DriverError as error:
            self._tell(self.fail, error)
        except Exception as error:  # noqa: BLE001 -- any error that ends the thread is reported
            text = f"the thread that waits for events has died: {error!r}"
            self._tell(self.fail, DriverError(text))

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
            # (checkHealth, "Error waiting for event"); here each is scanned and probed instead.
            self.put(DriverEvent(EventKind.CHANGED))
            raise SetFailed(f"waiting for events failed: {error}") from error

        is_xid = data.eventType & pynvml.nvmlEventTypeXidCriticalError
        kind = _KINDS.get(pynvml.nvmlEventTypeXidCriticalError if is_xid else data.eventType)

        if kind is not None:
            number = int(data.eventData) if is_xid else None
            self.put(DriverEvent(kind, self._uuid(data.device), number))

    def _uuid(self, handle: Handle) -> GpuUuid | None:
        """The GPU of a handle, first by its address: a lost GPU does not answer with its UUID."""
        known = self._known.get(_address(handle))
        if known is not None:
            return known

        try:
            return GpuUuid(nvml.text_of(self._library.nvmlDeviceGetUUID(handle)))
        except (self._library.NVMLError, ValueError):
            return None

    def put(self, event: DriverEvent) -> None:
        """Add an event, from any thread."""
        with self._lock:
            has_room = event in self._waiting or len(self._waiting) < EVENT_LIMIT
            # A broken GPU can report 10,000 XIDs a second. What the table names is at most some 170
            # for each GPU, so only invented numbers need a bound.
            if not has_room and event.xid is not None and event.xid not in XIDS:
                event = msgspec.structs.replace(event, xid=0)
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
