"""Questions to GPUs: one, or all at once; what fails alike on all is the driver's."""

import asyncio
import dataclasses
from collections.abc import Callable, Collection
from typing import Final

from agent.core.errors import DriverError, GpuError, cap
from agent.core.health.reports import Probe, ProbeOutcome
from agent.core.health.whose import Ill, fail_alike, has_failed, of_the_driver
from agent.core.inventory.gpu import GpuUuid
from agent.core.ports import Driver

TURNS: Final = 2
"""The driver ends a call in time by itself; it may have waited behind another one before."""
RELEASE_DEADLINE: Final = 8.0
"""Seconds for all who are in the library to leave it: the longest call, and what waits behind."""


class Asking:
    """Asks, each with a deadline. `obstacle` says why events do not reach us; empty: they do."""

    def __init__(self, driver: Driver, deadline: float, obstacle: Callable[[], str]) -> None:
        self._driver = driver
        self._deadline = TURNS * deadline
        self._obstacle = obstacle

    async def one(self, uuid: GpuUuid) -> Probe:
        """Ask that GPU. A driver that fails, or does not answer, makes it silent."""
        try:
            async with asyncio.timeout(self._deadline):
                probe = await self._driver.probe(uuid)
        except TimeoutError:
            return Probe(uuid, ProbeOutcome.SILENT, f"no answer within {self._deadline:g} s")
        except (DriverError, GpuError) as error:
            return Probe(uuid, ProbeOutcome.SILENT, cap(str(error)))
        if probe.outcome is ProbeOutcome.PASSED and (obstacle := self._obstacle()):
            return dataclasses.replace(probe, unmonitored=obstacle)
        return probe

    async def surely(self, uuid: GpuUuid, others: Collection[GpuUuid], ill: Ill) -> Probe:
        """Ask that GPU; and all, where it fails, which may be the driver's trouble."""
        asked = {uuid: await self.one(uuid)}
        if has_failed(asked[uuid]):
            await self.all(others, ill, lambda probe: asked.update({probe.uuid: probe}))
        return asked[uuid]

    async def all(
        self, uuids: Collection[GpuUuid], ill: Ill, take: Callable[[Probe], None]
    ) -> None:
        """Ask all of them at once, and hand on each answer as it comes.

        One that fails waits until another GPU answers otherwise. Where all fail alike they are
        asked in another session, if there was none for that yet, before they are handed on.
        """
        held = await self._round(uuids, take)
        if fail_alike(held, ill) and await self._driver.renew():
            held = await self._round(uuids, take)
        for probe in of_the_driver(held, ill):
            take(probe)

    async def release(self, uuids: Collection[GpuUuid], *, everything: bool) -> str:
        """Have the driver let go of these, or of all GPUs. Why it has not; empty: it has."""
        try:
            async with asyncio.timeout(RELEASE_DEADLINE):
                await self._driver.release(uuids, everything=everything)
        except (DriverError, GpuError) as error:
            return cap(str(error))
        except TimeoutError:
            return f"the driver has not let go of it within {RELEASE_DEADLINE:g} s"
        return ""

    def take_back(self, uuid: GpuUuid) -> None:
        """The driver may ask it again."""
        self._driver.take_back(uuid)

    async def _round(
        self, uuids: Collection[GpuUuid], take: Callable[[Probe], None]
    ) -> tuple[Probe, ...]:
        """The answers that were not handed on: all GPUs fail.

        The driver may have failed in between: one that answered before another failed is asked
        once more, and only what it says then speaks for the driver.
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
