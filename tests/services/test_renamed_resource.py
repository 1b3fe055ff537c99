"""The resource has another name than when containers were answered: services keep both apart."""

import asyncio
import dataclasses

from agent.core.cluster.pods import Phase, PodTable
from agent.core.inventory.slices import Served, SliceList, slice_id
from agent.kit.cell import Cell
from agent.services.cluster.pods import PodWatch
from agent.services.inventory.listing import Listing
from tests.builders import a_container, a_shared_gpu, a_uuid, an_inventory
from tests.fakes.apiserver import FakeApi
from tests.fakes.chance import NoChance
from tests.fakes.clock import LoopClock
from tests.services.allocating import placed

OLD, NEW = "nvidia.com/gpu", "example.com/vgpu"


async def test_the_pods_are_counted_by_other_names_without_asking_the_api_server():
    api, served = FakeApi(), Cell(Served(OLD))
    api.put_pod(dataclasses.replace(placed(1), phase=Phase.RUNNING))
    api.put_pod(placed(2, containers=(a_container(resource=NEW),)))
    api.put_pod(placed(3, containers=(a_container(resource=NEW),)))
    table: Cell[PodTable] = Cell(PodTable())
    pods = PodWatch(api, table, LoopClock(), NoChance(), served)

    def counted() -> list[str]:
        found = sorted(table.value.pods.values(), key=lambda pod: pod.name)
        return [one.resource for pod in found for one in pod.gpu_containers]

    async with asyncio.TaskGroup() as group:
        task = group.create_task(pods.run())
        await asyncio.sleep(0.1)
        assert [OLD] == counted()
        served.set(Served(NEW, {OLD: {}}))
        await asyncio.sleep(0.1)
        assert [OLD, NEW, NEW] == counted()
        api.put_pod(placed(4, containers=(a_container(resource=NEW),)))
        api.delete_pod("team-a", "train-3")
        await asyncio.sleep(0.1)
        assert [OLD, NEW, NEW] == counted()
        served.set(Served(NEW))
        await asyncio.sleep(0.1)
        task.cancel()

    assert [NEW, NEW] == counted()
    assert [NEW] == [one.resource for one in table.value.tombstones[0].pod.gpu_containers]
    assert 1 == api.calls["list_pods"]


async def test_each_name_has_one_list_and_one_more_when_a_drain_ends():
    gpu, slices = a_shared_gpu(split_count=3), Cell(SliceList())
    held = {a_uuid(0): (slice_id(a_uuid(0), 1),)}
    served = Cell(Served(OLD, {OLD: held}))
    listing = Listing(Cell(an_inventory(gpus=[gpu])), served, slices)
    old, new = listing.of(OLD), listing.of(NEW)

    def shown(cell: Cell[SliceList]) -> tuple[int, list[str]]:
        groups = cell.value.groups
        return cell.value.generation, [text[-1] for group in groups for text in group.ids]

    async with asyncio.TaskGroup() as group:
        task = group.create_task(listing.run())
        await asyncio.sleep(0.1)
        assert (1, ["0", "1", "2"]) == shown(old) == shown(slices)
        assert (0, []) == shown(new)
        served.set(Served(NEW, {OLD: held}))
        await asyncio.sleep(0.1)
        assert (2, ["1"]) == shown(old)
        assert (1, ["0", "2"]) == shown(new) == shown(slices)
        served.set(Served(OLD, {OLD: held}))
        await asyncio.sleep(0.1)
        assert (3, ["0", "1", "2"]) == shown(old)
        served.set(Served(NEW, {OLD: held}))
        await asyncio.sleep(0.1)
        served.set(Served(NEW, {NEW: {}}))
        await asyncio.sleep(0.1)
        task.cancel()

    assert (2, ["0", "1", "2"]) == shown(new) == shown(slices)
    assert (4, ["1"]) == shown(old)
    listing.forget(OLD)
    assert (0, []) == shown(listing.of(OLD))
