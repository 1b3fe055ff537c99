"""Which GPUs are shared and how they are listed, against HAMi v2.10's own code."""

import json
from pathlib import PurePosixPath
from typing import Any

import pytest

from agent.gpu.nvml import bus_id
from agent.inventory import InventoryKeeper
from agent.kit.cell import Cell
from agent.kubelet.door import encode_list
from agent.ledger import SourceFile
from agent.model import Condition, Gpu, GpuUuid, Inventory, Scan, SharingSettings, SliceList
from agent.settings.reading import Sources, make_plan
from agent.settings.schema import build
from agent.wire.v1beta1 import Device, ListAndWatchResponse
from tests.builders import G1, NODE, a_gpu, a_health
from tests.fakes.clock import ManualClock
from tests.hami_vectors import Vector, cases, vectors

# Which GPUs HAMi's `filterdevices` keeps out: from its config.json to what is shared.

FILTER = {"uuid": [G1], "index": [2]}
MIG_DEVICE = "filter-137"


def offer(gpu: Gpu) -> tuple[bool, list[GpuUuid]]:
    """Whether the GPU is shared on a node with the filter, and what is said to be left out."""
    text = json.dumps({"nodeconfig": [{"name": NODE, "filterdevices": FILTER}]})
    given = Sources(node_config=SourceFile("n.json", text.encode()))
    settings = build(make_plan(given).resolve(NODE), host_name=NODE)
    inventory = Cell(Inventory())
    keeper = InventoryKeeper(inventory, Cell(settings.sharing), ManualClock())
    keeper.found(Scan("570.1", (gpu,)))
    shared = [one.uuid for one in inventory.value.gpus]
    return [gpu.uuid] == shared, [GpuUuid(fault.gpu) for fault in keeper.left_out.value]


def test_all_vectors_are_of_one_filter():
    assert {"filterdevices uuid=[G1] index=[2]"} == {one.name for one in vectors("filter").values()}


@pytest.mark.parametrize(
    "vector", cases("filter", without={MIG_DEVICE: "a part of a GPU, tested below"}), ids=str
)
def test_a_gpu_is_kept_out_where_hami_drops_it_and_shared_otherwise(vector: Vector):
    gpu = a_gpu(uuid=vector.given["uuid"], index=int(vector.given["index"]))
    dropped = vector.expected

    assert (not dropped, []) == offer(gpu)


def test_a_part_of_a_gpu_in_mig_mode_is_not_shared_whether_a_filter_names_it_or_not():
    """HAMi lists each part as `GPU:part`, which no filter by index can name.

    Here GPUs in MIG mode are not shared yet: the whole GPU is left out, with a word about it unless
    the filter names the GPU.
    """
    vector = vectors("filter")[MIG_DEVICE]
    index, _, part = vector.given["index"].partition(":")
    parent = a_gpu(index=int(index), mig_enabled=True)

    assert ("1", False) == (part, vector.expected)
    assert (False, [parent.uuid]) == offer(parent)
    assert (False, []) == offer(a_gpu(index=2, mig_enabled=True))


# The list for the kubelet against HAMi v2.10's own, down to the bytes that the kubelet reads.

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
def test_one_gpu_becomes_the_devices_that_hami_lists(vector: Vector):
    given = vector.given
    settings = SharingSettings(
        split_count=given["deviceSplitCount"], numa_topology=given["enableNumaTopology"]
    )
    inventory, slices = Cell(Inventory()), Cell(SliceList())
    keeper = InventoryKeeper(inventory, Cell(settings), ManualClock(), slices=slices)
    gpu = a_gpu(uuid=given["uuid"], numa=given["numa"])
    assert "Unhealthy" == given["health"]
    keeper.judged({gpu.uuid: a_health(condition=Condition.BAD)})
    keeper.found(Scan("570.1", (gpu,)))

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
