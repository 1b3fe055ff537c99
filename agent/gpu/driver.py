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
from msgspec.structs import replace

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

WAIT_MS: Final = 1000  # of one wait, which only an event ends sooner; stopping takes as long
STALL: Final = 2.5  # seconds (2.5 x WAIT_MS): a wait longer than two of these does not return
FAREWELL: Final = 1.2  # seconds for the thread to end: a wait, and a late turn of a busy machine
CLOSED: Final = "the driver session was closed"

Registered = tuple[GpuUuid, str, int]
"""A GPU: its UUID, why it sends no events (empty: it does), and its handle's address."""


class EventStream:
    """The events of one event set, which the stream makes and frees. They wait until taken."""

    def __init__(self, library: NvmlLibrary) -> None:
        self.event_set: Any = None
        self.ended = asyncio.Event()  # the thread has left the library and will not return to it
        self.obstacles: dict[str, str] = {}
        """By UUID or `index N` why a GPU that was asked does not report here; empty: it does."""
        self.known: dict[int, GpuUuid] = {}
        """The GPU of each handle's address; another dict once the indexes have changed."""
        self._library = library
        self._loop = asyncio.get_running_loop()
        self._waiting: collections.deque[DriverEvent] = collections.deque()
        self.failure: DriverError | None = None
        self._news = asyncio.Event()
        self._turns = 0
        self.begun = threading.Event()  # set: the thread waits for events, or frees a failed set
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

            # After all events: an XID can be the reason of what fails next.
            if self.failure is not None:
                raise self.failure

            turns = self._turns
            has_news = await await_event(self._news, until_tick(STALL) + STALL)
            # A wait of the thread's has its own limit, so the thread counts turns without events.
            if not has_news and turns == self._turns:
                self.fail(DriverError("the driver does not return from a wait for events"))

    def fail(self, error: DriverError) -> None:
        """End the stream, also before it has begun: its reader raises `error`, its thread ends."""
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

        Raises NVMLError, GpuError, ValueError (undecodable text), which may pass; DriverError when
        the stream has ended.
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
                # Without it only probes see a fault, and no probe sees an XID.
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
        """Call back on the loop."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop is closed, so nobody waits for the stream.
            self.failure = self.failure or DriverError(CLOSED)


def _address(handle: Handle) -> int:
    """The address that a handle points to, which identifies the GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


# The session with the library: it begins when it is needed, and again after it broke.

CALL_DEADLINE: Final = 2.0  # seconds
OPEN_DEADLINE: Final = 10.0  # without a persistence daemon, the first call wakes the GPUs
# One wait for events (WAIT_MS) and a call: each step of the end has a deadline of its own, and a
# driver that hangs would use up all of them.
CLOSE_DEADLINE: Final = 3.0
# A library that has ended so many, one after the other, does not count them: none is left.
MOST_SESSIONS: Final = 10_000

_OUTCOMES: Final = {
    Trouble.LOST: ProbeOutcome.LOST,
    Trouble.RESET: ProbeOutcome.REFUSED,
    Trouble.SILENT: ProbeOutcome.SILENT,
}


class Session(msgspec.Struct, eq=False):
    """A session that has begun. `links`: between the GPUs of its last scan. No two are equal."""

    driver_version: str
    links: dict[str, tuple[Link, ...]] = msgspec.field(default_factory=dict)


class NvmlDriver:
    """Implements agent.ports.Driver: one session after the other. Call all methods on the loop.

    - `library` is the module pynvml or one with its functions. `path` names the library file to use
      instead of the soname; `driver_root` is a directory like the host's `/` to search first. A
      library that is loaded is kept. `sys_root` is the mounted /sys.
    - Each call has `deadline` seconds: one about a GPU that does not return makes only that GPU
      silent. When it returns, the stream hears CHANGED, so that all are scanned and probed again.
    - A late answer of an earlier session does not end the current one, and no call of an earlier
      session begins.
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
        self._threads = GpuThreads(deadline, self._on_return)
        self._table = GpuTable(library, sys_root)
        self._preparing = asyncio.Lock()  # held while a session begins or all end
        self._session: Session | None = None  # the session that has begun and not ended
        self._withheld = ""  # why no session may begin; empty: one may
        self._newest: EventStream | None = None  # the newest stream, which ends with its session
        self._renewed = False  # all GPUs failed and it began anew, and none has answered since

    async def scan(self) -> Scan:
        """Describe all GPUs, or those that are not released. Raises DriverMissing, DriverError."""
        session, table = await self._open(), self._table
        found, faults = await self._describe(session, await self._places(session))

        if table.released:
            # Also one that was never described: it must be visible to be taken back.
            faults += map(table.released_fault, sorted(table.released))
        else:
            self._renewed = self._renewed and not found
            found = await self._with_links(session, found)
            if not table.seen(found) and self._stream is not None:
                # The indexes changed: an event of a handle may be of another GPU now.
                self._stream.known, self._stream.obstacles = {}, {}
            faults = [replace(fault, gpu=table.name(fault.index)) for fault in faults]

        table.described |= {gpu.pci for gpu in found}
        # With a fault, a GPU that is not listed may be the one that is not described.
        if not faults:
            faults = await self._call(session, DRIVER, table.unlisted)

        if self._stream is not None:
            await self._register(session, self._stream, {gpu.uuid: gpu.index for gpu in found})

        self._ensure_current(session)
        return Scan(session.driver_version, tuple(found), tuple(faults))

    async def probe(self, uuid: GpuUuid) -> Probe:
        """Probe one GPU. Raises DriverMissing, DriverError."""
        session = await self._open()
        try:
            probe = await self._call(session, uuid, partial(self._table.probe, uuid))
        except CallFailed as error:
            probe = Probe(uuid, _OUTCOMES.get(error.trouble, ProbeOutcome.FAILED), error.text)

        self._renewed = self._renewed and probe.outcome is not ProbeOutcome.PASSED
        # The driver forgets the registration of a GPU that is reset, and tells nobody: without
        # this, its next XID would be heard by no set.
        if probe.outcome in {ProbeOutcome.LOST, ProbeOutcome.REFUSED}:
            self._note_reset(uuid)
        elif self._stream is not None and probe.outcome is not ProbeOutcome.SILENT:
            known = self._table.find(uuid)
            await self._register(session, self._stream, {uuid: known.index if known else NO_INDEX})

        obstacle = self._stream.obstacles.get(uuid, "") if self._stream is not None else ""
        return replace(probe, unmonitored=obstacle)

    async def sample(self, uuid: GpuUuid) -> GpuSample:
        """Read how much one GPU is used. Raises GpuError, DriverMissing, DriverError."""
        return await self._call(await self._open(), uuid, partial(self._table.sample, uuid))

    async def release(self, uuids: Collection[GpuUuid], *, everything: bool = False) -> None:
        """Close these GPUs and use none of them until it is taken back.

        With `everything`, also close all others until any GPU is taken back. A session holds what
        it opened, so it is ended; GPUs that are left are used in a new one. Raises GpuError for an
        unknown GPU, DriverError when a call does not return and holds them.
        """
        if self._table.release(uuids, everything=everything):
            self._withheld = "all GPUs are released: hami-agent recheck takes them back"
        await self._shut("GPUs are released; a new session begins without them")

    def take_back(self, uuid: GpuUuid) -> None:
        """Use a released GPU again."""
        self._table.released -= {uuid}
        self._note_reset(uuid)
        self._withheld = ""

    def check(self) -> None:
        """Raise DriverMissing: a package replaced the library in use; blocks nothing."""
        other = self._session and nvml.successor(self._library, self._find())
        if other:
            raise DriverMissing(
                f"The driver's library was replaced by {other}, and the kernel module was not: "
                "a new container's CUDA fails with a version mismatch",
                remedy="reboot the node, or reload the module and restart the agent [P-DRIVER]",
            )

    async def renew(self) -> bool:
        """End the session so that the next call begins another; only once until a GPU answers."""
        if self._renewed or self._session is None:
            return False
        self._renewed = True
        self._end(DriverError("all GPUs fail; a new session begins"))
        return True

    async def close(self) -> None:
        """End the session; after CLOSE_DEADLINE the process may end with it. The threads stay."""
        self._withheld = CLOSED
        with contextlib.suppress(DriverError, TimeoutError):
            async with asyncio.timeout(CLOSE_DEADLINE):
                await self._shut(CLOSED)

    # What a scan asks.

    async def _each(
        self, session: Session, places: Mapping[str, int], work: Callable[[str, int], T]
    ) -> dict[str, T | GpuError | DriverError]:
        """Call `work` with each name and index at once. Returns all answers and failures."""

        async def one(name: str, index: int) -> T | GpuError | DriverError:
            try:
                return await self._call(session, name, partial(work, name, index))
            except (DriverError, GpuError) as error:
                return error

        async with asyncio.TaskGroup() as tasks:
            calls = {name: tasks.create_task(one(name, index)) for name, index in places.items()}
        return {name: call.result() for name, call in calls.items()}

    async def _describe(
        self, session: Session, places: Mapping[str, int]
    ) -> tuple[list[Gpu], list[GpuFault]]:
        """The GPUs, and what fails instead, by index. Raises DriverError: the session is over."""
        found: list[Gpu] = []
        faults: list[GpuFault] = []
        for name, answer in (await self._each(session, places, self._table.describe)).items():
            if isinstance(answer, Gpu):
                found.append(answer)
            elif isinstance(answer, CallFailed):
                # Else it was just released, or the session is over, which is raised below.
                if answer.trouble in {Trouble.LOST, Trouble.RESET}:
                    self._note_reset(name)
                # Of a silent one always the same words, or each look would be news.
                text = NO_ANSWER if answer.trouble is Trouble.SILENT else answer.text
                faults.append(GpuFault(name, text, answer.trouble, places[name]))

        self._ensure_current(session)
        return found, faults

    async def _places(self, session: Session) -> dict[str, int]:
        """The indexes that may be opened, by name."""
        if not self._table.released:  # else their number tells nothing of the others
            count = await self._call(session, DRIVER, self._library.nvmlDeviceGetCount)
            self._table.count = count
        return self._table.places()

    async def _with_links(self, session: Session, gpus: list[Gpu]) -> list[Gpu]:
        """The GPUs with the links between them, read once for each set of GPUs in a session."""
        if session.links.keys() != {gpu.uuid for gpu in gpus}:
            places = {str(gpu.uuid): gpu.index for gpu in gpus}
            answers = await self._each(session, places, partial(self._table.links, gpus))
            # Without those that fail, so the next scan reads them again.
            session.links = {name: row for name, row in answers.items() if isinstance(row, tuple)}
        return [replace(gpu, links=session.links.get(gpu.uuid, ())) for gpu in gpus]

    # Events.

    async def events(self, opened: Callable[[], None] | None = None) -> AsyncIterator[DriverEvent]:
        """Yield events as they come. `opened` is called once all GPUs report that can.

        Raises DriverMissing, DriverError when the session ends, or the wait does not return or
        fails, as it does for all GPUs when one is lost.
        """
        session = await self._open()
        # The last one's thread must have left the library.
        if self._newest is not None and not await self._newest.stop():
            raise DriverError("an earlier wait for events has not returned from the driver")
        try:
            stream = self._newest = EventStream(self._library)
        except RuntimeError as error:
            raise DriverError(f"no thread can be started to wait for events: {error}") from error

        try:
            await self._call(session, DRIVER, stream.create)
            await self._register(session, stream, await self._places(session))
            self._ensure_current(session)
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
        stream = self._newest
        has_set = stream is not None and stream.event_set is not None and stream.failure is None
        return stream if has_set else None

    async def _register(
        self, session: Session, stream: EventStream, places: Mapping[str, int]
    ) -> None:
        """Register the GPUs that do not report to the stream yet."""
        wanted = {name: at for name, at in places.items() if stream.obstacles.get(name, "new")}

        def register(name: str, index: int) -> Registered:
            return stream.register(partial(self._table.open, name, index))

        for name, answer in (await self._each(session, wanted, register)).items():
            if isinstance(answer, GpuError):
                stream.obstacles[name] = answer.text
            elif not isinstance(answer, DriverError):
                uuid, obstacle, address = answer
                stream.obstacles[uuid], stream.known[address] = obstacle, uuid

    def _note_reset(self, gpu: str) -> None:
        """Have a lost or resetting GPU registered again once it answers: a reset forgets it."""
        if self._stream is not None:
            self._stream.obstacles.pop(gpu, None)

    def _on_return(self) -> None:
        if self._newest is not None:
            self._newest.put(DriverEvent(EventKind.CHANGED))

    # Calls, and the sessions in which they are made.

    async def _call(
        self,
        session: Session | None,
        gpu: str,
        work: Callable[[], T],
        deadline: float | None = None,
    ) -> T:
        """Make a call about one GPU, or DRIVER.

        Raises CallFailed about a GPU, DriverError if that session is over or DRIVER fails.
        """

        def make() -> T:
            if session is not None:
                self._ensure_current(session)  # it may have ended while the call waited
            return work()

        try:
            return await self._threads.call(gpu, make, deadline)
        except (TimeoutError, ValueError, self._library.NVMLError) as error:
            wide = nvml.driver_wide(error, about_gpu=gpu != DRIVER)
            if wide is not None and session is not None and session is self._session:
                self._end(wide)
            raise wide or nvml.failure(error, gpu) from error

    def _ensure_current(self, session: Session) -> None:
        """Raise DriverError if that session is over."""
        if self._session is not session:
            raise DriverError("the session with the driver has ended")

    async def _open(self) -> Session:
        """Return the current session, or begin one. Raises DriverMissing, DriverError.

        The beginning goes on when its caller is cancelled or times out: a later one finds it open.
        """
        async with self._preparing:
            if self._withheld:
                raise DriverError(self._withheld)
            if self._session is not None:
                return self._session
            # To end a session during a call is undefined. A call that returned later would go on
            # in the new session.
            begin = partial(self._begin, alone=await self._is_idle())
            return await self._call(None, DRIVER, begin, OPEN_DEADLINE)

    def _begin(self, *, alone: bool) -> Session:
        """Load the library and begin a session, unless an earlier beginning has done so since.

        While a call is inside, the old session stays open beside the new one. Runs on a thread.
        """
        library = self._library
        if self._withheld:  # since it was asked for
            raise DriverError(self._withheld)
        if self._session is not None:
            return self._session
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

        self._session = Session(nvml.text_of(library.nvmlSystemGetDriverVersion()))
        return self._session

    def _end(self, error: DriverError) -> None:
        """Note that the session is over, and report it; the next call begins a new one."""
        if self._session is None:
            return
        log.warning("driver.session_ended", err=str(error))
        self._session = None
        if self._newest is not None:
            self._newest.fail(error)

    async def _shut(self, why: str) -> None:
        """End the session, which closes all GPUs. Raises DriverError: a call does not return."""
        async with self._preparing:
            self._end(DriverError(why))
            if not await self._is_idle():
                raise DriverError("a call has not returned from the driver, which holds all GPUs")
            if await self._call(None, DRIVER, self._end_all):
                raise DriverError("the driver does not end the session, which holds all GPUs")

    async def _is_idle(self) -> bool:
        """Wait until no call and no event thread is in the library; False: some do not leave."""
        are_back = await self._threads.drained()
        return (self._newest is None or await self._newest.stop()) and are_back

    def _end_all(self) -> str:
        """End all sessions, which the library counts, on a thread. Returns why not, or nothing."""
        self._session = None
        try:
            for _ in range(MOST_SESSIONS):
                self._library.nvmlShutdown()
        except self._library.NVMLError as error:
            return "" if nvml.code(error) == pynvml.NVML_ERROR_UNINITIALIZED else str(error)
        return ""
