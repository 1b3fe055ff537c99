"""What was registered stays sellable for a minute, to the greater of both amounts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agent.allocate.room import GpuUse
from agent.kit.cell import Cell
from agent.kube.watches import RecentlyRegistered
from agent.model import Inventory
from tests.builders import a_gpu, a_shared_gpu, an_inventory
from tests.services.at_work import at_work

GPU = a_gpu()


def of(mib: int, core_percent: int = 100) -> Inventory:
    return an_inventory(
        gpus=(a_shared_gpu(gpu=GPU, registered_mib=mib, core_percent=core_percent),)
    )


@asynccontextmanager
async def following(cell: Cell[Inventory]) -> AsyncIterator[RecentlyRegistered]:
    recent = RecentlyRegistered(cell)
    async with at_work(recent.run):
        await asyncio.sleep(0)
        yield recent


async def test_a_lowered_amount_still_counts_for_a_minute_each_amount_by_itself() -> None:
    cell = Cell(of(2000, 50))
    async with following(cell) as recent:
        cell.set(of(1000, 100))
        await asyncio.sleep(59)
        assert recent.greatest() == {GPU.uuid: GpuUse(2000, 100)}
        await asyncio.sleep(2)
        assert recent.greatest() == {GPU.uuid: GpuUse(1000, 100)}


async def test_a_change_counts_before_anybody_has_followed_it() -> None:
    cell = Cell(of(1000))
    async with following(cell) as recent:
        cell.set(of(3000))

        assert recent.greatest() == {GPU.uuid: GpuUse(3000, 100)}
