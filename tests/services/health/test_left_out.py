"""A GPU that is not shared is told in one Event, with the reason; its neighbours are shared."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agent.cluster import NodeEvent
from agent.health.judge import switched_off
from agent.inventory import Discovery, InventoryKeeper
from agent.kit.cell import Cell
from agent.model import NO_INDEX, Condition, GpuFault, Inventory, Scan, SharingSettings, Trouble
from agent.report import WAKING, LeftOut
from tests.builders import NOON, a_gpu, a_health, a_uuid
from tests.fakes.clock import ManualClock
from tests.fakes.driver import ScriptedDriver
from tests.services.at_work import at_work

BROKEN = GpuFault("index 1", "Unknown Error")
TAIL = "; if this lasts, reset it or reboot the node [GpuLeftOut]"


class LeftOutBench:
    """A driver, the inventory, and what is said of it."""

    def __init__(self) -> None:
        self.driver = ScriptedDriver([a_gpu(index=0)])
        self.inventory = Cell(Inventory())
        self.events: list[NodeEvent] = []
        self.keeper = InventoryKeeper(self.inventory, Cell(SharingSettings()), ManualClock())
        self.discovery = Discovery(self.driver, self.keeper.found)
        self.left_out = LeftOut(self.keeper.left_out, self.inventory, self.events.append)

    @property
    def indexes(self) -> list[int]:
        return [shared.gpu.index for shared in self.inventory.value.gpus]

    async def rescan(self) -> None:
        self.discovery.rescan()
        await asyncio.sleep(1)


@asynccontextmanager
async def running(*faults: GpuFault) -> AsyncIterator[LeftOutBench]:
    bench = LeftOutBench()
    bench.driver.faults = list(faults)
    async with at_work(bench.keeper.run, bench.discovery.run, bench.left_out.run):
        await asyncio.sleep(1)
        yield bench


async def test_a_gpu_that_cannot_be_described_is_left_out_with_one_event():
    async with running(BROKEN) as bench:
        await asyncio.sleep(3600)

        assert [0] == bench.indexes
        (event,) = bench.events
        assert ("GpuLeftOut", True) == (event.reason, event.warning)
        assert (
            "GPU index 1 is not shared: Unknown Error; if this lasts, reset it or reboot the node "
            "[GpuLeftOut]"
        ) == event.text
        assert bench.driver.scans > 50


async def test_a_gpu_in_mig_mode_and_one_of_unknown_memory_are_told_apart():
    async with running() as bench:
        bench.driver.gpus += [a_gpu(index=1, mig_enabled=True), a_gpu(index=2, memory_mib=None)]
        await bench.rescan()

        assert [0] == bench.indexes
        assert bench.events[0].text.startswith(
            f"GPU {a_uuid(1)} is not shared: it is in MIG mode, which is not shared yet; "
        )
        assert "preconfiguredMemory" in bench.events[1].text
        assert 2 == len(bench.events)
        bench.driver.gpus.append(a_gpu(index=3, name=""))
        await bench.rescan()
        assert [a_uuid(3) in event.text for event in bench.events] == [False, False, True]
        assert "name" in bench.events[2].text
        assert [0] == bench.indexes


async def test_it_is_told_again_when_it_comes_back_to_that_or_the_reason_is_another():
    async with running(BROKEN) as bench:
        bench.driver.faults = []
        await bench.rescan()
        bench.driver.faults = [BROKEN]
        await bench.rescan()
        bench.driver.faults = [GpuFault("index 1", "Not Supported")]
        await bench.rescan()

        assert ["Unknown Error", "Unknown Error", "Not Supported"] == [
            event.text.partition(": ")[2].removesuffix(TAIL) for event in bench.events
        ]


async def test_a_scan_with_nothing_but_faults_is_an_empty_node_and_no_crash():
    async with running() as bench:
        bench.keeper.found(Scan("570.1", (), tuple(GpuFault(f"index {n}", "x") for n in range(16))))
        await asyncio.sleep(1)

        assert [] == bench.indexes
        assert 16 == len(bench.events)


async def test_a_gpu_that_was_shared_and_is_lost_is_told_by_its_health_alone():
    async with running() as bench:
        lost = GpuFault(a_uuid(0), "GPU is lost", Trouble.LOST)
        stranger = GpuFault(a_uuid(7), "GPU is lost", Trouble.LOST)
        bench.driver.gpus, bench.driver.faults = [a_gpu(index=2)], [lost, stranger]
        await bench.rescan()

        assert [f"GPU {a_uuid(7)} is not shared: GPU is lost{TAIL}"] == [
            event.text for event in bench.events
        ]


async def test_a_lost_gpu_is_told_here_where_nobody_looks_after_health():
    async with running() as bench:
        bench.keeper.judged({a_uuid(0): switched_off(NOON)})
        bench.driver.gpus, bench.driver.faults = [], [GpuFault(a_uuid(0), "lost", Trouble.LOST)]
        await bench.rescan()

        assert [f"GPU {a_uuid(0)} is not shared: lost{TAIL}"] == [e.text for e in bench.events]


async def test_what_the_health_of_a_gpu_says_is_not_said_here_as_well():
    async with running() as bench:
        bench.keeper.judged({a_uuid(1): a_health(condition=Condition.BAD)})
        for text, why in (("GPU requires restart", Trouble.RESET), ("GPU is lost", Trouble.LOST)):
            bench.driver.faults = [GpuFault(a_uuid(1), text, why)]
            await bench.rescan()

        assert [0, NO_INDEX] == bench.indexes
        assert [] == bench.events


async def test_a_gpu_that_does_not_answer_is_told_of_when_that_lasts_and_not_when_it_wakes():
    async with running() as bench:
        waking = [GpuFault(f"index {n}", "no answer in time", Trouble.SILENT) for n in (7, 8)]
        bench.driver.faults = waking
        await bench.rescan()
        await asyncio.sleep(WAKING / 2)
        assert [] == bench.events
        bench.driver.faults = waking[:1]
        await bench.rescan()
        await asyncio.sleep(WAKING)

        assert ["GPU index 7 is not shared: no answer in time"] == [
            event.text.partition(";")[0] for event in bench.events
        ]


async def test_it_ends_with_its_cell():
    said: list[NodeEvent] = []
    silent = GpuFault("index 1", "no answer in time", Trouble.SILENT)
    cell: Cell[tuple[GpuFault, ...]] = Cell((BROKEN, silent))
    cell.close()

    await LeftOut(cell, Cell(Inventory()), said.append).run()

    assert 1 == len(said)
