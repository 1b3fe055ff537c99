"""Events of the driver: one event set, one daemon thread that waits on it, no policy."""

import asyncio
import collections
import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any, Final

from agent.core.errors import DriverError
from agent.core.events import DriverEvent, EventKind
from agent.core.gpu import GpuUuid
from agent.host.nvml.library import (
    EVENT_ECC_DOUBLE,
    EVENT_ECC_SINGLE,
    EVENT_XID,
    TIMEOUT,
    Handle,
    NvmlLibrary,
    code,
    driver_wide,
    text_of,
)

WAIT_MS: Final = 500
"""One wait in the library: how long stopping may take, at an idle cost of 0.04 % of a core."""

WANTED: Final = EVENT_XID | EVENT_ECC_DOUBLE | EVENT_ECC_SINGLE
EVENT_LIMIT: Final = 4096
MOST_FAILURES: Final = 10
FAILURE_PAUSE: Final = 1.0
FAREWELL: Final = 0.7

_KINDS: Final = {
    EVENT_ECC_DOUBLE: EventKind.ECC_DOUBLE,
    EVENT_ECC_SINGLE: EventKind.ECC_SINGLE,
}


def address(handle: Handle) -> int:
    """What tells two handles of the library apart: where they point to."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def register(library: NvmlLibrary, event_set: Any, index: int) -> tuple[int, GpuUuid]:  # noqa: ANN401 -- the library's own
    """Have GPU `index` report to `event_set`; return its address and UUID. Blocks.

    Raises NVMLError: NOT_SUPPORTED for a GPU without events.
    """
    handle = library.nvmlDeviceGetHandleByIndex(index)
    uuid = GpuUuid(text_of(library.nvmlDeviceGetUUID(handle)))
    mask = library.nvmlDeviceGetSupportedEventTypes(handle) & WANTED
    library.nvmlDeviceRegisterEvents(handle, mask, event_set)
    return address(handle), uuid


class EventStream:
    """The events of one set. The thread only moves them; it frees the set when it ends.

    At most EVENT_LIMIT wait to be read; when more come, the oldest go and CHANGED tells that
    everything is to be looked at again.
    """

    def __init__(self, library: NvmlLibrary, event_set: Any) -> None:  # noqa: ANN401 -- the library's own
        self.event_set = event_set
        self.known: dict[int, GpuUuid] = {}
        self.asked: set[int] = set()
        self._library = library
        self._loop = asyncio.get_running_loop()
        self._queue: collections.deque[DriverEvent] = collections.deque(maxlen=EVENT_LIMIT)
        self._overflown = False
        self._failure: DriverError | None = None
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._stopping = threading.Event()

    def start(self) -> None:
        """Begin to wait."""
        threading.Thread(target=self._serve, name="nvml-events", daemon=True).start()

    async def next(self) -> DriverEvent:
        """The next event. Raises DriverError once the stream has failed and is read empty."""
        while not self._queue:
            if self._overflown:
                self._overflown = False
                return DriverEvent(EventKind.CHANGED)
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()
        return self._queue.popleft()

    def fail(self, error: DriverError) -> None:
        """On the loop: the session is over; readers are told, the thread is sent home."""
        self._failure = self._failure or error
        self._stopping.set()
        self._news.set()

    async def stop(self) -> bool:
        """Send the thread home. False when it does not come: then the set may not be touched."""
        self.fail(DriverError("the driver session was closed"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL):
                await self._ended.wait()
        return self._ended.is_set()

    def _serve(self) -> None:
        """The thread's life. A wait that fails is tried again, but never in a busy loop."""
        failures = 0
        while not self._stopping.is_set():
            try:
                data = self._library.nvmlEventSetWait_v2(self.event_set, WAIT_MS)
            except self._library.NVMLError as error:
                if code(error) == TIMEOUT:
                    continue
                failures += 1
                if failures >= MOST_FAILURES or driver_wide(error) is not None:
                    text = f"waiting for events failed: {error}"
                    self._tell(self.fail, driver_wide(error) or DriverError(text))
                    break
                # A GPU that is lost makes the wait fail for all of them: look at each.
                self._put(DriverEvent(EventKind.CHANGED))
                self._stopping.wait(FAILURE_PAUSE)
            else:
                failures = 0
                self._put(self._event(data))
        with contextlib.suppress(self._library.NVMLError):
            self._library.nvmlEventSetFree(self.event_set)
        self._tell(self._ended.set)

    def _event(self, data: Any) -> DriverEvent | None:  # noqa: ANN401 -- nvmlEventData_t
        uuid = self._whose(data.device)
        if data.eventType & EVENT_XID:
            return DriverEvent(EventKind.XID, uuid, int(data.eventData))
        kind = _KINDS.get(data.eventType)
        return None if kind is None else DriverEvent(kind, uuid)

    def _whose(self, handle: Handle) -> GpuUuid | None:
        """The GPU by its address: one that has just fallen off the bus tells its UUID no more."""
        known = self.known.get(address(handle))
        if known is not None:
            return known
        try:
            return GpuUuid(text_of(self._library.nvmlDeviceGetUUID(handle)))
        except self._library.NVMLError:
            return None

    def _put(self, event: DriverEvent | None) -> None:
        if event is None:
            return
        if len(self._queue) == EVENT_LIMIT:
            self._overflown = True
        self._queue.append(event)
        if not self._news.is_set():
            self._tell(self._news.set)

    def _tell(self, callback: Callable[..., object], *args: object) -> None:
        """Call back on the loop; a loop that is gone needs no news."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._stopping.set()
