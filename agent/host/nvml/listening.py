"""Who listens to the driver's events: streams that open, GPUs that are asked to report to them."""

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
"""Threads for events that may stay in a wait before no more of them are sent there."""

MOST_SETS: Final = 3
"""So many sets that fail one soon after the other, and it is not one GPU that makes them fail."""

SOON: Final = 5.0
PAUSE: Final = 1.0

log = structlog.get_logger(__name__)


class Listening:
    """The streams of one driver, over all its sessions. All methods are called on the loop."""

    def __init__(
        self, library: NvmlLibrary, session: NvmlSession, indexes: Indexes, handles: Handles
    ) -> None:
        self._handles = handles
        self._library = library
        self._session = session
        self._indexes = indexes
        self._streams: list[EventStream] = []
        self._away: list[EventStream] = []
        """Those that were sent home; until they have ended they may be in the library."""
        self._unheard: set[str] = set()
        """Lost or refused when they were last asked: with a reset what they registered is gone."""
        self._has_changed = False
        """Something changed while nobody listened."""

    async def events(self, opened: Callable[[], None] | None) -> AsyncIterator[DriverEvent]:
        """Reports as they come, from one set after the other.

        A GPU that is lost makes the wait fail for all of its set: the next set, which is made at
        once, does without it. Raises DriverMissing, DriverError.
        """
        failed = 0
        while True:
            session = await self._session.open()
            stream = self._added()
            begun = asyncio.get_running_loop().time()
            try:
                await self._open(session, stream)
                if opened is not None:
                    opened()
                    opened = None
                while True:
                    yield await stream.next()
            except SetFailed as error:
                is_soon = asyncio.get_running_loop().time() - begun < SOON
                failed = failed + 1 if is_soon else 1
                if failed >= MOST_SETS:
                    raise DriverError(str(error)) from error
            finally:
                self._streams.remove(stream)
                self._away.append(stream)
                await stream.stop()
            if failed > 1:
                await asyncio.sleep(PAUSE)

    def fail(self, error: DriverError) -> None:
        """The session is over: whoever listens is told."""
        for stream in self._streams:
            stream.fail(error)

    async def quiet(self) -> bool:
        """Send all threads for events home, at once. False when one of them does not come."""
        streams = {*self._streams, *self._away}
        async with asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.stop())
        return all(stream.ended for stream in streams)

    def changed(self) -> None:
        """Have whoever listens look at all GPUs again."""
        self._has_changed = not self._streams
        for stream in self._streams:
            stream.tell(DriverEvent(EventKind.CHANGED))

    def forget(self) -> None:
        """GPUs came, went or moved: no stream knows for certain whose an event is."""
        for stream in self._streams:
            stream.forget()

    def unhear(self, gpu: str) -> None:
        """It was found lost or to be reset: it is asked anew when it answers."""
        self._unheard.add(gpu)

    async def follow(
        self,
        opened: OpenedSession,
        found: Iterable[int],
        gpus: Collection[str],
        silent: Collection[str],
    ) -> None:
        """A scan has found these: the new ones are asked to report, those that went forgotten.

        `silent` are there as well, and did not answer.
        """
        slow = set(silent) - self._unheard
        for stream in tuple(self._streams):
            stream.keep({*gpus, *slow})
            if stream.has_set:
                await self._register(opened, stream, found)

    async def hear_again(self, opened: OpenedSession, probe: Probe) -> None:
        """One that answers again after a reset is asked again to report, before the next scan."""
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
        """A GPU that was stuck answers: it is asked at once to report, which was refused before."""
        index = self._indexes.find(name)
        if index is None or self._session.present is None or name in self._handles.released:
            return
        for stream in self._streams:
            if stream.has_set and not stream.settled(name):
                settle = partial(_settle, stream)
                asked = self._session.threads.post(name, partial(stream.register, index), settle)
                asked.add_done_callback(partial(_take, stream, name))

    def obstacle(self, gpu: str) -> str:
        """Why its reports do not reach a listener; empty: they do, or nobody listens."""
        return next(filter(None, (one.unmonitored.get(gpu, "") for one in self._streams)), "")

    def _added(self) -> EventStream:
        """A stream more. Raises DriverError while too many threads are in the library."""
        for earlier in self._away:
            earlier.start()  # one for which the machine gave no thread ends on one
        self._away = [stream for stream in self._away if not stream.ended]
        if len(self._away) >= MOST_AWAY:
            raise DriverError("earlier waits for events have not come back from the driver")
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
        """Have the GPUs report to `stream`; one that does not is left to probes, and named once."""
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
            return  # the session is over, and the stream with it
        except (TimeoutError, GpuError, self._library.NVMLError, ValueError) as error:
            reason = str(error) or NO_ANSWER
            if stream.missed(name, reason):
                log.warning("driver.no_events", gpu=name, err=reason)
        else:
            _settle(stream, answer)


def _settle(stream: EventStream, answer: EventRegistration) -> None:
    if stream.settle(answer):
        log.warning("driver.no_events", gpu=answer.uuid, err=answer.refused)


def _take(stream: EventStream, name: str, asked: "asyncio.Future[EventRegistration]") -> None:
    """What came of asking a GPU that nobody waits for; the next scan asks again."""
    error = asked.exception()
    if error is None:
        _settle(stream, asked.result())
    else:
        stream.missed(name, str(error) or NO_ANSWER)
