"""The Driver port over NVML: one session for the life of the process, begun anew when it breaks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import structlog

from agent.core.errors import DriverError
from agent.core.events import DriverEvent, Probe, ProbeOutcome
from agent.core.gpu import Gpu, GpuFault, GpuUuid, Scan
from agent.host.nvml import facts
from agent.host.nvml import library as nvml
from agent.host.nvml.events import EventStream, register
from agent.host.nvml.threads import CallPool

T = TypeVar("T")

CALL_DEADLINE: Final = 2.0
OPEN_DEADLINE: Final = 10.0
"""The first call wakes GPUs that no persistence daemon keeps awake, which takes seconds."""

DRIVER: Final = "the driver"

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
        self._library = library
        self._path = path
        self._driver_root = driver_root
        self._sys_root = sys_root
        self._pool = CallPool("nvml", deadline)
        self._opening = asyncio.Lock()
        self._version: str | None = None
        self._broken = ""
        self._begun = False
        self._uuids: dict[int, GpuUuid] = {}
        self._links: Mapping[GpuUuid, facts.LinkRow] | None = None
        self._streams: set[EventStream] = set()
        self._closed = False

    async def scan(self) -> Scan:
        """Look at all GPUs. Raises DriverMissing, DriverError."""
        version = await self._open()
        count = await self._whole(self._library.nvmlDeviceGetCount)
        found: dict[int, Gpu] = {}
        faults: dict[int, GpuFault] = {}
        async with asyncio.TaskGroup() as tasks:
            for index in range(count):
                tasks.create_task(self._describe(index, found, faults))
        self._uuids.update({index: gpu.uuid for index, gpu in found.items()})
        peers = {found[index].uuid: found[index] for index in sorted(found)}
        rows = await self._link_rows(peers)
        for stream in tuple(self._streams):
            await self._register(stream, sorted(found))
        if self._version is None:
            raise DriverError(self._broken)
        return Scan(
            driver_version=version,
            gpus=tuple(facts.linked(gpu, peers, rows) for gpu in peers.values()),
            faults=tuple(faults[index] for index in sorted(faults)),
        )

    async def probe(self, uuid: GpuUuid) -> Probe:
        """Ask one GPU for a sign of life. Raises DriverMissing, DriverError."""
        await self._open()
        try:
            return await self._pool.call(uuid, partial(facts.probe, self._library, uuid))
        except TimeoutError as error:
            return Probe(uuid, ProbeOutcome.SILENT, str(error) or "no answer in time")
        except DriverError as error:
            self._end_session(error)
            raise

    async def events(self) -> AsyncIterator[DriverEvent]:
        """Reports as they come. GPUs that cannot report are named in the log and left to probes.

        Raises DriverMissing, DriverError when the session ends.
        """
        await self._open()
        event_set = await self._whole(self._library.nvmlEventSetCreate)
        stream = EventStream(self._library, event_set)
        count = await self._whole(self._library.nvmlDeviceGetCount)
        await self._register(stream, range(count))
        stream.start()
        self._streams.add(stream)
        try:
            while True:
                yield await stream.next()
        finally:
            self._streams.discard(stream)
            await stream.stop()

    async def close(self) -> None:
        """End the session; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        await self._shut_down()
        self._version = None
        await self._pool.close()

    # The session.

    async def _open(self) -> str:
        """The driver's version; begins the session if there is none."""
        async with self._opening:
            if self._closed:
                raise DriverError("the driver session was closed")
            if self._version is None:
                await self._shut_down()
                self._version = await self._whole(self._begin, OPEN_DEADLINE)
                self._begun = True
            return self._version

    def _begin(self) -> str:
        """On a thread: load the library and begin."""
        nvml.bind(self._library, self._path or nvml.library_below(self._driver_root))
        self._library.nvmlInit()
        return nvml.text_of(self._library.nvmlSystemGetDriverVersion())

    async def _shut_down(self) -> None:
        """End what has begun, unless a thread is still inside the library: that is undefined."""
        away = [await stream.stop() for stream in tuple(self._streams)]
        if self._begun and all(away) and not self._pool.stuck:
            self._begun = False
            with contextlib.suppress(TimeoutError, self._library.NVMLError):
                await self._pool.call(DRIVER, self._library.nvmlShutdown)

    def _end_session(self, error: DriverError) -> None:
        """The next call begins anew; whoever listens is told."""
        log.warning("driver.session_ended", err=str(error))
        self._version = None
        self._broken = str(error)
        self._uuids.clear()
        self._links = None
        for stream in self._streams:
            stream.fail(error)

    async def _whole(self, work: Callable[[], T], deadline: float | None = None) -> T:
        """A call about the driver as a whole. Raises DriverError, DriverMissing."""
        try:
            return await self._pool.call(DRIVER, work, deadline)
        except TimeoutError as error:
            raise DriverError(
                f"the driver does not answer: {str(error) or 'no answer in time'}"
            ) from error
        except self._library.NVMLError as error:
            whole = nvml.driver_wide(error)
            if whole is not None and self._version is not None:
                self._end_session(whole)
            raise whole or DriverError(f"the driver answers with an error: {error}") from error

    # One GPU at a time.

    def _name(self, index: int) -> str:
        return self._uuids.get(index, f"index {index}")

    async def _describe(
        self, index: int, found: dict[int, Gpu], faults: dict[int, GpuFault]
    ) -> None:
        """Take GPU `index` into `found`, or why that fails into `faults`."""
        name = self._name(index)
        work = partial(facts.describe, self._library, index, self._sys_root)
        try:
            found[index] = await self._pool.call(name, work)
        except TimeoutError as error:
            faults[index] = GpuFault(name, str(error) or "does not answer in time")
        except (self._library.NVMLError, ValueError) as error:
            # ValueError: a text that is none, which the binding could not decode.
            faults[index] = self._fault(name, error)

    def _fault(self, name: str, error: Exception) -> GpuFault:
        """What is wrong with one GPU; an error of the whole driver ends the session as well."""
        translated = nvml.translate(error, name)
        if isinstance(translated, DriverError):
            self._end_session(translated)
        return GpuFault(name, str(error), lost=getattr(translated, "lost", False))

    async def _link_rows(self, peers: Mapping[GpuUuid, Gpu]) -> Mapping[GpuUuid, facts.LinkRow]:
        """How the GPUs are joined: asked once for each set of GPUs, for it does not change."""
        if self._links is not None and self._links.keys() == peers.keys():
            return self._links
        rows: dict[GpuUuid, facts.LinkRow] = {}
        for uuid, gpu in peers.items():
            others = {peer: other.index for peer, other in peers.items() if peer != uuid}
            try:
                work = partial(facts.link_row, self._library, gpu, others)
                rows[uuid] = await self._pool.call(uuid, work)
            except (TimeoutError, self._library.NVMLError, ValueError) as error:
                log.info("driver.links_unknown", gpu=uuid, err=str(error))
        if rows.keys() == peers.keys():
            self._links = rows
        return rows

    async def _register(self, stream: EventStream, indexes: Iterable[int]) -> None:
        """Have the GPUs report to `stream`; one that cannot is left to probes, and named once."""
        for index in indexes:
            if index in stream.asked:
                continue
            stream.asked.add(index)
            work = partial(register, self._library, stream.event_set, index)
            try:
                where, uuid = await self._pool.call(self._name(index), work)
                stream.known[where] = uuid
            except (TimeoutError, self._library.NVMLError) as error:
                reason = str(error) or "no answer in time"
                log.warning("driver.no_events", gpu=self._name(index), err=reason)
