"""Inventory snapshots, what a GPU serves, and what kubelet and pods are asked by."""

import dataclasses

import pytest

from agent.core.cluster.pods import Phase, PodTable
from agent.core.inventory.condition import Condition
from agent.core.inventory.inventory import InventoryDiff, diff
from agent.core.inventory.slices import SliceId
from agent.core.state.holdings import ContainerHolding, Holding
from tests.builders import (
    G1,
    a_container,
    a_gpu,
    a_health,
    a_lock,
    a_pod,
    a_shared_gpu,
    an_inventory,
)


def test_equal_inventories_do_not_differ():
    assert InventoryDiff() == diff(an_inventory(), an_inventory(generation=2))
    assert diff(an_inventory(), an_inventory()).empty


def test_a_difference_names_added_removed_and_changed_gpus_in_order():
    zero, one, two, three = (a_shared_gpu(gpu=a_gpu(index=n)) for n in range(4))
    ill = dataclasses.replace(two, health=a_health(condition=Condition.BAD))
    found = diff(an_inventory(gpus=[zero, one, two]), an_inventory(gpus=[ill, one, three]))
    assert InventoryDiff((three.uuid,), (zero.uuid,), (two.uuid,)) == found
    assert not found.empty


def test_a_gpu_is_found_by_its_uuid():
    inventory = an_inventory(gpus=[a_shared_gpu(gpu=a_gpu(uuid=G1))])
    assert inventory.gpus[0] == inventory.find(G1)
    assert an_inventory(count=0).find(G1) is None


@pytest.mark.parametrize(
    ("present", "condition", "serving"),
    [
        (True, Condition.OK, True),
        (True, Condition.WATCH, True),
        (True, Condition.BAD, False),
        (False, Condition.OK, False),
    ],
)
def test_a_gpu_serves_while_it_is_there_and_well(present, condition, serving):
    shared = a_shared_gpu(present=present, health=a_health(condition=condition))
    assert serving is shared.serving


def test_what_the_kubelet_holds_is_asked_by_container_and_resource():
    ids = frozenset({SliceId(f"{G1}-0")})
    holding = Holding("a", "p", (ContainerHolding("side"), ContainerHolding("main", {"gpu": ids})))
    assert ids == holding.ids_of("main", "gpu")
    assert frozenset() == holding.ids_of("main", "other")
    assert frozenset() == holding.ids_of("side", "gpu") == holding.ids_of("none", "gpu")


def test_a_pod_is_found_by_name_and_terminal_once_it_ended():
    pod = a_pod(containers=[a_container(name="idle", count=0), a_container()])
    table = PodTable(pods={pod.uid: pod})
    assert pod == table.named("team-a", "train-0")
    assert table.named("team-b", "train-0") is None
    assert ("main",) == tuple(container.name for container in pod.gpu_containers)
    ended = [phase for phase in Phase if a_pod(phase=phase).terminal]
    assert [Phase.SUCCEEDED, Phase.FAILED] == ended


def test_a_lock_has_an_owner_unless_it_is_legacy():
    assert ("team-a", "train-0") == a_lock().owner
    assert a_lock(name="").owner is None


@pytest.mark.parametrize(
    ("parts", "plight"),
    [
        ({}, ""),
        ({"health": a_health(condition=Condition.BAD, text="XID 48")}, "is bad: XID 48"),
        ({"health": a_health(condition=Condition.LOST, cause="lost")}, "is lost: lost"),
        ({"present": False, "obstacle": "no name; wait"}, "is not shared: no name; wait"),
        ({"present": False, "wanted": False}, "is filtered out by the settings"),
        ({"present": False, "there": False}, "is not on the node any more"),
        ({"present": False, "wanted": False, "there": False}, "is not on the node any more"),
    ],
)
def test_why_a_gpu_is_given_to_nobody_reads_behind_its_name(parts, plight):
    assert plight == a_shared_gpu(**parts).plight
