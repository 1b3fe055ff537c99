"""The list for the kubelet against HAMi v2.10's own, down to the bytes that the kubelet reads."""

import asyncio
from pathlib import PurePosixPath
from typing import Any

import pytest

from agent.gpu.driver import bus_id
from agent.inventory import InventoryKeeper, Listing
from agent.kit.cell import Cell
from agent.kubelet.door import encode_list
from agent.model import Condition, Inventory, Scan, SharingSettings, SliceList
from agent.wire.v1beta1 import Device, ListAndWatchResponse
from tests.builders import a_gpu, a_health
from tests.fakes.clock import ManualClock
from tests.hami_vectors import Vector, cases, vectors

BUS_IDS = "list_and_watch-245"


def shown(device: Device) -> dict[str, Any]:
    """A device as HAMi's vectors write it."""
    topology = device.topology
    nodes = [{"ID": node.id} for node in topology.nodes] if topology else []
    plain = {"ID": device.id, "health": device.health}
    return {**plain, "topology": {"nodes": nodes}} if nodes else plain


@pytest.mark.parametrize(
    "vector", cases("list_and_watch", without={BUS_IDS: "a path, tested below"}), ids=str
)
async def test_one_gpu_becomes_the_devices_that_hami_lists(vector: Vector):
    given = vector.given
    settings = SharingSettings(
        split_count=given["deviceSplitCount"], numa_topology=given["enableNumaTopology"]
    )
    inventory, slices = Cell(Inventory()), Cell(SliceList())
    keeper = InventoryKeeper(inventory, Cell(settings), ManualClock())
    gpu = a_gpu(uuid=given["uuid"], numa=given["numa"])
    assert "Unhealthy" == given["health"]
    keeper.judged({gpu.uuid: a_health(condition=Condition.BAD)})
    keeper.found(Scan("570.1", (gpu,)))

    async with asyncio.TaskGroup() as group:
        task = group.create_task(Listing(inventory, keeper.held, slices).run())
        await slices.until(lambda listed: listed.generation > 0)
        task.cancel()

    frame = encode_list(slices.value)
    assert vector.expected == [
        shown(device) for device in ListAndWatchResponse.parse(frame).devices
    ]


def test_the_numa_node_is_looked_up_where_hami_looks():
    vector = vectors("list_and_watch")[BUS_IDS]
    looked_up = {
        text: PurePosixPath(path).parent.name
        for text, path in zip(vector.given, vector.expected, strict=True)
    }
    beyond = looked_up.pop("00010000:3B:00.0")  # sysfs writes no leading zero of such a domain

    assert looked_up == {text: bus_id(text) for text in looked_up}
    assert beyond.lstrip("0") == bus_id("00010000:3B:00.0")
