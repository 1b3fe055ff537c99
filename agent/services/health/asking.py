"""Probes one GPU or all GPUs. A failure that is the same on all counts as the driver's."""

import asyncio
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from agent.core.errors import DriverError, GpuError, cap
from agent.core.health.reports import Probe, ProbeOutcome
from agent.core.health.whose import Ill, fail_alike, has_failed, of_the_driver
from agent.core.inventory.gpu import GpuUuid
from agent.core.ports import Driver
from agent.kit.running_time import Lag

TURNS: Final = 2
"""How many driver deadlines a probe may take: a call ahead of it, and its own call."""
RELEASE_DEADLINE: Final = 8.0
"""Seconds for all calls in the library to end: the longest call and those that wait behind it."""


class Asking:
    """Probes GPUs, each with a deadline in seconds.

    `obstacle` returns why the agent does not receive events; empty if it does.
    """

    def __init__(self, driver: Driver, deadline: float, obstacle: Callable[[], str]) -> None:
        self._driver = driver
        self._deadline = TURNS * deadline
        self._obstacle = obstacle

    async def one(self, uuid: GpuUuid) -> Probe:
        """Probe that GPU. If the driver fails or does not answer, the outcome is SILENT."""
        try:
            async with Lag().within(self._deadline):
                probe = await self._driver.probe(uuid)
        except TimeoutError:
            return Probe(uuid, ProbeOutcome.SILENT, f"no answer within {self._deadline:g} s")
        except (DriverError, GpuError) as error:
            return Probe(uuid, ProbeOutcome.SILENT, cap(str(error)))
        if probe.outcome is ProbeOutcome.PASSED and (obstacle := self._obstacle()):
            return msgspec.structs.replace(probe, unmonitored=obstacle)
        return probe

    async def surely(self, uuid: GpuUuid, others: Collection[GpuUuid], ill: Ill) -> Probe:
        """Probe that GPU. If the probe fails, probe all: the driver may be at fault."""
        probes = {uuid: await self.one(uuid)}
        if has_failed(probes[uuid]):
            await self.all(others, ill, lambda probe: probes.update({probe.uuid: probe}))
        return probes[uuid]

    async def all(
        self, uuids: Collection[GpuUuid], ill: Ill, take: Callable[[Probe], None]
    ) -> None:
        """Probe all of them at once, and pass each probe to `take` as it comes.

        A failed probe is held back until another GPU answers. If all fail alike, the session is
        renewed, unless it was renewed for that before, and they are probed once more.
        """
        held = await self._round(uuids, take)
        if fail_alike(held, ill) and await self._driver.renew():
            held = await self._round(uuids, take)
        for probe in of_the_driver(held, ill):
            take(probe)

    async def release(self, uuids: Collection[GpuUuid], *, everything: bool) -> str:
        """Let the driver release these GPUs, or all. Returns why it did not; empty: it did."""
        try:
            async with asyncio.timeout(RELEASE_DEADLINE):
                await self._driver.release(uuids, everything=everything)
        except (DriverError, GpuError) as error:
            return cap(str(error))
        except TimeoutError:
            return f"the driver has not released it within {RELEASE_DEADLINE:g} s"
        return ""

    def take_back(self, uuid: GpuUuid) -> None:
        """Let the driver use the GPU again."""
        self._driver.take_back(uuid)

    async def _round(
        self, uuids: Collection[GpuUuid], take: Callable[[Probe], None]
    ) -> tuple[Probe, ...]:
        """Probe all once. Returns the probes that were held back, because every GPU failed.

        The driver may fail during the round. So a GPU that answered before another one failed is
        probed once more, and only the second answer counts for the driver.
        """
        held: list[Probe] = []
        well: list[GpuUuid] = []

        async def ask(uuid: GpuUuid, *, again: bool = False) -> None:
            probe = await self.one(uuid)
            if has_failed(probe):
                held.append(probe)
                if well:
                    await ask(well.pop(), again=True)
                return
            well.append(uuid)
            while held:
                take(held.pop(0))
            if not again:
                take(probe)

        async with asyncio.TaskGroup() as tasks:
            for uuid in uuids:
                tasks.create_task(ask(uuid))
        return tuple(held)
