"""Regions are held to the live limits in each round, beside all else that the round writes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
from structlog.testing import capture_logs

from agent.core.containers.container_edits import container_directory
from agent.core.inventory.slices import MIB
from agent.core.state.ledger import Ledger, Row
from agent.kit.cell import Cell
from agent.services.usage.service import PERIOD, ContainerUsage
from tests.builders import G1
from tests.fakes.clock import LoopClock
from tests.fakes.regions import MemoryRegions, a_process, a_region
from tests.services.at_work import at_work
from tests.unit.core.usage.limit_scene import a_limited_row

ROW = a_limited_row()
LIVE = msgspec.structs.replace(
    ROW, live_limits=(msgspec.structs.replace(ROW.shares[0], memory_mib=500, core_percent=0),)
)
NAME = container_directory(ROW.key.pod_uid, ROW.key.container)
AS_NEW = 8192, 30


class HeldBench:
    """A container of that row, whose region is in memory and as new."""

    def __init__(self, row: Row, *, switches: bool, holds: bool) -> None:
        self.regions = MemoryRegions()
        self.renew()
        self.usage = ContainerUsage(
            self.regions, Cell(Ledger((row,))), LoopClock(), switches=switches, holds=holds
        )

    def renew(self, **fields: object) -> None:
        """A process made the region anew."""
        self.regions.put(NAME, a_region(G1, processes=(a_process(MIB),), **fields))

    @property
    def limits(self) -> tuple[int, int]:
        """MiB and percent."""
        gpu = self.regions.region(NAME).gpus[0]
        return gpu.memory_limit // MIB, gpu.core_limit


@contextlib.asynccontextmanager
async def holding(
    row: Row = LIVE, *, switches: bool = False, holds: bool = True
) -> AsyncIterator[HeldBench]:
    bench = HeldBench(row, switches=switches, holds=holds)
    async with at_work(bench.usage.run):
        await asyncio.sleep(0.001)
        yield bench


async def test_an_agent_that_starts_applies_what_the_ledger_has():
    async with holding() as bench:
        assert (500, 100) == bench.limits


async def test_a_region_that_was_made_anew_gets_them_again_and_is_left_alone_then():
    async with holding() as bench:
        bench.renew()
        await asyncio.sleep(2.5 * PERIOD)

        assert (500, 100) == bench.limits
        assert 2 == len(bench.regions.writes)


@pytest.mark.parametrize(("row", "holds"), [(ROW, True), (LIVE, False)])
async def test_without_live_limits_or_while_it_only_observes_nothing_is_written(row, holds):
    async with holding(row, holds=holds) as bench:
        await asyncio.sleep(PERIOD)

        assert (AS_NEW, []) == (bench.limits, bench.regions.writes)


async def test_limits_and_switches_go_into_one_write():
    async with holding(switches=True) as bench:
        bench.renew(recent_kernel=-1)
        writes = len(bench.regions.writes)
        await asyncio.sleep(1.5 * PERIOD)

        change = bench.regions.writes[writes][NAME]
        assert (500, 100) == bench.limits
        assert change.memory_limits
        assert change.recent_kernel is not None or change.is_limiting is not None


async def test_a_region_that_takes_no_write_is_told_and_tried_again():
    async with holding() as bench:
        bench.renew()
        bench.regions.refused[NAME] = "it was shortened"
        with capture_logs() as logs:
            await asyncio.sleep(2.5 * PERIOD)
        bench.regions.refused.clear()
        await asyncio.sleep(PERIOD)

        assert (500, 100) == bench.limits
        assert ["usage.unwritten"] == [line["event"] for line in logs]
