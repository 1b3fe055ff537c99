"""Lists: one per change, all slices of a GPU alike, held ids always in."""

import asyncio
from contextlib import asynccontextmanager

from agent.inventory import Listing
from agent.kit.cell import Cell
from agent.model import Condition, Held, Inventory, SliceList, slice_id
from tests.builders import a_gpu, a_health, a_shared_gpu, a_uuid, an_inventory


class ListingBench:
    def __init__(self, inventory: Inventory) -> None:
        self.inventory = Cell(inventory)
        self.held: Cell[Held] = Cell({})
        self.slices = Cell(SliceList())
        self.lists: list[SliceList] = []
        self.listing = Listing(self.inventory, self.held, self.slices)

    async def collect(self) -> None:
        async for slices in self.slices.follow():
            self.lists.append(slices)


@asynccontextmanager
async def running(inventory: Inventory):
    bench = ListingBench(inventory)
    async with asyncio.TaskGroup() as tasks:
        begun = [tasks.create_task(work) for work in (bench.listing.run(), bench.collect())]
        await asyncio.sleep(0.1)
        yield bench
        await asyncio.sleep(0.1)
        for task in begun:
            task.cancel()


def bad(*indexes: int, count: int = 3, generation: int = 2) -> Inventory:
    """`count` GPUs, of which these are bad."""
    gpus = [
        a_shared_gpu(
            gpu=a_gpu(index=n),
            health=a_health(condition=Condition.BAD if n in indexes else Condition.OK),
        )
        for n in range(count)
    ]
    return an_inventory(gpus=gpus, generation=generation)


async def test_nothing_is_listed_before_the_first_scan_not_even_an_empty_list():
    async with running(Inventory()) as bench:
        assert SliceList() == bench.slices.value


async def test_a_node_without_gpus_lists_nothing_once_that_is_known():
    async with running(Inventory(generation=1)) as bench:
        assert SliceList(generation=1) == bench.slices.value


async def test_every_gpu_is_listed_with_its_ids_and_its_numa_node():
    async with running(an_inventory(count=2)) as bench:
        groups = bench.slices.value.groups

    assert [a_uuid(0), a_uuid(1)] == [group.uuid for group in groups]
    assert tuple(slice_id(a_uuid(1), n) for n in range(10)) == groups[1].ids
    assert [(True, 0), (True, 0)] == [(group.healthy, group.numa) for group in groups]


async def test_many_gpus_that_go_bad_at_once_are_one_list():
    async with running(bad()) as bench:
        bench.inventory.set(bad(0, generation=3))
        bench.inventory.set(bad(0, 1, generation=4))
        bench.inventory.set(bad(0, 1, 2, generation=5))

    assert [0, 1, 2] == [slices.generation for slices in bench.lists]
    assert [False] * 3 == [group.healthy for group in bench.lists[-1].groups]


async def test_a_change_that_no_list_shows_makes_none():
    async with running(bad()) as bench:
        bench.inventory.set(bad(generation=7))

    assert 1 == bench.slices.value.generation


async def test_a_vanished_gpu_is_listed_as_unhealthy():
    gone = an_inventory(gpus=[a_shared_gpu(present=False)])
    async with running(gone) as bench:
        assert [False] == [group.healthy for group in bench.slices.value.groups]


async def test_held_ids_stay_listed_when_the_split_count_falls():
    few = an_inventory(gpus=[a_shared_gpu(split_count=2)])
    async with running(few) as bench:
        bench.held.set({a_uuid(0): (slice_id(a_uuid(0), 7),)})
        await asyncio.sleep(0.1)
        with_held = bench.slices.value.groups[0].ids
        bench.held.set({})
        await asyncio.sleep(0.1)

    assert [0, 7] == [int(text[-1]) for text in with_held]
    assert [0, 1] == [int(text[-1]) for text in bench.slices.value.groups[0].ids]


async def test_a_list_can_be_had_at_once_and_comes_only_once():
    async with running(bad()) as bench:
        bench.inventory.set(bad(0, generation=3))
        bench.listing.refresh()
        assert [False, True, True] == [group.healthy for group in bench.slices.value.groups]

    assert [0, 1, 2] == [slices.generation for slices in bench.lists]


async def test_it_ends_when_its_cells_close():
    bench = ListingBench(an_inventory())
    bench.inventory.close()
    bench.held.close()
    await bench.listing.run()

    assert 1 == bench.slices.value.generation


async def test_the_kubelet_is_told_the_numa_node_unless_the_operator_does_not_want_it():
    gpus = [a_shared_gpu(gpu=a_gpu(index=n, numa=1), numa_hint=bool(n)) for n in range(2)]
    async with running(an_inventory(gpus=gpus)) as bench:
        assert [None, 1] == [group.numa for group in bench.slices.value.groups]
