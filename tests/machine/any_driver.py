"""A driver of which each call may fail or hang, and each GPU may be lost, silent or wrong."""

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec

from agent.errors import AgentError, DriverError, GpuError
from agent.model import DriverEvent, GpuFault, GpuSigns, GpuUuid, Probe, ProbeOutcome, Scan, Trouble
from tests.builders import a_gpu, a_uuid
from tests.fakes.driver import ScriptedDriver

GPUS = 3
UUIDS = tuple(a_uuid(n) for n in range(GPUS))
NO_ANSWER = DriverError("Unknown Error")


class AnyDriver(ScriptedDriver):
    """Nothing is queued for who listens later."""

    def __init__(self) -> None:
        super().__init__(a_gpu(index=n) for n in range(GPUS))
        self.troubles: dict[str, AgentError] = {}
        self.listeners = 0
        self.taken_out: set[GpuUuid] = set()

    def restart(self) -> None:
        """The process that used it is gone."""
        self._events = asyncio.Queue()
        self.listeners = 0

    @property
    def sound(self) -> bool:
        """Whether scans and probes are answered."""
        return not self.hung and not self.troubles.keys() & {"scan", "probe"}

    def told_of(self, uuid: GpuUuid) -> GpuSigns:
        """What the GPU says of itself now."""
        return self.signs.get(uuid, GpuSigns())

    async def scan(self) -> Scan:
        self._fail("scan")
        lost = [u for u in UUIDS if self.outcomes.get(u) is ProbeOutcome.LOST]
        listed = [uuid for uuid in lost if uuid not in self.taken_out]
        self.faults = [GpuFault(uuid, "GPU is lost", Trouble.LOST) for uuid in listed]
        found = await super().scan()
        return msgspec.structs.replace(
            found, gpus=tuple(gpu for gpu in found.gpus if gpu.uuid not in lost)
        )

    async def probe(self, uuid: GpuUuid) -> Probe:
        self._fail("probe")
        if uuid in self.taken_out:
            raise GpuError(uuid, "Not Found")
        return await super().probe(uuid)

    async def events(self, opened: Callable[[], None] | None = None) -> AsyncIterator[DriverEvent]:
        self._fail("events")
        self._events = asyncio.Queue()  # the driver keeps nothing for who comes later
        self.listeners += 1
        try:
            async for event in super().events(opened):
                yield event
        finally:
            self.listeners -= 1

    def _fail(self, call: str) -> None:
        if call in self.troubles:
            raise self.troubles[call]
