"""Samples the usage of each GPU every 5 s and keeps the samples for 15 minutes, in memory."""

import asyncio
import datetime as dt
import math
from typing import Final, NoReturn

from agent.core.errors import DriverError, GpuError
from agent.core.inventory.condition import Condition
from agent.core.inventory.gpu import GpuSample, GpuUuid, Sampled
from agent.core.inventory.inventory import Inventory, SharedGpu
from agent.core.ports import Clock, Driver
from agent.kit.cell import Cell
from agent.kit.ring import Ring
from agent.kit.ticks import until_tick

PERIOD: Final = 5.0
DEADLINE: Final = 2.0
KEPT: Final = 900.0
"""Seconds for which a sample is kept."""

ROWS: Final = round(KEPT / PERIOD)
COLUMNS: Final = 4
"""A row has 32 bytes, so a GPU takes 5,760 bytes and sixteen GPUs 90 KiB."""

FRESH: Final = 2 * PERIOD + DEADLINE
"""Seconds for which a sample counts as the present usage."""


class Samples:
    """Asks the GPUs of the inventory for their usage.

    A GPU that is lost, gone or silent is not asked until its probes pass; its history has a gap
    there. Failures are not reported here: the probes report them. The samples of a GPU that leaves
    the inventory are dropped.
    """

    def __init__(self, driver: Driver, inventory: Cell[Inventory], clock: Clock) -> None:
        self._driver = driver
        self._inventory = inventory
        self._origin = clock.now() - dt.timedelta(seconds=_loop_time())
        self._rings: dict[GpuUuid, Ring] = {}
        self._newest: dict[GpuUuid, Sampled] = {}

    @property
    def bytes(self) -> int:
        """The memory that all samples take, in bytes."""
        return sum(ring.bytes for ring in self._rings.values())

    async def run(self) -> NoReturn:
        """Ask all GPUs at each tick of PERIOD, for ever."""
        while True:
            await self._round()
            await asyncio.sleep(until_tick(PERIOD))

    def history(self, uuid: GpuUuid) -> tuple[Sampled, ...]:
        """The samples of one GPU in the last KEPT seconds, the oldest first."""
        ring = self._rings.get(uuid)
        since = _loop_time() - KEPT
        rows = ring.rows() if ring else ()
        return tuple(self._sampled(uuid, row) for row in rows if row[0] >= since)

    def newest(self, uuid: GpuUuid) -> Sampled | None:
        """The usage of one GPU now; None: it is not asked or does not report it."""
        sampled = self._newest.get(uuid)
        return None if sampled is None or sampled.at < self._at(_loop_time() - FRESH) else sampled

    async def _round(self) -> None:
        inventory = self._inventory.value
        for uuid in self._rings.keys() - {gpu.uuid for gpu in inventory.gpus}:
            del self._rings[uuid], self._newest[uuid]
        async with asyncio.TaskGroup() as tasks:
            for gpu in inventory.gpus:
                if _answers(gpu):
                    tasks.create_task(self._ask(gpu.uuid))

    async def _ask(self, uuid: GpuUuid) -> None:
        try:
            async with asyncio.timeout(DEADLINE):
                sample = await self._driver.sample(uuid)
        except (DriverError, GpuError, TimeoutError):
            return
        ring = self._rings.setdefault(uuid, Ring(ROWS, COLUMNS))
        values = (sample.gpu_percent, sample.memory_percent, sample.used_mib)
        self._newest[uuid] = Sampled(self._at(_loop_time()), sample)
        ring.add(_loop_time(), *(math.nan if value is None else value for value in values))

    def _sampled(self, uuid: GpuUuid, row: tuple[float, ...]) -> Sampled:
        gpu, memory, used = (None if math.isnan(value) else int(value) for value in row[1:])
        return Sampled(self._at(row[0]), GpuSample(uuid, gpu, memory, used))

    def _at(self, elapsed: float) -> dt.datetime:
        return self._origin + dt.timedelta(seconds=elapsed)


def _answers(gpu: SharedGpu) -> bool:
    """Whether the GPU can be asked. A GPU that is filtered out may still be in use."""
    return gpu.there and gpu.health.condition is not Condition.LOST and not gpu.health.silent


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
