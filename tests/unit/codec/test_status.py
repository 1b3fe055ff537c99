"""The status of a node from its objects alone, and the envelope of the answers of `/api/v1`."""

import pytest
from msgspec.structs import replace

from agent.cluster import PodTable, Role
from agent.errors import MalformedText
from agent.ledger import Decider, JournalEntry, Ledger
from agent.model import Condition
from agent.status import NodeStatus, StatusFacts, envelope, open_envelope, status_of
from tests.builders import (
    G1,
    G2,
    NOON,
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


ABOUT = NodeStatus(name="n")


def test_without_a_scheduler_a_container_holds_the_gpus_of_its_slices():
    row = a_row(shares=[], slice_ids=[f"{G1}-0", f"{G1}-1", f"{G2}-4"])
    row = replace(row, decided_by=Decider.KUBELET)
    inventory = an_inventory(gpus=[GPU])
    found = status_of(StatusFacts(NOON, ABOUT, inventory=inventory, ledger=Ledger((row,))))

    assert 2 == found.gpus[0].slices_held
    assert found.allocations
    assert [("3", None, None), ("3", None, None), (G2, None, None)] == [
        (share.gpu, share.memory_mib, share.cores) for share in found.allocations[0].shares
    ]


SETUP = a_container(name="setup", role=Role.INIT)
OVER = replace(SETUP, has_run=True, succeeded=True, ended_at=NOON)


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
        NOON, ABOUT, refusals=lambda: (refused, refused), pods=PodTable({pod.uid: pod}, synced=True)
    )
    unsynced = replace(facts, pods=PodTable())

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
