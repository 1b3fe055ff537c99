"""The Driver port over NVML: scans, probes and events, one GPU's trouble never another's."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import structlog

from agent.core.errors import DriverError, GpuError
from agent.core.events import DriverEvent, Probe, ProbeOutcome
from agent.core.gpu import Gpu, GpuFault, GpuUuid, Scan
from agent.core.gpu_signs import GpuProcess, GpuSample
from agent.host.nvml import facts, links, signs
from agent.host.nvml import library as nvml
from agent.host.nvml.events import EventStream
from agent.host.nvml.indexes import Indexes
from agent.host.nvml.registering import Registered
from agent.host.nvml.session import Opened, Session

T = TypeVar("T")

CALL_DEADLINE: Final = 2.0
NO_ANSWER: Final = "no answer in time"
MOST_AWAY: Final = 2
"""Threads for events that may stay in a wait before no more of them are sent there."""

log = structlog.get_logger(__name__)


class NvmlDriver:
    """Implements agent.core.ports.Driver.

    `library` is the module pynvml, or one of its shape; `path` names the library file to use in
    place of the soname, `driver_root` a directory like the host's `/` to look for it first;
    `sys_root` is the mounted /sys. Each call has a deadline of its own: a call
    about one GPU that does not come back makes that GPU silent, and only that one.
    """

    def __init__(
        self,
        library: nvml.NvmlLibrary,
        *,
        path: Path | None = None,
        driver_root: Path | None = None,
        sys_root: Path = Path("/sys"),
        deadline: float = CALL_DEADLINE,
    ) -> None:
        def find() -> Path | None:
            return path or nvml.library_below(driver_root)

        self._library = library
        self._sys_root = sys_root
        self._session = Session(
            library, find, deadline, self._session_ended, self._quiet, self._back
        )
        self._call = self._session.call
        self._indexes = Indexes()
        self._links: Mapping[GpuUuid, links.LinkRow] | None = None
        self._streams: list[EventStream] = []
        self._away: list[EventStream] = []
        """Those that were sent home; until they have ended they may be in the library."""
        self._unheard: set[str] = set()
        """Lost or refused when they were last asked: with a reset what they registered is gone."""

    async def scan(self) -> Scan:
        """Look at all GPUs. Raises DriverMissing, DriverError."""
        opened = await self._session.open()
        count = await self._session.whole(opened, self._library.nvmlDeviceGetCount)
        self._counted(count)
        found: dict[int, Gpu] = {}
        troubled: dict[int, GpuFault] = {}
        async with asyncio.TaskGroup() as tasks:
            for index in range(count):
                tasks.create_task(self._describe(opened, index, found, troubled))
        self._session.check(opened)
        if not self._indexes.seen({index: gpu.uuid for index, gpu in found.items()}):
            self._forget()
        faults = self._indexes.named(troubled)
        peers = {found[index].uuid: found[index] for index in sorted(found)}
        rows = await self._link_rows(opened, peers)
        slow = {fault.gpu for fault in faults if not fault.lost} - self._unheard
        for stream in tuple(self._streams):
            stream.keep(peers.keys() | slow)
            if stream.has_set:
                await self._register(opened, stream, sorted(found))
        self._session.check(opened)
        return Scan(
            driver_version=opened.driver_version,
            gpus=tuple(links.linked(gpu, peers, rows) for gpu in peers.values()),
            faults=faults,
            library_version=opened.library_version,
        )

    async def probe(self, uuid: GpuUuid) -> Probe:
        """Ask one GPU for a sign of life. Raises DriverMissing, DriverError."""
        opened = await self._session.open()
        try:
            probe = await self._call(opened, uuid, partial(signs.probe, self._library, uuid))
        except TimeoutError as error:
            probe = Probe(uuid, ProbeOutcome.SILENT, str(error) or NO_ANSWER)
        except DriverError as error:
            self._session.end(error, opened)
            raise
        await self._hear_again(opened, probe)
        reasons = (stream.unmonitored.get(uuid, "") for stream in self._streams)
        return dataclasses.replace(probe, unmonitored=next(filter(None, reasons), ""))

    async def sample(self, uuid: GpuUuid) -> GpuSample:
        """How much one GPU is used. Raises GpuError, DriverMissing, DriverError."""
        return await self._ask(uuid, partial(signs.sample, self._library, uuid))

    async def processes(self, uuid: GpuUuid) -> tuple[GpuProcess, ...] | None:
        """Who uses one GPU. Raises GpuError, DriverMissing, DriverError."""
        return await self._ask(uuid, partial(signs.processes, self._library, uuid))

    async def events(self, opened: Callable[[], None] | None = None) -> AsyncIterator[DriverEvent]:
        """Reports as they come. GPUs that cannot report are named in the log and left to probes.

        `opened` is called when all others report, which may take as long as a GPU may to answer.

        Raises DriverMissing, DriverError when the session ends, or the wait does not come back.
        """
        session = await self._session.open()
        for earlier in self._away:
            earlier.start()  # one for which the machine gave no thread ends on one
        self._away = [stream for stream in self._away if not stream.ended]
        if len(self._away) >= MOST_AWAY:
            raise DriverError("earlier waits for events have not come back from the driver")
        stream = EventStream(self._library)
        self._streams.append(stream)
        try:
            await self._session.whole(session, stream.create)
            count = await self._session.whole(session, self._library.nvmlDeviceGetCount)
            self._counted(count)
            await self._register(session, stream, range(count))
            self._session.check(session)
            stream.start()
            if opened is not None:
                opened()
            while True:
                yield await stream.next()
        finally:
            self._streams.remove(stream)
            self._away.append(stream)
            await stream.stop()

    async def close(self) -> None:
        """End the session; a second call does nothing."""
        await self._session.close()

    def _session_ended(self, error: DriverError) -> None:
        self._links = None
        for stream in self._streams:
            stream.fail(error)

    async def _quiet(self) -> bool:
        """Send all threads for events home, at once. False when one of them does not come."""
        streams = {*self._streams, *self._away}
        async with asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.stop())
        return all(stream.ended for stream in streams)

    # One GPU at a time.

    def _counted(self, count: int) -> None:
        if not self._indexes.counted(count):
            self._forget()

    def _forget(self) -> None:
        """GPUs came, went or moved: no stream knows for certain whose an event is."""
        for stream in self._streams:
            stream.forget()

    async def _ask(self, uuid: GpuUuid, work: Callable[[], T]) -> T:
        """A question to one GPU whose failure is nothing but that. Raises GpuError, DriverError."""
        opened = await self._session.open()
        try:
            return await self._call(opened, uuid, work)
        except TimeoutError as error:
            raise GpuError(uuid, str(error) or NO_ANSWER) from error
        except self._library.NVMLError as error:
            translated = nvml.translate(error, uuid)
            if isinstance(translated, DriverError):
                self._session.end(translated, opened)
            raise translated from error

    async def _describe(
        self, opened: Opened, index: int, found: dict[int, Gpu], faults: dict[int, GpuFault]
    ) -> None:
        """Take GPU `index` into `found`, or why that fails into `faults`."""
        name = self._indexes.name(index)
        work = partial(facts.describe, self._library, index, self._sys_root)
        try:
            found[index] = await self._call(opened, name, work)
        except (TimeoutError, DriverError) as error:
            # DriverError: the session is over, which the scan as a whole says.
            faults[index] = GpuFault(name, str(error) or NO_ANSWER)
        except (self._library.NVMLError, ValueError) as error:
            # ValueError: a text that is none, which the binding could not decode.
            translated = nvml.translate(error, name)
            if isinstance(translated, DriverError):
                self._session.end(translated, opened)
            lost = getattr(translated, "lost", False)
            if lost or nvml.code(error) == nvml.RESET_REQUIRED:
                self._unheard.add(name)
            faults[index] = GpuFault(name, str(error), lost=lost)

    async def _link_rows(
        self, opened: Opened, peers: Mapping[GpuUuid, Gpu]
    ) -> Mapping[GpuUuid, links.LinkRow]:
        """How the GPUs are joined: asked once for each set of GPUs, for it does not change."""
        if self._links is not None and self._links.keys() == peers.keys():
            return self._links
        rows: dict[GpuUuid, links.LinkRow] = {}
        async with asyncio.TaskGroup() as tasks:
            for gpu in peers.values():
                tasks.create_task(self._link_row(opened, gpu, peers, rows))
        if rows.keys() == peers.keys():
            self._links = rows
        return rows

    async def _link_row(
        self,
        opened: Opened,
        gpu: Gpu,
        peers: Mapping[GpuUuid, Gpu],
        rows: dict[GpuUuid, links.LinkRow],
    ) -> None:
        others = {peer: other.index for peer, other in peers.items() if peer != gpu.uuid}
        work = partial(links.link_row, self._library, gpu, others)
        try:
            rows[gpu.uuid] = await self._call(opened, gpu.uuid, work)
        except (TimeoutError, DriverError, self._library.NVMLError, ValueError) as error:
            log.info("driver.links_unknown", gpu=gpu.uuid, err=str(error) or NO_ANSWER)

    async def _register(self, opened: Opened, stream: EventStream, indexes: Iterable[int]) -> None:
        """Have the GPUs report to `stream`; one that does not is left to probes, and named once."""
        async with asyncio.TaskGroup() as tasks:
            for index in indexes:
                if not stream.settled(self._indexes.name(index)):
                    tasks.create_task(self._register_one(opened, stream, index))

    async def _hear_again(self, opened: Opened, probe: Probe) -> None:
        """One that answers again after a reset is asked again to report, before the next scan."""
        if probe.outcome is ProbeOutcome.LOST or probe.signs.refused:
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

    async def _register_one(self, opened: Opened, stream: EventStream, index: int) -> None:
        name = self._indexes.name(index)
        work, late = partial(stream.register, index), partial(_settle, stream)
        try:
            answer = await self._call(opened, name, work, late)
        except DriverError:
            return  # the session is over, and the stream with it
        except (TimeoutError, self._library.NVMLError, ValueError) as error:
            reason = str(error) or NO_ANSWER
            if stream.missed(name, reason):
                log.warning("driver.no_events", gpu=name, err=reason)
        else:
            _settle(stream, answer)

    def _back(self, name: str) -> None:
        """A GPU that was stuck answers: it is asked at once to report, which was refused before."""
        index = self._indexes.find(name)
        if index is None or self._session.present is None:
            return
        for stream in self._streams:
            if stream.has_set and not stream.settled(name):
                settle = partial(_settle, stream)
                asked = self._session.pool.post(name, partial(stream.register, index), settle)
                asked.add_done_callback(partial(_take, stream, name))


def _settle(stream: EventStream, answer: Registered) -> None:
    if stream.settle(answer):
        log.warning("driver.no_events", gpu=answer.uuid, err=answer.refused)


def _take(stream: EventStream, name: str, asked: "asyncio.Future[Registered]") -> None:
    """What came of asking a GPU that nobody waits for; the next scan asks again."""
    error = asked.exception()
    if error is None:
        _settle(stream, asked.result())
    else:
        stream.missed(name, str(error) or NO_ANSWER)
