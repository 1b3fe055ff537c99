"""Opens streams of the driver's events and registers the GPUs with them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from functools import partial
from typing import Final

import structlog

from agent.core.errors import DriverError, GpuError
from agent.core.health.reports import DriverEvent, EventKind, Probe, ProbeOutcome
from agent.host.nvml.events import EventStream, SetFailed
from agent.host.nvml.handles import Handles
from agent.host.nvml.indexes import Indexes
from agent.host.nvml.library import NvmlLibrary
from agent.host.nvml.registering import EventRegistration
from agent.host.nvml.session import NO_ANSWER, NvmlSession, OpenedSession

MOST_AWAY: Final = 2
"""If so many stopped threads are still in a wait for events, no further one is started."""

MOST_SETS: Final = 3
"""If so many sets fail, each within SOON seconds, the cause is not a single GPU."""

SOON: Final = 5.0
PAUSE: Final = 1.0

log = structlog.get_logger(__name__)


class Listening:
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
        return all(stream.ended for stream in streams)

    def changed(self) -> None:
        """Report CHANGED, so that all GPUs are scanned again."""
        self._has_changed = not self._streams
        for stream in self._streams:
            stream.tell(DriverEvent(EventKind.CHANGED))

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
            if stream.has_set:
                await self._register(opened, stream, found)

    async def hear_again(self, opened: OpenedSession, probe: Probe) -> None:
        """After a probe, register a GPU again that answers after a reset."""
        if probe.outcome in {ProbeOutcome.LOST, ProbeOutcome.REFUSED}:
            self._unheard.add(probe.uuid)
            for stream in self._streams:
                stream.drop(probe.uuid)
        elif probe.outcome is not ProbeOutcome.SILENT and probe.uuid in self._unheard:
            self._unheard.discard(probe.uuid)
            index = self._indexes.find(probe.uuid)
            if index is None:
                return
            for stream in tuple(self._streams):
                if stream.has_set:
                    await self._register(opened, stream, [index])

    def back(self, name: str) -> None:
        """Register a GPU that was stuck and answers again; that was refused before."""
        index = self._indexes.find(name)
        if index is None or self._session.present is None or name in self._handles.released:
            return
        for stream in self._streams:
            if stream.has_set and not stream.settled(name):
                settle = partial(_settle, stream)
                answer = self._session.threads.post(name, partial(stream.register, index), settle)
                answer.add_done_callback(partial(_take, stream, name))

    def obstacle(self, gpu: str) -> str:
        """Why a GPU's events reach no stream; empty: they do, or there is no stream."""
        return next(filter(None, (s.unmonitored.get(gpu, "") for s in self._streams)), "")

    def _added(self) -> EventStream:
        """Add a stream. Raises DriverError while too many threads are in the library."""
        for earlier in self._away:
            earlier.start()  # if no thread could be started before, it needs one to end
        self._away = [stream for stream in self._away if not stream.ended]
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
        """Register GPUs with `stream`. One that fails is logged once; only probes watch it."""
        async with asyncio.TaskGroup() as tasks:
            for index in indexes:
                if not stream.settled(self._indexes.name(index)):
                    tasks.create_task(self._register_one(opened, stream, index))

    async def _register_one(self, opened: OpenedSession, stream: EventStream, index: int) -> None:
        name = self._indexes.name(index)
        work, late = partial(stream.register, index), partial(_settle, stream)
        try:
            answer = await self._session.call(opened, name, work, late)
        except DriverError:
            return  # the session and its streams are over
        except (TimeoutError, GpuError, self._library.NVMLError, ValueError) as error:
            reason = str(error) or NO_ANSWER
            if stream.missed(name, reason):
                log.warning("driver.no_events", gpu=name, err=reason)
        else:
            _settle(stream, answer)


def _settle(stream: EventStream, answer: EventRegistration) -> None:
    if stream.settle(answer):
        log.warning("driver.no_events", gpu=answer.uuid, err=answer.refused)


def _take(stream: EventStream, name: str, answer: "asyncio.Future[EventRegistration]") -> None:
    """Note the answer to a registration without a waiting caller; the next scan tries again."""
    error = answer.exception()
    if error is None:
        _settle(stream, answer.result())
    else:
        stream.missed(name, str(error) or NO_ANSWER)
