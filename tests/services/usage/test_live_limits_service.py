"""Limits of running containers: durable first, then in the region, and held there."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from agent.codec.checkpoint import decode_state
from agent.core.cluster.pods import PodTable
from agent.core.containers.container_edits import container_directory
from agent.core.errors import StateError
from agent.core.inventory.slices import MIB
from agent.core.state.ledger import ContainerKey, Ledger, Row
from agent.core.state.state import State
from agent.core.usage.live_limits import LimitRefused, LimitWish
from agent.core.usage.region import RegionLayout
from agent.kit.cell import Cell
from agent.services.state import COMMIT_DEADLINE, CURRENT, StateService
from agent.services.usage.limits import DEADLINE, LimitViews, LiveLimits
from tests.builders import G1
from tests.fakes.clock import LoopClock
from tests.fakes.gated_disk import GatedDisk
from tests.fakes.regions import MemoryRegions, a_process, a_region
from tests.services.at_work import at_work
from tests.unit.core.usage.limit_scene import GPUS, a_limited_row, pod_of

ROW = a_limited_row()
NAME = container_directory(ROW.key.pod_uid, ROW.key.container)
RAISE = LimitWish("p1", memory_mib=4000, core_percent=50)


class LimitBench:
    """A node with one container of 3000 MiB, whose region is in memory."""

    def __init__(self, *rows: Row) -> None:
        self.disk = GatedDisk()
        self.regions = MemoryRegions()
        self.regions.put(NAME, a_region(G1, processes=(a_process(100 * MIB),)))
        held = rows or (ROW,)
        self.state = StateService(
            disk=self.disk, recovered=State(ledger=Ledger(held)), boot_id="boot"
        )
        self.pending: dict[ContainerKey, Row] = {}
        self.taken: set[ContainerKey] = set()
        pods = PodTable({row.key.pod_uid: pod_of(row) for row in held}, synced=True)
        views = LimitViews(self.state.ledger, Cell(GPUS), Cell(pods), self.pending, self.taken)
        self.limits = LiveLimits(views, self.regions, self.state.commit, LoopClock())

    @property
    def row(self) -> Row:
        found = self.state.ledger.value.find(ROW.key)
        assert found is not None
        return found

    @property
    def written(self) -> tuple[int, int]:
        """MiB and percent of the region's first GPU."""
        gpu = self.regions.region(NAME).gpus[0]
        return gpu.memory_limit // MIB, gpu.core_limit


@contextlib.asynccontextmanager
async def limiting(*rows: Row) -> AsyncIterator[LimitBench]:
    bench = LimitBench(*rows)
    async with at_work(bench.state.run):
        yield bench


async def test_granted_limits_are_on_disk_and_in_the_region_when_the_answer_comes():
    async with limiting() as bench:
        answer = await bench.limits.limit(RAISE)

        stored = decode_state(await bench.disk.content(CURRENT)).ledger
        assert (4000, 50) == bench.written
        assert answer.after.live_limits == stored.rows[0].live_limits == bench.row.limits
        assert (True, "", RegionLayout.V1_2) == (answer.changed, answer.obstacle, answer.layout)


async def test_a_reset_undoes_them():
    async with limiting() as bench:
        await bench.limits.limit(RAISE)
        await bench.limits.limit(LimitWish("p1", reset=True))

        assert (3000, 30) == bench.written
        assert ROW.shares == bench.row.limits


async def test_what_is_refused_changes_nothing():
    async with limiting() as bench:
        before = bench.written
        with pytest.raises(LimitRefused, match="uses 100 MiB"):
            await bench.limits.limit(LimitWish("p1", memory_mib=99))

        assert (ROW, before) == (bench.row, bench.written)
        assert [] == bench.regions.writes


async def test_without_a_difference_nothing_is_written():
    async with limiting() as bench:
        answer = await bench.limits.limit(LimitWish("p1", memory_mib=3000))

        assert not answer.changed
        assert (0, []) == (bench.state.generation, bench.regions.writes)


async def test_a_region_that_takes_no_write_is_an_obstacle_and_the_limits_are_kept():
    async with limiting() as bench:
        bench.regions.refused[NAME] = "it was shortened"
        shortened = await bench.limits.limit(RAISE)
        bench.regions.read_only = "the disk is full"
        full = await bench.limits.limit(LimitWish("p1", memory_mib=500))

        assert ("it was shortened", True) == (shortened.obstacle, shortened.changed)
        assert ("the disk is full", True) == (full.obstacle, full.changed)
        assert 500 == bench.row.limits[0].memory_mib


async def test_a_write_that_hangs_is_an_obstacle():
    async with limiting() as bench, asyncio.TaskGroup() as group:
        bench.disk.gate.clear()
        asked = group.create_task(bench.limits.limit(RAISE))
        await asyncio.sleep(0.01)
        bench.regions.hangs = True
        bench.disk.gate.set()

        assert f"the disk has not answered for {DEADLINE:g} s" == (await asked).obstacle


async def test_regions_that_cannot_be_read_or_hang_change_nothing():
    async with limiting() as bench:
        bench.regions.broken = "the hook directory is gone"
        with pytest.raises(StateError, match="hook directory is gone"):
            await bench.limits.limit(RAISE)
        bench.regions.broken, bench.regions.hangs = "", True
        with pytest.raises(StateError, match=f"not read in {DEADLINE:g} s"):
            await bench.limits.limit(RAISE)

        assert ROW == bench.row


async def test_while_a_row_is_answered_or_closed_its_limits_wait():
    async with limiting() as bench:
        bench.taken.add(ROW.key)
        with pytest.raises(LimitRefused, match="try again in a few seconds"):
            await bench.limits.limit(RAISE)


async def test_limits_that_are_being_written_take_room_already():
    async with limiting() as bench, asyncio.TaskGroup() as group:
        bench.disk.gate.clear()
        asked = group.create_task(bench.limits.limit(RAISE))
        await asyncio.sleep(0.01)
        underway = bench.pending[ROW.key].limits
        bench.disk.gate.set()
        answer = await asked

        assert underway == answer.after.limits
        assert {} == bench.pending


async def test_a_container_that_ends_meanwhile_is_not_brought_back():
    async with limiting() as bench, asyncio.TaskGroup() as group:
        bench.disk.gate.clear()
        ending = group.create_task(bench.state.commit(lambda ledger: ledger.drop([ROW.key])))
        await asyncio.sleep(0.01)
        asked = group.create_task(refused(bench))
        await asyncio.sleep(0.01)
        bench.disk.gate.set()
        await ending

        assert "try again in a few seconds" in await asked
        assert () == bench.state.ledger.value.rows


async def refused(bench: LimitBench) -> str:
    with pytest.raises(LimitRefused) as caught:
        await bench.limits.limit(RAISE)
    return str(caught.value)


async def test_what_the_disk_does_not_take_is_not_in_force():
    async with limiting() as bench:
        before = bench.written
        bench.disk.gate.clear()
        with pytest.raises(StateError, match="has not answered"):
            await bench.limits.limit(RAISE)
        bench.disk.gate.set()

        assert COMMIT_DEADLINE > DEADLINE
        assert (before, {}) == (bench.written, bench.pending)


async def test_what_was_booked_meanwhile_stays_booked():
    async with limiting() as bench, asyncio.TaskGroup() as group:
        bench.disk.gate.clear()
        first = group.create_task(bench.state.commit(confirmed))
        await asyncio.sleep(0.01)
        asked = group.create_task(bench.limits.limit(RAISE))
        await asyncio.sleep(0.01)
        bench.disk.gate.set()
        await first
        await asked

        assert (True, 4000) == (bench.row.confirmed, bench.row.limits[0].memory_mib)


def confirmed(ledger: Ledger) -> Ledger:
    return ledger.put(msgspec.structs.replace(ROW, confirmed=True))
