"""The status of a node from its objects alone, and the envelope of the answers of `/api/v1`."""

import msgspec
import pytest

from agent.cli.status import observed_status
from agent.cluster import ALLOCATED, REGISTER, NodeView, Phase, PodTable, Role
from agent.errors import MalformedText
from agent.hami.annotations import encode_json, registered
from agent.ledger import Decider, JournalEntry, Ledger
from agent.model import Condition
from agent.status import NodeStatus, StatusFacts, envelope, open_envelope, status_of, summary
from tests.builders import (
    G1,
    G2,
    NOON,
    RESOURCE,
    a_container,
    a_container_use,
    a_gpu,
    a_gpu_use,
    a_health,
    a_pod,
    a_row,
    a_share,
    a_shared_gpu,
    an_inventory,
)

GPU = a_shared_gpu(gpu=a_gpu(uuid=G1, index=3, name="Tesla T4"), registered_mib=16384)
NODE = NodeView("node-1", "u", "1", {REGISTER: encode_json(registered(an_inventory(gpus=[GPU])))})


def holding(*parts, **more):
    """A pod whose containers were given these shares of G1: `MiB,percent`."""
    text = "".join(f"{G1},NVIDIA,{part}:;" for part in parts)
    return a_pod(annotations={ALLOCATED: text}, **more)


def seen(pods=(), node=NODE):
    return observed_status(node, pods, RESOURCE, NOON)


def test_pods_hold_what_their_annotation_says_until_they_end():
    pods = [holding("3000,30"), holding("9000,90", uid="ended", phase=Phase.SUCCEEDED)]
    found = seen(pods)

    assert (1, 3000, 30) == (
        found.gpus[0].slices_held,
        found.gpus[0].promised_mib,
        found.gpus[0].promised_cores,
    )
    assert found.allocations
    (row,) = found.allocations
    assert ("team-a", "train-0", "3", 3000, None) == (
        row.namespace,
        row.pod,
        row.shares[0].gpu,
        row.shares[0].memory_mib,
        row.confirmed,
    )
    assert pods[0].containers[0].name == row.container
    elsewhere = a_pod(annotations={ALLOCATED: f"{G2},NVIDIA,1,1:;"}, uid="elsewhere")
    assert found.gpus == seen([*pods, elsewhere]).gpus


def test_a_container_that_keeps_hami_core_out_is_said_to_have_no_limits():
    loose = (a_container(control_disabled=True),)
    found = seen([holding("3000,30", containers=loose)]).allocations

    assert found
    assert "CUDA_DISABLE_CONTROL keeps HAMi-core out" == found[0].unkept


def test_init_containers_count_as_the_scheduler_counts_them():
    containers = (a_container(name="prepare", role=Role.INIT), a_container(name="main"))
    pod = holding("8000,10", "3000,30", containers=containers)
    assert (8000, 30) == (seen([pod]).gpus[0].promised_mib, seen([pod]).gpus[0].promised_cores)

    done = tuple(
        msgspec.structs.replace(one, succeeded=one.role is Role.INIT, has_run=True)
        for one in containers
    )
    pod = msgspec.structs.replace(pod, containers=done)
    assert (3000, 30) == (seen([pod]).gpus[0].promised_mib, seen([pod]).gpus[0].promised_cores)


def test_shares_that_fit_no_container_are_shown_without_its_name():
    found = seen([holding("1,1", "2,2", "3,3")])

    assert ["", "", ""] == [row.container for row in found.allocations or ()]


@pytest.mark.parametrize(
    "text",
    [NODE.annotations[REGISTER], f"{G1},10,16384,100,NVIDIA-Tesla T4,0,true,3,hami-core:"],
    ids=["JSON", "before 2.8"],
)
def test_the_annotation_says_what_the_scheduler_believes(text):
    (gpu,) = seen(node=msgspec.structs.replace(NODE, annotations={REGISTER: text})).gpus

    assert (G1, 3, "ok", True, None) == (
        gpu.uuid,
        gpu.index,
        gpu.condition,
        gpu.serving,
        gpu.used_mib,
    )
    assert (10, 16384, 100, "Tesla T4") == (
        gpu.slices,
        gpu.sellable_mib,
        gpu.sellable_cores,
        gpu.model,
    )


ABOUT = NodeStatus(name="n")


def test_without_a_scheduler_a_container_holds_the_gpus_of_its_slices():
    row = a_row(shares=[], slice_ids=[f"{G1}-0", f"{G1}-1", f"{G2}-4"])
    row = msgspec.structs.replace(row, decided_by=Decider.KUBELET)
    inventory = an_inventory(gpus=[GPU])
    found = status_of(StatusFacts(NOON, ABOUT, inventory=inventory, ledger=Ledger((row,))))

    assert 2 == found.gpus[0].slices_held
    assert found.allocations
    assert [("3", None, None), ("3", None, None), (G2, None, None)] == [
        (share.gpu, share.memory_mib, share.cores) for share in found.allocations[0].shares
    ]


SETUP = a_container(name="setup", role=Role.INIT)
OVER = msgspec.structs.replace(SETUP, has_run=True, succeeded=True, ended_at=NOON)


@pytest.mark.parametrize(
    ("condition", "setup", "mib"),
    [(Condition.OK, SETUP, 8), (Condition.LOST, SETUP, None), (Condition.OK, OVER, None)],
    ids=["it is used", "the GPU is lost", "an init container that ended"],
)
def test_what_can_no_longer_be_used_is_not_said_to_be(condition, setup, mib):
    """HAMi-core's region keeps the last figures."""
    later = a_container(name="later", role=Role.INIT)
    pod = a_pod(containers=(setup, later, a_container()))
    gpu = a_shared_gpu(gpu=a_gpu(uuid=G1), health=a_health(condition=condition))
    facts = StatusFacts(
        NOON,
        ABOUT,
        inventory=an_inventory(gpus=[gpu]),
        ledger=Ledger((a_row(container="setup", role=Role.INIT, shares=(a_share(uuid=G1),)),)),
        pods=PodTable({pod.uid: pod}, synced=True),
        used=lambda _: a_container_use(a_gpu_use(G1, mib=8)),
    )
    (one,) = status_of(facts).allocations or ()

    assert (False, mib) == (one.ended, one.shares[0].used_mib)


@pytest.mark.parametrize(
    ("message", "reason", "counts"),
    [
        ("Allocate failed: desc = it has no lock [HA-2005], which is unexpected", "U", 1),
        ("Allocate failed: desc = its GPU is bad [HA-4002], which is unexpected", "U", 0),
        ("it has no lock", "Evicted", 0),
        (None, "", 0),  # the pod is gone
    ],
)
def test_a_refusal_stands_while_its_pod_is_there(message, reason, counts):
    refused = JournalEntry(at=NOON, reason="HA-2005", text="it has no lock")
    status = {"message": message, "reason": "UnexpectedAdmissionError" if reason == "U" else reason}
    pod = a_pod(**(status if message else {}))
    facts = StatusFacts(
        NOON, ABOUT, refusals=(refused, refused), pods=PodTable({pod.uid: pod}, synced=True)
    )
    unsynced = msgspec.structs.replace(facts, pods=PodTable())

    assert (refused,) * counts == status_of(facts).standing
    assert (refused, refused) == status_of(facts).refusals
    assert status_of(unsynced).standing is None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (envelope("Gpus", ABOUT, NOON), "a Gpus of hami-agent/v1 of 2026; expected a Node"),
        (envelope("Node", (), NOON), "the answer is no Node of hami-agent/v1"),
        (envelope("Node", ABOUT, NOON.replace(year=1969)), "hami-agent/v1 of 1969; expected a"),
    ],
    ids=["another kind", "another form", "no time"],
)
def test_another_answer_is_refused_with_what_is_wrong(content: bytes, why: str) -> None:
    with pytest.raises(MalformedText, match=why):
        open_envelope(content, "Node", NodeStatus)


def test_the_slices_and_not_the_containers_without_a_record_are_counted():
    found = seen([holding("3000,30")])
    pair = found.allocations[0]
    pair = msgspec.structs.replace(pair, confirmed=False, shares=pair.shares * 2)
    told = summary(msgspec.structs.replace(found, allocations=(pair,)))

    assert told.endswith(", 2 not recorded by the kubelet")
