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

from agent.errors import DriverError
from agent.gpu import nvml
from agent.gpu.nvml import Handle, NvmlLibrary
from agent.health.xids import XIDS
from agent.kit.tasks import show_thread_name
from agent.kit.timing import NOISE, Lag, await_event, until_tick
from agent.model import DriverEvent, EventKind, GpuUuid

log = structlog.get_logger(__name__)

PATIENCE: Final = 0.02
"""Seconds that calls wait behind another on one thread. Then a new thread makes them."""

RETRY: Final = 0.25
"""Seconds until the next try to start a thread for calls that wait."""

T = TypeVar("T")


class GpuThreads:
    """Runs blocking calls, of each GPU one after the other. Call all methods on the loop.

    - At rest one thread makes all calls, and wakes the loop once after the last of them. A call
      that does not return in PATIENCE keeps its thread, and a new thread makes those behind it.
    - A call that exceeds its deadline is given up. Further calls about that GPU are refused until
      it returns; then `back` is called with the name of the GPU.
    - A GPU's name is its UUID, or its index while the UUID is unknown: a GPU that hangs then may
      hold a second thread. One more name is for the whole driver.
    """

    def __init__(self, deadline: float, back: Callable[[str], None] = lambda _: None) -> None:
        self._deadline = deadline
        self._back = back
        self._loop = asyncio.get_running_loop()
        self._lag = Lag()
        self._lines: dict[str, _GpuLine] = {}
        """The GPUs about which calls run or wait, and no others."""
        self._moved = asyncio.Event()
        """Set when a call has left."""
        # The loop's own executor joins its threads at exit, and one that hangs would hold it.
        self._queue: queue.SimpleQueue[_GpuLine | None] = queue.SimpleQueue()
        """The lines whose call is to be made; None ends all threads."""
        self._returned: collections.deque[_GpuLine] = collections.deque()
        self._thread: _CallThread | None = None
        """The thread that makes the calls of the queue. Former ones end after their call."""
        self._relief: asyncio.TimerHandle | None = None

    @property
    def stuck(self) -> frozenset[str]:
        """The GPUs whose call exceeded its deadline and has not returned."""
        return frozenset(name for name, line in self._lines.items() if self._is_stuck(line))

    async def call(self, gpu: str, work: Callable[[], T]) -> T:
        """Run `work` on a thread after earlier calls about that GPU; return or raise its result.

        Raises TimeoutError after the deadline, which starts again once the earlier calls have
        returned; and at once while one of them is stuck or no thread can be started. Cancelling the
        caller does not stop a begun call.
        """
        answer = await self.launch(gpu, work, timed=True)
        async with self._lag.within(self._deadline):
            return await asyncio.shield(answer)

    async def launch(
        self, gpu: str, work: Callable[[], T], *, timed: bool = False
    ) -> "asyncio.Future[T]":
        """Begin the call and return its future; unless `timed`, it is never called stuck.

        Wait for the future with asyncio.wait, or read it in a callback: a cancelled await would
        cancel it while the thread goes on. Raises TimeoutError in the same cases as call().
        """
        line = self._lines.setdefault(gpu, _GpuLine(gpu))
        if self._is_stuck(line):
            raise _not_back(gpu)
        line.waiting += 1
        try:
            async with self._lag.within(self._deadline):
                await line.turn.acquire()
        except TimeoutError as error:
            if self._is_stuck(line):
                raise _not_back(gpu) from error
            raise TimeoutError(f"earlier calls about {gpu} take too long") from error
        finally:
            line.waiting -= 1
            self._forget_idle(line)
        answer: asyncio.Future[T] = self._loop.create_future()
        line.work, line.answer = work, answer
        line.end, line.timed = self._lag.clock() + self._deadline - NOISE, timed
        try:
            self._submit(line)
        except RuntimeError as error:  # a limit of the unit or of the machine
            line.turn.release()
            self._forget_idle(line)
            raise TimeoutError(f"no thread can be started for the call: {error}") from error
        return answer

    async def empty(self) -> bool:
        """Wait until every call has left or exceeded its deadline. False: one is still inside."""
        while self._lines:
            left = max(line.end for line in self._lines.values()) - self._lag.clock()
            if left <= 0:
                return False
            self._moved.clear()
            await await_event(self._moved, left)
        return True

    def close(self) -> None:
        """End all threads; one that hangs stays until the process ends."""
        if self._relief is not None:
            self._relief.cancel()
        if self._thread is not None:
            self._thread.is_relieved = True
        self._loop.call_soon(self._queue.put, None)  # after the calls of this turn

    def _is_stuck(self, line: "_GpuLine") -> bool:
        # By the time in which the loop ran: a starved process blames no GPU.
        return line.timed and self._lag.clock() >= line.end

    def _forget_idle(self, line: "_GpuLine") -> None:
        if not line.waiting and not line.turn.locked():
            del self._lines[line.gpu]

    def _on_done(self, line: "_GpuLine") -> None:
        """Give the caller its result, if it still waits, and let the next call about the GPU in."""
        was_stuck = self._is_stuck(line)
        line.timed = False
        line.turn.release()
        self._forget_idle(line)
        self._moved.set()
        if was_stuck:
            self._loop.call_soon(self._back, line.gpu)
        if line.error is not None:
            line.answer.set_exception(line.error)
            # Read here: asyncio would log it where the caller was given up before.
            line.answer.exception()
        else:
            line.answer.set_result(line.result)

    # The threads.

    def _submit(self, line: "_GpuLine") -> None:
        """Have the line's call made. Raises RuntimeError: its thread is slow, no other starts."""
        if self._thread is None or self._thread.is_slow(self._loop.time()):
            self._start_thread()
        # Not before this turn of the loop has ended: beside a running loop, the thread would wait
        # for the interpreter at each call.
        self._loop.call_soon(self._queue.put, line)
        if self._relief is None:
            self._relief = self._loop.call_later(PATIENCE, self._relieve)

    def _start_thread(self) -> None:
        """Start the thread that makes the next calls; the present one ends after its call.

        Raises RuntimeError: a limit of the unit or of the machine.
        """
        fresh = _CallThread()
        work = partial(self._serve, fresh)
        threading.Thread(target=work, name="nvml calls", daemon=True).start()
        if self._thread is not None:
            self._thread.is_relieved = True
        self._thread = fresh

    def _relieve(self) -> None:
        """Start another thread if calls wait behind a slow one, and look again while any wait."""
        self._relief, pause = None, PATIENCE
        if not self._queue.empty():
            try:
                if self._thread is not None and self._thread.is_slow(self._loop.time()):
                    self._start_thread()
            except RuntimeError:
                pause = RETRY
            self._relief = self._loop.call_later(pause, self._relieve)
        self._collect()

    def _collect(self) -> None:
        """Hand on what the threads have done."""
        for _ in range(len(self._returned)):
            # Each in a turn of its own: an error of one must not lose the others' answers.
            self._loop.call_soon(self._on_done, self._returned.popleft())
        if self._queue.empty() and self._relief is not None:
            self._relief.cancel()
            self._relief = None

    def _serve(self, own: "_CallThread") -> None:
        """Make calls until another thread makes them or the loop is closed. Runs on the thread."""
        show_thread_name(threading.current_thread().name)
        with contextlib.suppress(RuntimeError):
            while not own.is_relieved:
                line = self._queue.get()
                if line is None:
                    self._queue.put(None)  # for another thread that waits
                    break
                own.since = self._loop.time()
                line.make()
                own.since = None
                self._returned.append(line)
                # One wake-up of the loop for all calls of a round. If the next call hangs, the
                # timer of _relieve() collects what this one has answered.
                if self._queue.empty():
                    self._loop.call_soon_threadsafe(self._collect)
            if self._returned:
                self._loop.call_soon_threadsafe(self._collect)


def _not_back(gpu: str) -> TimeoutError:
    return TimeoutError(f"an earlier call about {gpu} has not returned")


class _CallThread(msgspec.Struct, eq=False):
    """One thread. `since`: when it began its present call; None while it waits for one.

    `is_relieved`: another thread makes the next calls.
    """

    since: float | None = None
    is_relieved: bool = False

    def is_slow(self, now: float) -> bool:
        """Whether its present call takes longer than PATIENCE."""
        return self.since is not None and now - self.since >= PATIENCE


class _GpuLine(msgspec.Struct, eq=False):
    """The calls about one GPU: who has `turn` has its call in the queue, on a thread, or back.

    `waiting`: how many others wait for their turn. `end`: of the deadline of the present call, by
    the clock of Lag.
    """

    gpu: str
    turn: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)
    waiting: int = 0
    end: float = 0.0
    timed: bool = False
    work: Callable[[], Any] = print
    answer: Any = None
    result: Any = None
    error: BaseException | None = None

    def make(self) -> None:
        """Make the call. Runs on the thread."""
        self.result = self.error = None
        try:
            self.result = self.work()
        except BaseException as error:  # noqa: BLE001 -- raised in the caller
            self.error = error


# The session with the library: it begins when it is needed, and again after it broke.

OPEN_DEADLINE: Final = 10.0
"""Seconds: without a persistence daemon, the first call wakes the GPUs, which takes seconds."""

CLOSE_DEADLINE: Final = 3.0
"""Seconds, one wait for events (WAIT_MS) and a call: each step of shut() has a deadline of its own,
and a driver that hangs would use up all of them."""

NO_ANSWER: Final = "no answer in time"

DRIVER: Final = "the driver"
"""The name in place of a GPU's for calls about the whole driver."""

CLOSED: Final = "the driver session was closed"


class OpenedSession(msgspec.Struct, frozen=True, eq=False):
    """A session that has begun. No two are equal, also with the same version."""

    driver_version: str


class NvmlSession:
    """Opens the sessions of the process, one after the other. Call all methods on the loop.

    `find` returns the library file to use. `ended` is called when the driver ends a session.
    `quiet` ends all waits for events and returns whether all have left the library. `back` is
    called with a GPU whose stuck call returned. A late answer of an earlier session does not end
    the present one, and no call of an earlier session begins.
    """

    def __init__(
        self,
        library: NvmlLibrary,
        find: Callable[[], Path | None],
        sys_root: Path,
        deadline: float,
        ended: Callable[[DriverError], None],
        quiet: Callable[[], Awaitable[bool]],
        back: Callable[[str], None],
    ) -> None:
        self._threads = GpuThreads(deadline, back)
        self._library = library
        self._find = find
        self._sys_root = sys_root
        self._deadline = deadline
        self._ended = ended
        self._quiet = quiet
        self._preparing = asyncio.Lock()
        self._opening: asyncio.Future[OpenedSession] | None = None
        self.present: OpenedSession | None = None
        """The session that has begun and not ended; reading it begins none."""
        self._begun = 0
        """How many sessions were begun and not ended, which the library counts."""
        self._broken = CLOSED
        self._left_open = ""
        """Why the last session could not be ended, as logged; empty: it was ended."""
        self.withheld = ""
        """Why no session may begin; empty: one may."""

    async def open(self) -> OpenedSession:
        """Return the present session, or begin one. Raises DriverMissing, DriverError.

        All callers share one beginning. It goes on when they are cancelled or time out, so a slow
        driver is open for a later caller.
        """
        with self._translated(None):
            async with self._preparing:
                if self.withheld:
                    raise DriverError(self.withheld)
                if self.present is not None:
                    return self.present
                opening = self._opening or await self._begin_anew()
            async with asyncio.timeout(OPEN_DEADLINE):
                opened = await asyncio.shield(opening)
            # Its callback may not have run yet, if the session began while this caller waited for
            # the lock. Without this, the caller would be told that the session is over.
            self._on_begun(opening)
            self.check(opened)
            return opened

    def check(self, opened: OpenedSession) -> None:
        """Raise DriverError if that session is over."""
        if self.present is not opened:
            raise DriverError(self._broken)

    def end(self, error: DriverError, opened: OpenedSession | None = None) -> None:
        """Note that the session is over, and report it; the next call begins a new one."""
        if self.present is None or opened not in {None, self.present}:
            return
        log.warning("driver.session_ended", err=str(error))
        self.present = None
        self._broken = str(error)
        self._ended(error)

    async def call(self, opened: OpenedSession, gpu: str, work: Callable[[], T]) -> T:
        """Make a call about one GPU, as GpuThreads.call. Raises DriverError if it is over."""
        self.check(opened)
        return await self._threads.call(gpu, work)

    async def whole(self, opened: OpenedSession, work: Callable[[], T]) -> T:
        """Make a call about the whole driver. Raises DriverError, DriverMissing."""
        with self._translated(opened):
            return await self.call(opened, DRIVER, work)

    async def shut(self, why: str) -> None:
        """End the session now, which closes all GPUs; a later call begins another.

        Raises DriverError when a call does not return from the library.
        """
        async with self._preparing:
            if (opening := self._opening) is not None:
                await asyncio.wait([opening], timeout=self._deadline)
                if opening.done():
                    self._on_begun(opening)
            self.end(DriverError(why))
            with self._translated(None):
                if not await self._is_alone():
                    raise DriverError(
                        "a call has not returned from the driver, which holds all GPUs"
                    )
                ending = await self._threads.launch(DRIVER, self._end_all)
            await asyncio.wait([ending], timeout=self._deadline)
            if not ending.done() or ending.result():
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

    @contextlib.contextmanager
    def _translated(self, opened: OpenedSession | None) -> Iterator[None]:
        """Translate errors of the whole driver; such an error may end the session `opened`."""
        try:
            yield
        except TimeoutError as error:
            raise DriverError(f"the driver does not answer: {str(error) or NO_ANSWER}") from error
        except ValueError as error:
            raise DriverError(f"the driver's answer cannot be decoded: {error}") from error
        except self._library.NVMLError as error:
            driver_error = nvml.driver_wide(error, about_gpu=False)
            if driver_error is not None and opened is not None:
                self.end(driver_error, opened)
            raise driver_error or DriverError(
                f"the driver answers with an error: {error}"
            ) from error

    async def _is_alone(self) -> bool:
        """Wait until no call and no event thread is in the library; False: some do not leave."""
        left = await self._threads.empty()
        return await self._quiet() and left

    async def _begin_anew(self) -> "asyncio.Future[OpenedSession]":
        """Begin a session after the last call has left: ending one during a call is undefined.

        Raises TimeoutError while a call about the whole driver is stuck.
        """
        begin = partial(self._begin, alone=await self._is_alone())
        self._opening = await self._threads.launch(DRIVER, begin)
        self._opening.add_done_callback(self._on_begun)
        return self._opening

    def _on_begun(self, opening: "asyncio.Future[OpenedSession]") -> None:
        """Keep the new session, even if no caller waits for it; a second call does nothing."""
        if self._opening is not opening:
            return
        self._opening = None
        if opening.exception() is None and self.withheld != CLOSED:
            self.present = opening.result()

    def _begin(self, *, alone: bool) -> OpenedSession:
        """End the old session, load the library and begin a new session. Runs on a thread.

        Both only while no call is inside (`alone`): a returning call would continue in the new
        session, or in another library. Otherwise the new session begins beside the old one.
        """
        library = self._library
        if alone and (text := self._end_all()) != self._left_open:
            self._left_open = text
            if text:
                log.info("driver.session_left_open", err=text)
        nvml.bind(library, self._find(), anew=alone)
        try:
            # It opens no GPU yet: without a persistence daemon, the first handle of each wakes it.
            library.nvmlInit()
        except library.NVMLError as error:
            if (why := nvml.missing(library, error, self._sys_root)) is not None:
                raise why from error
            # An upgrade has replaced the library and reloaded the module, but the loader keeps the
            # file that it mapped for the soname. So the new file is named by its path.
            other = (
                nvml.replaced()
                if nvml.code(error) == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
                else None
            )
            if other is None:
                raise
            nvml.bind(library, other, anew=alone)
            library.nvmlInit()
        self._begun += 1  # before the next calls, which may fail: each begun one must be ended
        return OpenedSession(nvml.text_of(library.nvmlSystemGetDriverVersion()))

    def _end_all(self) -> str:
        """End all begun sessions. Returns why not, or an empty text. Runs on a thread."""
        while self._begun:
            try:
                self._library.nvmlShutdown()
            except self._library.NVMLError as error:
                if nvml.code(error) != pynvml.NVML_ERROR_UNINITIALIZED:
                    return str(error)
            self._begun -= 1
        return ""


# The wait for events, on a thread of its own.

_KINDS: Final = {
    pynvml.nvmlEventTypeXidCriticalError: EventKind.XID,
    pynvml.nvmlEventTypeDoubleBitEccError: EventKind.ECC_DOUBLE,
    pynvml.nvmlEventTypeSingleBitEccError: EventKind.ECC_SINGLE,
    pynvml.nvmlEventTypePowerSourceChange: EventKind.POWER_SOURCE,
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

    `where` is its handle's address, `era` the stream's era at the call.
    """

    where: int
    uuid: GpuUuid
    refused: str
    era: int


class EventStream:
    """The events of one event set, which the stream makes and frees.

    Events that nobody has taken yet wait in the order in which they came first, equal ones counted
    together. Beyond EVENT_LIMIT different ones, one more for each GPU is kept of the XIDs that the
    table does not name, which all mean the same: a storm hides no fatal XID. CHANGED reports that
    events were dropped.
    """

    def __init__(self, library: NvmlLibrary, open_gpu: Callable[[int], Handle]) -> None:
        self._open_gpu = open_gpu
        self._event_set: Any = None
        self.settled: set[str] = set()
        """The GPUs that report, or never will."""
        self.ended = asyncio.Event()
        """Set once the thread has left the library and will not return to it."""
        self.unmonitored: dict[str, str] = {}
        """Why a GPU (its UUID, or `index N`) does not report to this stream."""
        self._known: dict[int, GpuUuid] = {}
        """The GPU of each handle's address. Only replaced, never changed: the thread reads it."""
        self._era = 0
        self._library = library
        self._loop = asyncio.get_running_loop()
        self._waiting: collections.Counter[DriverEvent] = collections.Counter()
        self._overflown = False
        self._strange: set[GpuUuid | None] = set()
        self._failure: DriverError | None = None
        self._news = asyncio.Event()
        self._turns = 0
        self._started = False
        self._lock = threading.Lock()
        self._users = 1

    # On the loop.

    @property
    def is_open(self) -> bool:
        """True while its thread waits for events."""
        return self._started and self._failure is None

    def start(self) -> None:
        """Start the thread, which waits for events; if the stream has failed, it frees the set.

        If no thread can be started, the stream has failed; start it again to end it.
        """
        if not self._started:
            try:
                threading.Thread(target=self._serve, name="nvml-events", daemon=True).start()
                self._started = True
            except RuntimeError as error:
                self.fail(DriverError(f"no thread can be started to wait for events: {error}"))

    def settle(self, answer: EventRegistration) -> None:
        """Note the answer of a GPU, unless the indexes have changed since it was asked."""
        if answer.era != self._era:
            return
        self.settled.add(answer.uuid)
        others = {where: uuid for where, uuid in self._known.items() if uuid != answer.uuid}
        self._known = others | {answer.where: answer.uuid}
        if answer.refused:
            self.missed(answer.uuid, answer.refused)
        else:
            self.unmonitored.pop(answer.uuid, None)

    def missed(self, gpu: str, reason: str) -> None:
        """Note and log why the GPU does not report: only probes watch it."""
        if self.unmonitored.get(gpu) != reason:
            log.warning("driver.no_events", gpu=gpu, err=reason)
        self.unmonitored[gpu] = reason

    def keep(self, gpus: Collection[str]) -> None:
        """Forget all other GPUs; if they come back, they are registered again."""
        self.settled.intersection_update(gpus)
        for gone in self.unmonitored.keys() - gpus:
            del self.unmonitored[gone]

    def forget(self) -> None:
        """Forget all GPUs, after their indexes changed: a handle may name another GPU now."""
        self._era += 1
        self._known = {}
        self.settled.clear()

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
                    if not self._waiting:
                        self._strange.clear()
                return event
            if self._overflown:
                self._overflown = False
                return DriverEvent(EventKind.CHANGED)
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

    def end(self) -> None:
        """End the stream, also one that has never started: its thread frees the set."""
        self.fail(DriverError(CLOSED))
        self.start()

    async def stop(self) -> bool:
        """End the thread. False when it does not end in time: then do not touch the set."""
        self.end()
        return await await_event(self.ended, FAREWELL)

    # On the threads that make calls.

    def create(self) -> None:
        """Create the set. Blocks. Raises NVMLError, DriverError when the stream has ended."""
        with self._inside():
            self._event_set = self._library.nvmlEventSetCreate()

    def register(self, index: int) -> EventRegistration:
        """Register GPU `index` with the set. Blocks. A GPU without events is an answer too.

        Raises NVMLError, GpuError, ValueError (undecodable text): these failures may pass.
        Raises DriverError when the stream has ended.
        """
        era, library, refused = self._era, self._library, ""
        with self._inside():
            handle = self._open_gpu(index)
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
        return EventRegistration(_address(handle), uuid, refused, era)

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
            if has_room or event.xid is None or event.xid in XIDS:
                self._waiting[event] += 1
            elif event.uuid not in self._strange:
                self._strange.add(event.uuid)
                self._waiting[event] += 1
            else:
                self._overflown = True
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
