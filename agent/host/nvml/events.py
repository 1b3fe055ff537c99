"""Reads the driver's events: one event set and one daemon thread that waits on it."""

import asyncio
import collections
import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

import msgspec

from agent.core.errors import DriverError
from agent.core.health.reports import DriverEvent, EventKind
from agent.core.health.xids import XIDS
from agent.core.inventory.gpu import GpuUuid
from agent.host.nvml.handles import Handles
from agent.host.nvml.library import (
    EVENT_ECC_DOUBLE,
    EVENT_ECC_SINGLE,
    EVENT_MIG_CHANGE,
    EVENT_POWER_SOURCE,
    EVENT_XID,
    TIMEOUT,
    Handle,
    NvmlLibrary,
    code,
    driver_wide,
    text_of,
)
from agent.host.nvml.registering import EventRegistration, address, free, register
from agent.kit.offload import show_thread_name
from agent.kit.ticks import until_tick

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
    EVENT_ECC_DOUBLE: EventKind.ECC_DOUBLE,
    EVENT_ECC_SINGLE: EventKind.ECC_SINGLE,
    EVENT_POWER_SOURCE: EventKind.POWER_SOURCE,
    EVENT_MIG_CHANGE: EventKind.CHANGED,
}


class SetFailed(DriverError):  # noqa: N818 -- names what happened
    """A wait for events failed: one GPU of the set may be lost; the driver may be healthy."""


class EventStream:
    """The events of one event set, which the stream makes and frees.

    A queue holds at most EVENT_LIMIT events in order. Beyond that, each different event is counted,
    so that a storm of events hides no fatal XID. Beyond EVENT_LIMIT different ones, one more for
    each GPU is kept of the XIDs that the table does not name, which all mean the same. CHANGED
    reports that events were dropped.
    """

    def __init__(self, library: NvmlLibrary, handles: Handles) -> None:
        self._handles = handles
        self._event_set: Any = None
        self.unmonitored: dict[str, str] = {}
        """Why a GPU (its UUID, or `index N`) does not report to this stream."""
        self._known: dict[int, GpuUuid] = {}
        """The GPU of each handle's address. Only replaced, never changed: the thread reads it."""
        self._era = 0
        self._settled: set[str] = set()
        self._library = library
        self._loop = asyncio.get_running_loop()
        self._queue: collections.deque[DriverEvent] = collections.deque()
        self._storm: collections.Counter[DriverEvent] = collections.Counter()
        self._overflown = False
        self._strange: set[GpuUuid | None] = set()
        self._failure: DriverError | None = None
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
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

    @property
    def has_set(self) -> bool:
        """True once the event set exists."""
        return self._event_set is not None

    @property
    def ended(self) -> bool:
        """True once the thread has left the library and will not return to it."""
        return self._ended.is_set()

    def settled(self, gpu: str) -> bool:
        """True when this GPU reports, or never will."""
        return gpu in self._settled

    def settle(self, answer: EventRegistration) -> bool:
        """Note the answer of a GPU. True for the first answer that it will never report."""
        if answer.era != self._era:
            return False
        self._settled.add(answer.uuid)
        others = {where: uuid for where, uuid in self._known.items() if uuid != answer.uuid}
        self._known = others | {answer.where: answer.uuid}
        if answer.refused:
            return self.missed(answer.uuid, answer.refused)
        self.unmonitored.pop(answer.uuid, None)
        return False

    def missed(self, gpu: str, reason: str) -> bool:
        """Note why the GPU does not report. True when the reason is new."""
        before = self.unmonitored.get(gpu)
        self.unmonitored[gpu] = reason
        return before != reason

    def keep(self, gpus: Collection[str]) -> None:
        """Forget all other GPUs; if they come back, they are registered again."""
        self._settled.intersection_update(gpus)
        for gone in self.unmonitored.keys() - gpus:
            del self.unmonitored[gone]

    def drop(self, gpu: str) -> None:
        """Forget a lost or resetting GPU; it is registered again once it answers."""
        self._settled.discard(gpu)

    def forget(self) -> None:
        """Forget all GPUs, after their indexes changed: a handle may name another GPU now."""
        self._era += 1
        self._settled.clear()
        self._known = {}

    def tell(self, event: DriverEvent) -> None:
        """Add an event from the loop."""
        self._put(event)

    async def next(self) -> DriverEvent:
        """Return the next event. Raises SetFailed, DriverError once the stream failed and is empty.

        A wait of the thread that does not return is a failure.
        """
        while True:
            self._news.clear()
            if self._queue:
                return self._queue.popleft()
            if self._storm:
                return self._of_storm()
            if self._overflown:
                self._overflown = False
                return DriverEvent(EventKind.CHANGED)
            if self._failure is not None:
                raise self._failure
            await self._wait()

    def _of_storm(self) -> DriverEvent:
        """One of the counted events."""
        with self._lock:
            event = next(iter(self._storm))
            self._storm[event] -= 1
            if not self._storm[event]:
                del self._storm[event]
            if not self._storm:
                self._strange.clear()
        return event

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
                await self._ended.wait()
        return self._ended.is_set()

    # On the threads of the GPUs.

    def create(self) -> None:
        """Create the set. Blocks. Raises NVMLError, DriverError when the stream has ended."""
        with self._inside():
            self._event_set = self._library.nvmlEventSetCreate()

    def register(self, index: int) -> EventRegistration:
        """Register GPU `index` with the set. Blocks.

        Raises NVMLError, GpuError, ValueError (undecodable text), DriverError when the stream has
        ended.
        """
        era = self._era
        with self._inside():
            answer = register(self._library, self._handles, self._event_set, index)
        return msgspec.structs.replace(answer, era=era)

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
        if last and self._event_set is not None:
            free(self._library, self._event_set)

    # On its own thread.

    def _serve(self) -> None:
        """Run the thread and report its end: a silent end would look like healthy GPUs."""
        show_thread_name(threading.current_thread().name)
        try:
            self._listen()
        except Exception as error:  # noqa: BLE001 -- any error that ends the thread is reported
            text = f"the thread that waits for events has died: {error!r}"
            self._tell(self.fail, DriverError(text))
        self._leave()
        self._tell(self._ended.set)

    def _listen(self) -> None:
        """Move events until the stream is stopped or a wait fails."""
        while not self._stopping.is_set():
            self._turns += 1
            try:
                data = self._library.nvmlEventSetWait_v2(self._event_set, WAIT_MS)
            except self._library.NVMLError as error:
                if code(error) == TIMEOUT:
                    continue
                driver_error = driver_wide(error)
                if (
                    driver_error is None
                ):  # one lost GPU fails the wait for all: have each GPU scanned
                    self._put(DriverEvent(EventKind.CHANGED))
                self._tell(
                    self.fail, driver_error or SetFailed(f"waiting for events failed: {error}")
                )
                return
            self._put(self._event(data))

    def _event(self, data: Any) -> DriverEvent | None:  # noqa: ANN401 -- nvmlEventData_t
        uuid = self._uuid(data.device)
        if data.eventType & EVENT_XID:
            return DriverEvent(EventKind.XID, uuid, int(data.eventData))
        kind = _KINDS.get(data.eventType)
        return None if kind is None else DriverEvent(kind, uuid)

    def _uuid(self, handle: Handle) -> GpuUuid | None:
        """The GPU of a handle, first by its address: a lost GPU does not answer with its UUID."""
        known = self._known.get(address(handle))
        if known is not None:
            return known
        try:
            return GpuUuid(text_of(self._library.nvmlDeviceGetUUID(handle)))
        except (self._library.NVMLError, ValueError):
            return None

    def _put(self, event: DriverEvent | None) -> None:
        if event is None:
            return
        with self._lock:
            if not self._storm and len(self._queue) < EVENT_LIMIT:
                self._queue.append(event)
            elif event in self._storm or self._has_room(event):
                self._storm[event] += 1
            else:
                self._overflown = True
        if not self._news.is_set():
            self._tell(self._news.set)

    def _has_room(self, event: DriverEvent) -> bool:
        """Whether one more different event is kept; always if the table names its XID."""
        if len(self._storm) < EVENT_LIMIT or event.xid is None or event.xid in XIDS:
            return True
        is_first = event.uuid not in self._strange
        self._strange.add(event.uuid)
        return is_first

    def _tell(self, callback: Callable[..., object], *args: object) -> None:
        """Call back on the loop; a closed loop ends the stream."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._stopping.set()
