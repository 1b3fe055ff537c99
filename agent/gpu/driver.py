"""The driver by NVML: its events, the session with the library, and what the agent asks."""

import asyncio
import collections
import contextlib
import ctypes
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pynvml
import structlog

from agent.errors import DriverError, DriverMissing, GpuError
from agent.gpu import nvml
from agent.gpu.nvml import DRIVER, NO_ANSWER, CallFailed, GpuTable, GpuThreads, Handle, NvmlLibrary
from agent.kit.timing import await_event, until_tick
from agent.model import (
    NO_INDEX,
    DriverEvent,
    EventKind,
    Gpu,
    GpuFault,
    GpuSample,
    GpuUuid,
    Link,
    Probe,
    ProbeOutcome,
    Scan,
    Trouble,
)

log = structlog.get_logger(__name__)

T = TypeVar("T")

# The wait for events, on a thread of its own.

_KINDS: Final = {
    pynvml.nvmlEventTypeXidCriticalError: EventKind.XID,
    pynvml.nvmlEventTypeDoubleBitEccError: EventKind.ECC_DOUBLE,
    pynvml.nvmlEventMigConfigChange: EventKind.CHANGED,
}
WANTED: Final = sum(_KINDS)  # each is one bit

WAIT_MS: Final = 1000
"""Milliseconds of one wait, which only an event ends sooner. Stopping takes as long."""

STALL: Final = 2.5
"""Seconds (2.5 x WAIT_MS): a wait longer than two of these does not return."""

CLOSED: Final = "the driver session was closed"

FAREWELL: Final = 1.2
"""Seconds for the thread to end: a wait, and a late turn of a busy machine."""


Registered = tuple[GpuUuid, str, int]
"""A GPU: its UUID, why it sends no events (empty: it does), and its handle's address."""


class EventStream:
    """The events of one event set, which the stream makes and frees.

    Events that nobody has taken yet wait in the order in which they came: none is lost.
    """

    def __init__(self, library: NvmlLibrary) -> None:
        self.event_set: Any = None
        self.ended = asyncio.Event()
        """Set once the thread has left the library and will not return to it."""
        self.obstacles: dict[str, str] = {}
        """Of each GPU that was asked (its UUID, or `index N`) why it does not report to this
        stream; empty: it does."""
        self.known: dict[int, GpuUuid] = {}
        """The GPU of each handle's address; another dict once the indexes have changed."""
        self._library = library
        self._loop = asyncio.get_running_loop()
        self._waiting: collections.deque[DriverEvent] = collections.deque()
        self.failure: DriverError | None = None
        self._news = asyncio.Event()
        self._turns = 0
        self.begun = threading.Event()
        """Set it to let the thread wait for events; if the stream has failed, it frees the set."""
        self._lock = threading.Lock()
        self._users = 1
        threading.Thread(target=self._serve, name="nvml-events", daemon=True).start()

    # On the loop.

    async def next(self) -> DriverEvent:
        """Wait for the next event. Raises DriverError once it failed and is empty."""
        while True:
            self._news.clear()
            if self._waiting:
                return self._waiting.popleft()

            if self.failure is not None:
                raise self.failure

            turns = self._turns
            has_news = await await_event(self._news, until_tick(STALL) + STALL)
            if not has_news and turns == self._turns:
                self.fail(DriverError("the driver does not return from a wait for events"))

    def fail(self, error: DriverError) -> None:
        """End the stream: its reader raises `error`, and the thread ends after its wait.

        Also of a stream that has never begun: its thread frees the set.
        """
        self.failure = self.failure or error
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
            self.event_set = self._library.nvmlEventSetCreate()

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
                    library.nvmlDeviceRegisterEvents(handle, mask, self.event_set)
                if not mask & pynvml.nvmlEventTypeXidCriticalError:
                    refused = "it does not report XIDs"
            except library.NVMLError as error:
                # NVIDIA's plugin serves such a GPU as "too old to support healthchecking", without
                # a word in its list. Here it is unmonitored, and probes watch it.
                if not nvml.is_unable(error):
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

        if is_last and self.event_set is not None:
            with contextlib.suppress(self._library.NVMLError):
                self._library.nvmlEventSetFree(self.event_set)

    # On its own thread.

    def _serve(self) -> None:
        """Run the thread and report its end: a silent end would look like healthy GPUs."""
        self.begun.wait()
        try:
            while self.failure is None:
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
            data = self._library.nvmlEventSetWait_v2(self.event_set, WAIT_MS)
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
            xid = int(data.eventData) if is_xid else None
            self.put(DriverEvent(kind, self._uuid(data.device), xid))

    def _uuid(self, handle: Handle) -> GpuUuid | None:
        """The GPU of a handle, first by its address: a lost GPU does not answer with its UUID."""
        with contextlib.suppress(self._library.NVMLError, ValueError):
            known = self.known.get(_address(handle))
            return known or GpuUuid(nvml.text_of(self._library.nvmlDeviceGetUUID(handle)))
        return None

    def put(self, event: DriverEvent) -> None:
        """Add an event, from any thread."""
        self._waiting.append(event)
        if not self._news.is_set():
            self._tell(self._news.set)

    def _tell(self, callback: Callable[..., object], *args: object) -> None:
        """Call back on the loop; a closed loop ends the stream."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self.failure = self.failure or DriverError(CLOSED)


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
    """A session that has begun. `links`: between the GPUs of its last scan. No two are equal."""

    driver_version: str
    links: dict[str, tuple[Link, ...]] = msgspec.field(default_factory=dict)


class NvmlSession:
    """Opens the sessions of the process, one after the other. Call all methods on the loop.

    - `find` returns the library file to use.
    - `stream`: the newest one; it ends with its session. It hears CHANGED when a stuck call has
      returned: a GPU that was silent answers, so all are scanned and probed again.
    - A late answer of an earlier session does not end the current one, and no call of an earlier
      session begins.
    - A library that is loaded is kept.
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
        self.current: OpenedSession | None = None
        """The session that has begun and not ended; reading it begins none."""
        self.withheld = ""
        """Why no session may begin; empty: one may."""
        self.stream: EventStream | None = None

    async def open(self) -> OpenedSession:
        """Return the current session, or begin one. Raises DriverMissing, DriverError.

        The beginning goes on when who waits is cancelled or times out, so that a slow driver is
        open for a later one.
        """
        async with self._preparing:
            if self.withheld:
                raise DriverError(self.withheld)
            if self.current is not None:
                return self.current
            # To end a session during a call is undefined. A call that returned later would go on
            # in the new session.
            begin = partial(self._begin, alone=await self._is_idle())
            return await self.call(None, DRIVER, begin, OPEN_DEADLINE)

    def check(self, opened: OpenedSession) -> None:
        """Raise DriverError if that session is over."""
        if self.current is not opened:
            raise DriverError("the session with the driver has ended")

    def end(self, error: DriverError, opened: OpenedSession | None = None) -> None:
        """Note that the session is over, and report it; the next call begins a new one."""
        if self.current is None or opened not in {None, self.current}:
            return

        log.warning("driver.session_ended", err=str(error))
        self.current = None
        if self.stream is not None:
            self.stream.fail(error)

    async def call(
        self,
        opened: OpenedSession | None,
        gpu: str,
        work: Callable[[], T],
        deadline: float | None = None,
    ) -> T:
        """Make a call about one GPU, or DRIVER.

        Raises CallFailed about a GPU, DriverError if the session `opened` is over or DRIVER fails.
        """

        def make() -> T:
            if opened is not None:
                self.check(opened)  # it may have ended while the call waited
            return work()

        try:
            return await self._threads.call(gpu, make, deadline)
        except (TimeoutError, ValueError, self._library.NVMLError) as error:
            wide = nvml.driver_wide(error, about_gpu=gpu != DRIVER)
            if wide is not None and opened is not None:
                self.end(wide, opened)
            raise wide or nvml.failure(error, gpu) from error

    async def new_stream(self) -> EventStream:
        """Start a stream once the last one's thread has left the library. Raises DriverError."""
        if self.stream is not None and not await self.stream.stop():
            raise DriverError("an earlier wait for events has not returned from the driver")

        try:
            self.stream = EventStream(self._library)
        except RuntimeError as error:
            raise DriverError(f"no thread can be started to wait for events: {error}") from error
        return self.stream

    async def shut(self, why: str) -> None:
        """End the session now, which closes all GPUs; a later call begins another.

        Raises DriverError when a call does not return from the library.
        """
        async with self._preparing:
            self.end(DriverError(why))
            if not await self._is_idle():
                raise DriverError("a call has not returned from the driver, which holds all GPUs")
            if await self.call(None, DRIVER, self._end_all):
                raise DriverError("the driver does not end the session, which holds all GPUs")

    async def close(self) -> None:
        """End the session; a second call does nothing.

        The threads stay behind, and after CLOSE_DEADLINE the process may end with its session.
        """
        self.withheld = CLOSED
        with contextlib.suppress(DriverError, TimeoutError):
            async with asyncio.timeout(CLOSE_DEADLINE):
                await self.shut(CLOSED)

    async def _is_idle(self) -> bool:
        """Wait until no call and no event thread is in the library; False: some do not leave."""
        are_back = await self._threads.drained()
        return (self.stream is None or await self.stream.stop()) and are_back

    def _on_return(self) -> None:
        if self.stream is not None:
            self.stream.put(DriverEvent(EventKind.CHANGED))

    def _begin(self, *, alone: bool) -> OpenedSession:
        """Load the library and begin a session, unless an earlier beginning has done so since.

        While a call is inside, so not `alone`, the old session stays open beside the new one. Runs
        on a thread.
        """
        library = self._library
        if self.withheld:  # since it was asked for
            raise DriverError(self.withheld)
        if self.current is not None:
            return self.current
        if alone:
            self._end_all()

        nvml.bind(library, self._find())
        try:
            # It opens no GPU yet: without a persistence daemon, the first handle of each wakes it.
            library.nvmlInit()
        except library.NVMLError as error:
            if (why := nvml.missing(library, error, self._sys_root)) is not None:
                raise why from error
            raise

        self.current = OpenedSession(nvml.text_of(library.nvmlSystemGetDriverVersion()))
        return self.current

    def _end_all(self) -> str:
        """End all sessions, which the library counts, on a thread. Returns why not, or nothing."""
        self.current = None
        try:
            for _ in range(MOST_SESSIONS):
                self._library.nvmlShutdown()
        except self._library.NVMLError as error:
            return "" if nvml.code(error) == pynvml.NVML_ERROR_UNINITIALIZED else str(error)

        return ""


# The Driver port over NVML: scans, probes, samples and events.

CALL_DEADLINE: Final = 2.0

_OUTCOMES: Final = {
    Trouble.LOST: ProbeOutcome.LOST,
    Trouble.RESET: ProbeOutcome.REFUSED,
    Trouble.SILENT: ProbeOutcome.SILENT,
}


class NvmlDriver:
    """Implements agent.ports.Driver.

    `library` is the module pynvml or one with its functions. `path` names the library file to use
    instead of the soname; `driver_root` is a directory like the host's `/` to search first.
    `sys_root` is the mounted /sys. Each call has `deadline` seconds: one about a GPU that does not
    return makes only that GPU silent.
    """

    def __init__(
        self,
        library: NvmlLibrary = pynvml,
        *,
        path: Path | None = None,
        driver_root: Path | None = None,
        sys_root: Path = Path("/sys"),
        deadline: float = CALL_DEADLINE,
    ) -> None:
        self._find: Callable[[], Path | None] = lambda: path or nvml.library_below(driver_root)
        self._library = library
        self._sys_root = sys_root
        self._session = NvmlSession(library, self._find, sys_root, deadline)
        self._renewed = False
        """A new session was begun because all GPUs failed, and none has answered since."""
        self._described: frozenset[str] = frozenset()
        """The addresses of all GPUs that were ever described."""
        self._table = GpuTable(library)

    async def scan(self) -> Scan:
        """Describe all GPUs, or those that are not released. Raises DriverMissing, DriverError."""
        opened = await self._session.open()
        found, faults = await self._describe(opened, await self._places(opened))

        if self._table.released:
            # Also one that was never described: it must be visible to be taken back.
            faults += map(self._table.released_fault, sorted(self._table.released))
        else:
            self._renewed = self._renewed and not found
            found = await self._with_links(opened, found)
            if not self._table.seen(found) and self._stream is not None:
                # The indexes changed: an event of a handle may be of another GPU now.
                self._stream.known, self._stream.obstacles = {}, {}
            faults = [
                msgspec.structs.replace(fault, gpu=self._table.name(fault.index))
                for fault in faults
            ]

        self._described |= {gpu.pci for gpu in found}
        # With a fault, a GPU that is not listed may be the one that is not described.
        if not faults:
            faults = await self._session.call(
                opened, DRIVER, partial(nvml.gpus_not_listed, self._sys_root, self._described)
            )

        if self._stream is not None:
            await self._register(opened, self._stream, {gpu.uuid: gpu.index for gpu in found})

        self._session.check(opened)
        return Scan(opened.driver_version, tuple(found), tuple(faults))

    async def probe(self, uuid: GpuUuid) -> Probe:
        """Probe one GPU. Raises DriverMissing, DriverError."""
        opened = await self._session.open()
        try:
            probe = await self._session.call(
                opened, uuid, partial(nvml.probe_of, self._library, self._table, uuid)
            )
        except CallFailed as error:
            probe = Probe(uuid, _OUTCOMES.get(error.trouble, ProbeOutcome.FAILED), error.text)

        self._renewed = self._renewed and probe.outcome is not ProbeOutcome.PASSED
        # The driver forgets the registration of a GPU that is reset, and tells nobody: without
        # this, its next XID would be heard by no set.
        if probe.outcome in {ProbeOutcome.LOST, ProbeOutcome.REFUSED}:
            self._note_reset(uuid)
        elif self._stream is not None and probe.outcome is not ProbeOutcome.SILENT:
            known = self._table.find(uuid)
            await self._register(opened, self._stream, {uuid: known.index if known else NO_INDEX})

        stream = self._stream
        obstacle = "" if stream is None else stream.obstacles.get(uuid, "")
        return msgspec.structs.replace(probe, unmonitored=obstacle)

    async def sample(self, uuid: GpuUuid) -> GpuSample:
        """Read how much one GPU is used. Raises GpuError, DriverMissing, DriverError."""
        work = partial(nvml.sample_of, self._library, self._table, uuid)
        return await self._session.call(await self._session.open(), uuid, work)

    async def release(self, uuids: Collection[GpuUuid], *, everything: bool = False) -> None:
        """Close these GPUs and use none of them until it is taken back.

        With `everything`, also close all others until any GPU is taken back. A session holds what
        it opened, so it is ended. If GPUs are left, they are used in a new one.

        Raises GpuError for an unknown GPU, DriverError when a call does not return and holds them.
        """
        if self._table.release(uuids, everything=everything):
            self._session.withheld = "all GPUs are released: hami-agent recheck takes them back"

        await self._session.shut("GPUs are released; a new session begins without them")

    def take_back(self, uuid: GpuUuid) -> None:
        """Use a released GPU again."""
        self._table.released -= {uuid}
        self._note_reset(uuid)
        self._session.withheld = ""

    def check(self) -> None:
        """Raise DriverMissing: a package replaced the library in use; blocks nothing."""
        other = self._session.current and nvml.successor(self._library, self._find())
        if other:
            raise DriverMissing(
                f"The driver's library was replaced by {other}, and the kernel module is still "
                "that of the former one, so a new container's CUDA fails with a version mismatch",
                remedy="drain the node and reboot it, or reload the module and restart the agent "
                "[P-DRIVER]",
            )

    async def renew(self) -> bool:
        """End the session so that the next call begins another; only once until a GPU answers."""
        if self._renewed or self._session.current is None:
            return False

        self._renewed = True
        self._session.end(DriverError("all GPUs fail; a new session begins"))
        return True

    async def close(self) -> None:
        """End the session; a second call does nothing."""
        await self._session.close()

    async def _each(
        self, opened: OpenedSession, places: Mapping[str, int], work: Callable[[str, int], T]
    ) -> dict[str, T | GpuError | DriverError]:
        """Call `work` with each name and index at once. Returns all answers and failures."""
        answers: dict[str, T | GpuError | DriverError] = {}

        async def one(name: str, index: int) -> None:
            try:
                answers[name] = await self._session.call(opened, name, partial(work, name, index))
            except (DriverError, GpuError) as error:
                answers[name] = error

        async with asyncio.TaskGroup() as tasks:
            for name, index in places.items():
                tasks.create_task(one(name, index))

        return {name: answers[name] for name in places}

    async def _describe(
        self, opened: OpenedSession, places: Mapping[str, int]
    ) -> tuple[list[Gpu], list[GpuFault]]:
        """The GPUs, and what fails instead, by index. Raises DriverError: the session is over."""
        found: list[Gpu] = []
        faults: list[GpuFault] = []
        work = partial(nvml.describe, self._library, self._table, self._sys_root)

        for name, answer in (await self._each(opened, places, work)).items():
            if isinstance(answer, Gpu):
                found.append(answer)
            elif isinstance(answer, CallFailed):
                # Else it was just released, or the session is over, which is raised below.
                if answer.trouble in {Trouble.LOST, Trouble.RESET}:
                    self._note_reset(name)
                # Of a silent one always the same words, or each look would be news.
                text = NO_ANSWER if answer.trouble is Trouble.SILENT else answer.text
                faults.append(GpuFault(name, text, answer.trouble, places[name]))

        self._session.check(opened)
        return found, faults

    async def _places(self, opened: OpenedSession) -> dict[str, int]:
        """The indexes that may be opened, by name."""
        if not self._table.released:  # else their number tells nothing of the others
            self._table.count = await self._session.call(
                opened, DRIVER, self._library.nvmlDeviceGetCount
            )
        return self._table.places()

    async def _with_links(self, opened: OpenedSession, gpus: list[Gpu]) -> list[Gpu]:
        """The GPUs with the links between them, read once for each set of GPUs in a session."""
        if opened.links.keys() != {gpu.uuid for gpu in gpus}:
            places = {str(gpu.uuid): gpu.index for gpu in gpus}
            work = partial(nvml.links_of, self._library, self._table, gpus)
            answers = await self._each(opened, places, work)
            # Without those that fail, so the next scan reads them again.
            opened.links = {name: row for name, row in answers.items() if isinstance(row, tuple)}

        return [msgspec.structs.replace(gpu, links=opened.links.get(gpu.uuid, ())) for gpu in gpus]

    # Events.

    async def events(self, opened: Callable[[], None] | None = None) -> AsyncIterator[DriverEvent]:
        """Yield events as they come. `opened` is called once all GPUs report that can.

        Raises DriverMissing, DriverError when the session ends, or the wait fails, as it does for
        all GPUs when one is lost, or does not return.
        """
        session = await self._session.open()
        stream = await self._session.new_stream()
        try:
            await self._session.call(session, DRIVER, stream.create)
            await self._register(session, stream, await self._places(session))
            self._session.check(session)
            stream.begun.set()
            if opened is not None:
                opened()
            while True:
                yield await stream.next()
        finally:
            stream.fail(DriverError("nobody listens any more"))

    @property
    def _stream(self) -> EventStream | None:
        """The stream at which GPUs can be registered."""
        stream = self._session.stream
        has_set = stream is not None and stream.event_set is not None and stream.failure is None
        return stream if has_set else None

    async def _register(
        self, opened: OpenedSession, stream: EventStream, places: Mapping[str, int]
    ) -> None:
        """Register the GPUs that do not report to the stream yet."""
        wanted = {
            name: index for name, index in places.items() if stream.obstacles.get(name, "new")
        }

        def register(name: str, index: int) -> Registered:
            return stream.register(partial(self._table.open, name, index))

        for name, answer in (await self._each(opened, wanted, register)).items():
            if isinstance(answer, GpuError):
                stream.obstacles[name] = answer.text
            elif not isinstance(answer, DriverError):
                uuid, obstacle, address = answer
                stream.obstacles[uuid], stream.known[address] = obstacle, uuid

    def _note_reset(self, gpu: str) -> None:
        """Have a lost or resetting GPU registered again once it answers: a reset forgets it."""
        if self._stream is not None:
            self._stream.obstacles.pop(gpu, None)
