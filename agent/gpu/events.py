"""The driver's events: registered, waited for on a thread, and given to streams."""

import asyncio
import collections
import contextlib
import ctypes
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, Final

import msgspec
import structlog

from agent.errors import DriverError, GpuError
from agent.gpu.handles import Handles, Indexes
from agent.gpu.nvml import (
    EVENT_ECC_DOUBLE,
    EVENT_ECC_SINGLE,
    EVENT_MIG_CHANGE,
    EVENT_POWER_SOURCE,
    EVENT_XID,
    NO_ANSWER,
    TIMEOUT,
    Handle,
    NvmlLibrary,
    NvmlSession,
    OpenedSession,
    code,
    driver_wide,
    is_unable,
    text_of,
)
from agent.health.xids import XIDS
from agent.kit.tasks import show_thread_name
from agent.kit.timing import until_tick
from agent.model import DriverEvent, EventKind, GpuUuid, Probe, ProbeOutcome

WANTED: Final = (
    EVENT_XID | EVENT_ECC_DOUBLE | EVENT_ECC_SINGLE | EVENT_POWER_SOURCE | EVENT_MIG_CHANGE
)


class EventRegistration(msgspec.Struct, frozen=True):
    """The answer of a GPU to its registration. `refused`: why it sends no events; empty: it does.

    `where` is its handle's address, `era` the stream's era at the call.
    """

    where: int
    uuid: GpuUuid
    refused: str
    era: int


def address(handle: Handle) -> int:
    """The address that a handle points to, which identifies the GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


log = structlog.get_logger(__name__)

WAIT_MS: Final = 1000
"""Milliseconds of one wait in the library, which only an event ends sooner.

Stopping takes as long. An idle wait costs one wake-up and 0.01 % of a core.
"""

STALL: Final = 2.5
"""Seconds (2.5 x WAIT_MS): a wait longer than two of these does not return."""

EVENT_LIMIT: Final = 4096
FAREWELL: Final = 1.2
"""Seconds for the thread to end: a wait, and a late turn of a busy machine."""

_KINDS: Final = {
    EVENT_XID: EventKind.XID,
    EVENT_ECC_DOUBLE: EventKind.ECC_DOUBLE,
    EVENT_ECC_SINGLE: EventKind.ECC_SINGLE,
    EVENT_POWER_SOURCE: EventKind.POWER_SOURCE,
    EVENT_MIG_CHANGE: EventKind.CHANGED,
}


class SetFailed(DriverError):  # noqa: N818 -- names what happened
    """A wait for events failed: one GPU of the set may be lost; the driver may be healthy."""


class EventStream:
    """The events of one event set, which the stream makes and frees.

    Events that nobody has taken yet wait in the order in which they came first, equal ones counted
    together. Beyond EVENT_LIMIT different ones, one more for each GPU is kept of the XIDs that the
    table does not name, which all mean the same: a storm hides no fatal XID. CHANGED reports that
    events were dropped.
    """

    def __init__(self, library: NvmlLibrary, handles: Handles) -> None:
        self._handles = handles
        self.event_set: Any = None
        """The library's own; None until it exists."""
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
        self._stopping = threading.Event()
        self._turns = 0
        self._started = False
        self._lock = threading.Lock()
        self._users = 1

    # On the loop.

    def start(self) -> None:
        """Start the thread, which waits for events; if the stream was stopped, it frees the set.

        If no thread can be started, the stream has failed; start it again to end it.
        """
        if self._started:
            return
        try:
            threading.Thread(target=self._serve, name="nvml-events", daemon=True).start()
        except RuntimeError as error:
            self._stopping.set()
            self.fail(DriverError(f"no thread can be started to wait for events: {error}"))
        else:
            self._started = True

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

    def answered(self, gpu: str, answer: "asyncio.Future[EventRegistration]") -> None:
        """Note the answer to a registration without a waiting caller; the next scan tries again."""
        error = answer.exception()
        if error is None:
            self.settle(answer.result())
        else:
            self.missed(gpu, str(error) or NO_ANSWER)

    def keep(self, gpus: Collection[str]) -> None:
        """Forget all other GPUs; if they come back, they are registered again."""
        self.settled.intersection_update(gpus)
        for gone in self.unmonitored.keys() - gpus:
            del self.unmonitored[gone]

    def forget(self) -> None:
        """Forget all GPUs, after their indexes changed: a handle may name another GPU now."""
        self._era += 1
        self.settled.clear()
        self._known = {}

    async def next(self) -> DriverEvent:
        """Return the next event. Raises SetFailed, DriverError once the stream failed and is empty.

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
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period):
                    await self._news.wait()
            if self._news.is_set() or turns != self._turns:
                return
        self.fail(DriverError("the driver does not return from a wait for events"))

    def fail(self, error: DriverError) -> None:
        """End the stream: its reader raises `error`, and the thread ends after its wait."""
        self._failure = self._failure or error
        self._stopping.set()
        self._news.set()

    async def stop(self) -> bool:
        """End the thread. False when it does not end in time: then do not touch the set."""
        self.fail(DriverError("the driver session was closed"))
        self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL):
                await self.ended.wait()
        return self.ended.is_set()

    # On the threads of the GPUs.

    def create(self) -> None:
        """Create the set. Blocks. Raises NVMLError, DriverError when the stream has ended."""
        with self._inside():
            self.event_set = self._library.nvmlEventSetCreate()

    def register(self, index: int) -> EventRegistration:
        """Register GPU `index` with the set. Blocks. A GPU without events is an answer too.

        Raises NVMLError, GpuError, ValueError (undecodable text): these failures may pass.
        Raises DriverError when the stream has ended.
        """
        era, library, refused = self._era, self._library, ""
        with self._inside():
            handle = self._handles.of_index(index)
            uuid = GpuUuid(text_of(library.nvmlDeviceGetUUID(handle)))
            try:
                mask = library.nvmlDeviceGetSupportedEventTypes(handle) & WANTED
                if mask:  # an empty mask is an invalid argument
                    library.nvmlDeviceRegisterEvents(handle, mask, self.event_set)
                if not mask & EVENT_XID:
                    refused = "it does not report XIDs"
            except library.NVMLError as error:
                if not is_unable(error):
                    raise
                refused = f"it has no events: {error}"
        return EventRegistration(address(handle), uuid, refused, era)

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
        with self._lock:
            self._users -= 1
            last = not self._users
        if last and self.event_set is not None:
            with contextlib.suppress(self._library.NVMLError):
                self._library.nvmlEventSetFree(self.event_set)

    # On its own thread.

    def _serve(self) -> None:
        """Run the thread and report its end: a silent end would look like healthy GPUs."""
        show_thread_name(threading.current_thread().name)
        try:
            while not self._stopping.is_set():
                self._turns += 1
                try:
                    data = self._library.nvmlEventSetWait_v2(self.event_set, WAIT_MS)
                except self._library.NVMLError as error:
                    if code(error) == TIMEOUT:
                        continue
                    failure = driver_wide(error)
                    if failure is None:
                        # One lost GPU fails the wait for all: have each GPU scanned.
                        self.put(DriverEvent(EventKind.CHANGED))
                        failure = SetFailed(f"waiting for events failed: {error}")
                    self._tell(self.fail, failure)
                    break
                is_xid = data.eventType & EVENT_XID
                kind = _KINDS.get(EVENT_XID if is_xid else data.eventType)
                if kind is not None:
                    number = int(data.eventData) if is_xid else None
                    self.put(DriverEvent(kind, self._uuid(data.device), number))
        except Exception as error:  # noqa: BLE001 -- any error that ends the thread is reported
            text = f"the thread that waits for events has died: {error!r}"
            self._tell(self.fail, DriverError(text))
        self._leave()
        self._tell(self.ended.set)

    def _uuid(self, handle: Handle) -> GpuUuid | None:
        """The GPU of a handle, first by its address: a lost GPU does not answer with its UUID."""
        known = self._known.get(address(handle))
        if known is not None:
            return known
        try:
            return GpuUuid(text_of(self._library.nvmlDeviceGetUUID(handle)))
        except (self._library.NVMLError, ValueError):
            return None

    def put(self, event: DriverEvent) -> None:
        """Add an event, from any thread."""
        with self._lock:
            has_room = event in self._waiting or len(self._waiting) < EVENT_LIMIT
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
            self._stopping.set()


# Opens streams of the driver's events and registers the GPUs with them.

MOST_AWAY: Final = 2
"""If so many stopped threads are still in a wait for events, no further one is started."""

MOST_SETS: Final = 3
"""If so many sets fail, each within SOON seconds, the cause is not a single GPU."""

SOON: Final = 5.0
PAUSE: Final = 1.0


class EventStreams:
    """The event streams of the driver, over all sessions. Call all methods on the loop."""

    def __init__(
        self, library: NvmlLibrary, session: NvmlSession, indexes: Indexes, handles: Handles
    ) -> None:
        self._handles = handles
        self._library = library
        self._session = session
        self._indexes = indexes
        self._streams: list[EventStream] = []
        self._away: list[EventStream] = []
        """Stopped streams whose thread may still be in the library."""
        self._unheard: set[str] = set()
        """GPUs that were lost or refused: after a reset they must be registered again."""
        self._has_changed = False
        """The GPUs changed while there was no stream."""

    async def events(self, opened: Callable[[], None] | None) -> AsyncIterator[DriverEvent]:
        """Yield events as they come, from one event set after the other.

        A lost GPU fails the wait of its whole set. The next set, made at once, does not contain it.
        Raises DriverMissing, DriverError.
        """
        failed = 0
        while True:
            session = await self._session.open()
            stream = self._added()
            begun = asyncio.get_running_loop().time()
            is_ending = False
            try:
                await self._open(session, stream)
                if opened is not None:
                    opened()
                    opened = None
                while True:
                    yield await stream.next()
            except asyncio.CancelledError:
                is_ending = True  # close() waits for the thread, up to a second
                raise
            except SetFailed as error:
                is_soon = asyncio.get_running_loop().time() - begun < SOON
                failed = failed + 1 if is_soon else 1
                if failed >= MOST_SETS:
                    raise DriverError(str(error)) from error
            finally:
                self._streams.remove(stream)
                self._away.append(stream)
                if is_ending:
                    stream.fail(DriverError("the driver session was closed"))
                else:
                    await stream.stop()
            if failed > 1:
                await asyncio.sleep(PAUSE)

    def fail(self, error: DriverError) -> None:
        """End all streams with `error`: the session is over."""
        for stream in self._streams:
            stream.fail(error)

    async def quiet(self) -> bool:
        """End all threads for events. False when one of them does not end in time."""
        streams = {*self._streams, *self._away}
        async with asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.stop())
        return all(stream.ended.is_set() for stream in streams)

    def changed(self) -> None:
        """Report CHANGED, so that all GPUs are scanned again."""
        self._has_changed = not self._streams
        for stream in self._streams:
            stream.put(DriverEvent(EventKind.CHANGED))

    def forget(self) -> None:
        """Forget all GPUs, after their indexes changed: an event may be of another GPU now."""
        for stream in self._streams:
            stream.forget()

    def unhear(self, gpu: str) -> None:
        """Note a lost or resetting GPU: it is registered again once it answers."""
        self._unheard.add(gpu)

    async def follow(
        self,
        opened: OpenedSession,
        found: Iterable[int],
        gpus: Collection[str],
        silent: Collection[str],
    ) -> None:
        """After a scan, register new GPUs and forget the ones gone.

        `found` are indexes, `gpus` their UUIDs; `silent` GPUs exist but did not answer.
        """
        slow = set(silent) - self._unheard
        for stream in tuple(self._streams):
            stream.keep({*gpus, *slow})
            await self._register(opened, stream, found)

    async def hear_again(self, opened: OpenedSession, probe: Probe) -> None:
        """After a probe, register a GPU again that answers after a reset."""
        if probe.outcome in {ProbeOutcome.LOST, ProbeOutcome.REFUSED}:
            self._unheard.add(probe.uuid)
            for stream in self._streams:
                stream.settled.discard(probe.uuid)  # registered again once it answers
        elif probe.outcome is not ProbeOutcome.SILENT and probe.uuid in self._unheard:
            self._unheard.discard(probe.uuid)
            index = self._indexes.find(probe.uuid)
            if index is None:
                return
            for stream in tuple(self._streams):
                await self._register(opened, stream, [index])

    def back(self, name: str) -> None:
        """Register a GPU that was stuck and answers again; that was refused before."""
        index = self._indexes.find(name)
        if index is None or self._session.present is None or name in self._handles.released:
            return
        for stream in self._streams:
            if stream.event_set is not None and name not in stream.settled:
                work = partial(stream.register, index)
                answer = self._session.threads.launch(name, work, stream.settle, timed=True)
                answer.add_done_callback(partial(stream.answered, name))

    def obstacle(self, gpu: str) -> str:
        """Why a GPU's events reach no stream; empty: they do, or there is no stream."""
        return next(filter(None, (s.unmonitored.get(gpu, "") for s in self._streams)), "")

    def _added(self) -> EventStream:
        """Add a stream. Raises DriverError while too many threads are in the library."""
        for earlier in self._away:
            earlier.start()  # if no thread could be started before, it needs one to end
        self._away = [stream for stream in self._away if not stream.ended.is_set()]
        if len(self._away) >= MOST_AWAY:
            raise DriverError("earlier waits for events have not returned from the driver")
        stream = EventStream(self._library, self._handles)
        self._streams.append(stream)
        return stream

    async def _open(self, session: OpenedSession, stream: EventStream) -> None:
        await self._session.whole(session, stream.create)
        count = await self._session.whole(session, self._library.nvmlDeviceGetCount)
        if not self._handles.released and not self._indexes.counted(count):
            self.forget()
        await self._register(session, stream, self._handles.open_to(count))
        self._session.check(session)
        stream.start()
        if self._has_changed:
            self.changed()

    async def _register(
        self, opened: OpenedSession, stream: EventStream, indexes: Iterable[int]
    ) -> None:
        """Register GPUs with `stream` if its set exists. One that fails is logged once."""

        async def register(index: int, name: str) -> None:
            work = partial(stream.register, index)
            try:
                stream.settle(await self._session.call(opened, name, work, stream.settle))
            except DriverError:
                return  # the session and its streams are over
            except (TimeoutError, GpuError, self._library.NVMLError, ValueError) as error:
                stream.missed(name, str(error) or NO_ANSWER)

        async with asyncio.TaskGroup() as tasks:
            for index in indexes if stream.event_set is not None else ():
                name = self._indexes.name(index)
                if name not in stream.settled:
                    tasks.create_task(register(index, name))
