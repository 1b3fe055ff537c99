"""Which GPUs HAMi's `filterdevices` keeps out: from its config.json to what is shared."""

import json

import pytest

from agent.inventory import InventoryKeeper
from agent.kit.cell import Cell
from agent.ledger import SourceFile
from agent.model import Gpu, GpuUuid, Inventory, Scan
from agent.settings.schema import build
from agent.settings.sources import NodeFacts, Sources
from agent.settings.values import make_plan
from tests.builders import G1, NODE, a_gpu
from tests.fakes.clock import ManualClock
from tests.hami_vectors import Vector, cases, vectors

FILTER = {"uuid": [G1], "index": [2]}
MIG_DEVICE = "filter-137"


def offer(gpu: Gpu) -> tuple[bool, list[GpuUuid]]:
    """Whether the GPU is shared on a node with the filter, and what is said to be left out."""
    text = json.dumps({"nodeconfig": [{"name": NODE, "filterdevices": FILTER}]})
    given = Sources(node_config=SourceFile("n.json", text.encode()))
    settings = build(make_plan(given).resolve(NodeFacts(NODE)), host_name=NODE)
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
