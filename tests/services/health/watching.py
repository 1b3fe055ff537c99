"""A health watch over three GPUs, with an inventory and lists that follow it, on virtual time."""

import asyncio
from contextlib import asynccontextmanager

from agent.health.judge import HealthSettings
from agent.health.watch import HealthWatch
from agent.inventory import InventoryKeeper
from agent.kit.cell import Cell
from agent.model import Health, Inventory, Scan, SharingSettings, SliceList
from tests.builders import a_gpu, a_uuid
from tests.fakes.clock import LoopClock
from tests.fakes.driver import ScriptedDriver
from tests.services.at_work import at_work

G0, G1, G2 = (a_uuid(n) for n in range(3))


class HealthBench:
    """A health watch over three GPUs and an inventory that follows it."""

    def __init__(self, settings: HealthSettings | None = None, recalled=None, **kwargs) -> None:
        self.driver = kwargs.get("driver") or ScriptedDriver()
        self.inventory = Cell(Inventory())
        clock = LoopClock()
        self.slices = Cell(SliceList())
        self.keeper = InventoryKeeper(
            self.inventory, Cell(SharingSettings()), clock, slices=self.slices
        )
        self.verdicts: list[dict] = []
        self.memory: dict = {}
        self.scans_wanted = 0
        self.watch = HealthWatch(
            driver=self.driver,
            inventory=self.inventory,
            judged=self.judged,
            remember=self.remember,
            changed=self.changed,
            settings=settings or HealthSettings(),
            clock=clock,
            recalled=recalled or {},
            boot_changed=kwargs.get("boot_changed", False),
        )
        self.scanned(Scan("570.1", tuple(a_gpu(index=n) for n in range(3))))

    def scanned(self, scan: Scan) -> None:
        self.keeper.found(scan)
        self.watch.scanned(scan)

    def judged(self, health) -> None:
        self.verdicts.append(dict(health))
        self.keeper.judged(health)

    def remember(self, health) -> None:
        self.memory = dict(health)

    def changed(self) -> None:
        self.scans_wanted += 1

    def of(self, uuid) -> Health:
        shared = self.inventory.value.find(uuid)
        assert shared
        return shared.health

    @property
    def conditions(self) -> list[str]:
        return [gpu.health.condition.value for gpu in self.inventory.value.gpus]


@asynccontextmanager
async def running(*args, **kwargs):
    bench = HealthBench(*args, **kwargs)
    async with at_work(bench.watch.run):
        await asyncio.sleep(0.001)
        yield bench
