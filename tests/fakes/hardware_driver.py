"""The driver port over simulated hardware in this loop, without a socket: on virtual time."""

from collections.abc import AsyncIterator, Callable

from agent.model import DriverEvent, GpuUuid, Probe, Scan
from agent.sandbox.hardware import SimulatedHardware
from tests.fakes.driver import ScriptedDriver


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
        cursor = self.hardware.subscribe()
        if opened is not None:
            opened()
        while True:
            for event in await cursor.next():
                yield event
