"""A driver that says what the test wants, on virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable

from agent.errors import AgentError, DriverError, GpuError
from agent.model import (
    DriverEvent,
    EventKind,
    Gpu,
    GpuFault,
    GpuSample,
    GpuSigns,
    GpuUuid,
    Probe,
    ProbeOutcome,
    Scan,
)
from agent.sandbox.hardware import SimulatedHardware


class ScriptedDriver:
    """Implements the Driver port. `failure` makes every call raise; `hung` answers nothing."""

    def __init__(self, gpus: Iterable[Gpu] = (), version: str = "570.86.15") -> None:
        self.gpus = list(gpus)
        self.faults: list[GpuFault] = []
        self.version = version
        self.failure: AgentError | None = None
        self.hung = False
        self.outcomes: dict[GpuUuid, ProbeOutcome] = {}
        self.texts: dict[GpuUuid, str] = {}
        """What a probe says that does not pass."""
        self.signs: dict[GpuUuid, GpuSigns] = {}
        self.unmonitored: dict[GpuUuid, str] = {}
        self.samples: dict[GpuUuid, GpuSample] = {}
        self.probes: list[GpuUuid] = []
        self.streams = 0
        self.listening = False
        """A stream of events is open."""
        self.opening = 0.0
        """Seconds that a stream of events takes to open."""
        self.replaced: DriverError | None = None
        self.renewable = False
        """Another session can be begun once."""
        self.mended_by_renewal = False
        self.renewals = 0
        self.released: set[GpuUuid] = set()
        self._events: asyncio.Queue[DriverEvent | AgentError | None] = asyncio.Queue()

    def report(self, *events: DriverEvent) -> None:
        """The driver reports these, in this order."""
        for event in events:
            self._events.put_nowait(event)

    def xid(self, uuid: GpuUuid | None, number: int) -> None:
        """The driver reports an XID."""
        self.report(DriverEvent(EventKind.XID, uuid, number))

    def break_events(self, error: AgentError | None = None) -> None:
        """The running stream of events ends with an error."""
        self._events.put_nowait(error or DriverError("the event thread died"))

    def end_events(self) -> None:
        """The running stream of events ends without an error."""
        self._events.put_nowait(None)

    async def scan(self) -> Scan:
        await self._answer()
        return Scan(self.version, tuple(self.gpus), tuple(self.faults))

    async def probe(self, uuid: GpuUuid) -> Probe:
        self.probes.append(uuid)
        if uuid in self.released:
            raise GpuError(uuid, "it is released")
        outcome = self.outcomes.get(uuid, ProbeOutcome.PASSED)
        if outcome is ProbeOutcome.SILENT:
            await asyncio.Event().wait()
        await self._answer()
        return Probe(
            uuid,
            outcome,
            "" if outcome is ProbeOutcome.PASSED else self.texts.get(uuid, "as scripted"),
            self.signs.get(uuid, GpuSigns()),
            self.unmonitored.get(uuid, ""),
        )

    async def sample(self, uuid: GpuUuid) -> GpuSample:
        await self._answer_for(uuid)
        return self.samples.get(uuid, GpuSample(uuid))

    async def events(self, opened: Callable[[], None] | None = None) -> AsyncIterator[DriverEvent]:
        self.streams += 1
        await asyncio.sleep(self.opening)
        if self.failure is not None:
            raise self.failure
        self.listening = True
        if opened is not None:
            opened()
        while isinstance(item := await self._events.get(), DriverEvent):
            yield item
        self.listening = False
        if item is not None:
            raise item

    async def release(self, uuids: Collection[GpuUuid], *, everything: bool = False) -> None:
        self.released |= set(uuids)
        if self.failure is not None:
            raise self.failure

    def check(self) -> None:
        if self.replaced is not None:
            raise self.replaced

    def take_back(self, uuid: GpuUuid) -> None:
        self.released.discard(uuid)

    async def renew(self) -> bool:
        self.renewals += 1
        renewed = self.renewable and self.renewals == 1
        if renewed and self.mended_by_renewal:
            self.outcomes, self.faults = {}, []
        return renewed

    async def close(self) -> None:
        """Nothing is open."""

    async def _answer_for(self, uuid: GpuUuid) -> None:
        """As a GPU does that is scripted to be so."""
        outcome = self.outcomes.get(uuid, ProbeOutcome.PASSED)
        if outcome is ProbeOutcome.SILENT:
            await asyncio.Event().wait()
        await self._answer()
        if outcome is not ProbeOutcome.PASSED:
            raise GpuError(uuid, "as scripted", lost=outcome is ProbeOutcome.LOST)

    async def _answer(self) -> None:
        if self.hung:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure


class HardwareDriver(ScriptedDriver):
    """Answers what the hardware says, as soon as it does not hang."""

    def __init__(self, hardware: SimulatedHardware) -> None:
        super().__init__()
        self.hardware = hardware

    async def scan(self) -> Scan:
        await self.hardware.until_answering()
        return self.hardware.scan()

    async def probe(self, uuid: GpuUuid) -> Probe:
        self.probes.append(uuid)
        await self.hardware.until_answering()
        return self.hardware.probe(uuid)

    async def events(self, opened: Callable[[], None] | None = None) -> AsyncIterator[DriverEvent]:
        self.streams += 1
        events = self.hardware.subscribe()
        if opened is not None:
            opened()
        while True:
            event = await events.get()
            await self.hardware.until_answering()
            yield event
