"""Events of the driver: one event set, one daemon thread that waits on it, no policy."""

import asyncio
import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

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

WAIT_MS: Final = 500
"""One wait in the library: how long stopping may take, at an idle cost of 0.04 % of a core."""

STALL: Final = 2.5
"""A wait that outlasts two of these, five times WAIT_MS each, does not come back."""

EVENT_LIMIT: Final = 4096
FAREWELL: Final = 0.7

_KINDS: Final = {
    EVENT_ECC_DOUBLE: EventKind.ECC_DOUBLE,
    EVENT_ECC_SINGLE: EventKind.ECC_SINGLE,
    EVENT_POWER_SOURCE: EventKind.POWER_SOURCE,
    EVENT_MIG_CHANGE: EventKind.CHANGED,
}


class SetFailed(DriverError):  # noqa: N818 -- names what happened
    """A wait for events failed: one GPU of the set may be lost, and the driver be well."""


class EventStream:
    """The events of one set, which the stream makes and frees. The thread only moves them.

    At most EVENT_LIMIT wait in their order; of more that come each different one is kept, with how
    often it came: a fatal XID must outlive a storm of others. When even these are too many, one
    more of each GPU is kept of those XIDs that the table does not name, which all mean the same,
    and CHANGED tells that not all were.
    """

    def __init__(self, library: NvmlLibrary, handles: Handles) -> None:
        self._handles = handles
        self._event_set: Any = None
        self.unmonitored: dict[str, str] = {}
        """Why a GPU (its UUID, or `index N`) does not report here."""
        self._known: dict[int, GpuUuid] = {}
        """Whose handle points where. Replaced as a whole, for the thread reads it."""
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
        """Begin to wait, once there is a set; a stream that was stopped before only frees it.

        Where the machine gives no thread the stream has failed, and may be started again to end.
        """
        if self._started:
            return
        try:
            threading.Thread(target=self._serve, name="nvml-events", daemon=True).start()
        except RuntimeError as error:
            self._stopping.set()
            self.fail(DriverError(f"there is no thread to wait for events: {error}"))
        else:
            self._started = True

    @property
    def has_set(self) -> bool:
        """True once there is a set to register GPUs with."""
        return self._event_set is not None

    @property
    def ended(self) -> bool:
        """True once the thread has left the library for good."""
        return self._ended.is_set()

    def settled(self, gpu: str) -> bool:
        """True when there is nothing to ask of this GPU: it reports, or never will."""
        return gpu in self._settled

    def settle(self, found: EventRegistration) -> bool:
        """Take what came of asking. True when it is news that the GPU will never report."""
        if found.era != self._era:
            return False
        self._settled.add(found.uuid)
        others = {where: uuid for where, uuid in self._known.items() if uuid != found.uuid}
        self._known = others | {found.where: found.uuid}
        if found.refused:
            return self.missed(found.uuid, found.refused)
        self.unmonitored.pop(found.uuid, None)
        return False

    def missed(self, gpu: str, reason: str) -> bool:
        """The GPU does not report. True when that, or why, is news."""
        before = self.unmonitored.get(gpu)
        self.unmonitored[gpu] = reason
        return before != reason

    def keep(self, gpus: Collection[str]) -> None:
        """All others are gone: should they come back, they are asked anew."""
        self._settled.intersection_update(gpus)
        for gone in self.unmonitored.keys() - gpus:
            del self.unmonitored[gone]

    def drop(self, gpu: str) -> None:
        """It is away or being reset: it is asked anew as soon as it answers."""
        self._settled.discard(gpu)

    def forget(self) -> None:
        """GPUs came, went or moved: all are asked anew, for a handle may be another's now."""
        self._era += 1
        self._settled.clear()
        self._known = {}

    def tell(self, event: DriverEvent) -> None:
        """Hand on what is known on the loop."""
        self._put(event)

    async def next(self) -> DriverEvent:
        """The next event. Raises SetFailed, DriverError once the stream has failed and is empty.

        A thread whose wait does not come back is a failure, too: silence is no good news.
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
        """One of those that did not find room, each as often as it came."""
        with self._lock:
            event = next(iter(self._storm))
            self._storm[event] -= 1
            if not self._storm[event]:
                del self._storm[event]
            if not self._storm:
                self._strange.clear()
        return event

    async def _wait(self) -> None:
        """For news; a stopped or starved process is given two periods."""
        turns = self._turns
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STALL):
                    await self._news.wait()
            if self._news.is_set() or turns != self._turns:
                return
        self.fail(DriverError("the driver does not come back from a wait for events"))

    def fail(self, error: DriverError) -> None:
        """On the loop: the session is over; readers are told, the thread is sent home."""
        self._failure = self._failure or error
        self._stopping.set()
        self._news.set()

    async def stop(self) -> bool:
        """Send the thread home. False when it does not come: then the set may not be touched."""
        self.fail(DriverError("the driver session was closed"))
        self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL):
                await self._ended.wait()
        return self._ended.is_set()

    # On the threads of the GPUs.

    def create(self) -> None:
        """Make the set. Blocks. Raises NVMLError, DriverError when the stream has ended."""
        with self._inside():
            self._event_set = self._library.nvmlEventSetCreate()

    def register(self, index: int) -> EventRegistration:
        """Have GPU `index` report here. Blocks.

        Raises NVMLError, GpuError, ValueError for no text, DriverError when the stream has ended.
        """
        era = self._era
        with self._inside():
            found = register(self._library, self._handles, self._event_set, index)
        return dataclasses.replace(found, era=era)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """For as long as a thread needs the set. Raises DriverError when the stream has ended."""
        with self._lock:
            if not self._users:
                raise DriverError("the stream of events has ended")
            self._users += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        """The last one out frees the set: another call may outlast the thread that waits."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last and self._event_set is not None:
            free(self._library, self._event_set)

    # On its own thread.

    def _serve(self) -> None:
        """The thread's life. Whatever ends it is told: a silent end would look like sound GPUs."""
        try:
            self._listen()
        except Exception as error:  # noqa: BLE001 -- the thread's last word, whatever it is
            text = f"the thread that waits for events has died: {error!r}"
            self._tell(self.fail, DriverError(text))
        self._leave()
        self._tell(self._ended.set)

    def _listen(self) -> None:
        """Until it is sent home, or a wait fails."""
        while not self._stopping.is_set():
            self._turns += 1
            try:
                data = self._library.nvmlEventSetWait_v2(self._event_set, WAIT_MS)
            except self._library.NVMLError as error:
                if code(error) == TIMEOUT:
                    continue
                whole = driver_wide(error)
                if whole is None:  # a GPU that is lost makes it fail for all of them: look at each
                    self._put(DriverEvent(EventKind.CHANGED))
                self._tell(self.fail, whole or SetFailed(f"waiting for events failed: {error}"))
                return
            self._put(self._event(data))

    def _event(self, data: Any) -> DriverEvent | None:  # noqa: ANN401 -- nvmlEventData_t
        uuid = self._whose(data.device)
        if data.eventType & EVENT_XID:
            return DriverEvent(EventKind.XID, uuid, int(data.eventData))
        kind = _KINDS.get(data.eventType)
        return None if kind is None else DriverEvent(kind, uuid)

    def _whose(self, handle: Handle) -> GpuUuid | None:
        """The GPU by its address: one that has just fallen off the bus tells its UUID no more."""
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
        """Whether a different event is kept: what has a name always, for there are not many."""
        if len(self._storm) < EVENT_LIMIT or event.xid is None or event.xid in XIDS:
            return True
        is_first = event.uuid not in self._strange
        self._strange.add(event.uuid)
        return is_first

    def _tell(self, callback: Callable[..., object], *args: object) -> None:
        """Call back on the loop; a loop that is gone needs no news."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._stopping.set()
