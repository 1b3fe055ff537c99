"""Which pod and whose lock, against HAMi's choices: it picks from a list, we ask the kubelet."""

from collections.abc import Collection
from typing import Any

import pytest

from agent.allocate.match import Evidence, Grant, MatchSettings, UnlockedPods, decide
from agent.cluster import BIND_TIME, MUTEX_LOCK, NodeLock, NodeView, Phase, PodTable, PodView
from agent.errors import Refusal
from agent.hami.annotations import held_lock
from agent.ledger import Ledger
from agent.model import Share, SliceId, split_slice_id
from agent.settle import SettlementFacts, pending_effects
from tests.builders import G1 as GPU
from tests.builders import NOON, a_gpu, a_pod, a_pod_uid, a_shared_gpu, an_inventory
from tests.hami_vectors import Vector, cases, vectors
from tests.unit.core.allocation.matching_scene import a_scene, changed, holding, knowing

HERE = "node-a"
OTHER_PODS = {
    "pending_pod-081": "a lock without an owner gives nobody a right: none is picked from a list",
    "pending_pod-082": "without a lock none is picked from a list",
}
OTHER_LOCKS = {
    "node_lock_release-076": "no check of the owner is ever skipped",
    "node_lock_release-077": "a lock without an owner is left to the scheduler's timeout",
    "node_lock_release-078": "an unreadable lock is nobody's: it is not touched",
}
OTHER_IDS = {
    "physical_id-128": "a replica of NVIDIA's own plugin (`::2`) is no slice of ours",
    "physical_id-129": "a slice's GPU is what stands before its number, whatever its form",
}


def lock_of(text: str) -> NodeLock | None:
    return held_lock(NodeView(HERE, "uid", "1", {MUTEX_LOCK: text} if text else {}))


def pods_of(vector: Vector) -> list[PodView]:
    """The vector's pods; each has one share of a GPU, for HAMi's code did not get so far."""
    return [pod_of(number, given) for number, given in enumerate(vector.given["pods"])]


def pod_of(number: int, given: dict[str, Any]) -> PodView:
    return a_pod(
        uid=a_pod_uid(number),
        namespace="default",
        name=given["name"],
        phase=Phase(given["phase"]),
        node=HERE,
        annotations=given["annotations"]
        | {"hami.io/vgpu-devices-allocated": f"{GPU},NVIDIA,1000,10:;"},
    )


def served(vector: Vector, admitted: Collection[PodView], unlocked: UnlockedPods) -> PodView | None:
    """The pod that is served when the kubelet admits `admitted`; None: it is refused."""
    pods = pods_of(vector)
    shared = a_shared_gpu(gpu=a_gpu(uuid=GPU))
    scene: Evidence = changed(
        a_scene(*pods),
        lock=lock_of(vector.given["lock"]),
        inventory=an_inventory(gpus=(shared,)),
        records_read=True,
        listed=True,
        waited=True,
        node_read=True,
        settings=MatchSettings(node=HERE, unlocked_pods=unlocked),
    )
    absent = tuple(pod for pod in pods if pod not in admitted)
    try:
        step = decide(knowing(scene, *map(holding, admitted), absent=absent))
    except Refusal:
        return None
    assert isinstance(step, Grant)
    assert (Share(GPU, 1000, 10),) == step.shares
    return step.candidate.pod


@pytest.mark.parametrize("vector", cases("pending_pod", without=OTHER_PODS), ids=str)
def test_the_pod_is_the_one_that_hami_finds_or_none(vector: Vector):
    found = [served(vector, [pod], UnlockedPods.STRICT) for pod in pods_of(vector)]

    expected = [vector.expected["pod"]] if vector.expected["error"] is None else []
    assert expected == ["/".join(pod.key) for pod in found if pod is not None]


@pytest.mark.parametrize("name", OTHER_PODS)
def test_no_pod_is_picked_from_a_list_or_by_the_name_in_a_lock_alone(name: str):
    """HAMi takes the first of the list, in the order of names, or whoever has the lock's name."""
    vector = vectors("pending_pod")[name]
    assert vector.expected["error"] is None

    assert {None} == {served(vector, [pod], UnlockedPods.STRICT) for pod in pods_of(vector)}


@pytest.mark.parametrize("unlocked", UnlockedPods)
def test_where_several_are_admitted_hamis_guess_cannot_be_had(unlocked: UnlockedPods):
    """HAMi would give the share of `a` to both."""
    vector = vectors("pending_pod")["pending_pod-082"]

    assert served(vector, pods_of(vector), unlocked) is None


def released(vector: Vector) -> list[str]:
    """The locks that are owed a release once default/p, bound under this lock, has ended."""
    bound = {BIND_TIME: str(int(NOON.timestamp()))}
    pod = a_pod(namespace="default", name="p", phase=Phase.FAILED, annotations=bound)
    table = PodTable({pod.uid: pod}, synced=True)
    effects = pending_effects(SettlementFacts(table, Ledger(), lock_of(vector.given["lock"]), NOON))
    return [one.lock for one in effects if one.lock]


@pytest.mark.parametrize("vector", cases("node_lock_release", without=OTHER_LOCKS), ids=str)
def test_a_lock_is_released_by_its_owner_alone(vector: Vector):
    """The patch names the lock's text and not the Node's version, which changes all the time."""
    present = vector.expected["lockStillPresent"]

    assert ([] if present else [vector.given["lock"]]) == released(vector)


def physical(text: str) -> str:
    """The GPU of a slice id; what is no slice id is a GPU of its own."""
    pair = split_slice_id(SliceId(text))
    return pair[0] if pair else text


@pytest.mark.parametrize("vector", cases("physical_id", without=OTHER_IDS), ids=str)
def test_an_id_is_of_the_gpu_that_hami_takes_it_for(vector: Vector):
    assert vector.expected == physical(vector.given)
