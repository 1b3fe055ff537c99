"""While the pods cannot be listed, only a replay that the kubelet confirms is served."""

import dataclasses

import pytest

from agent.core.candidates import Books
from agent.core.errors import Gate, Refusal
from agent.core.evidence import AskKubelet, Evidence, Grant, ListPods, ReadRecords
from agent.core.holdings import Holding, KubeletEpoch
from agent.core.ledger import Row
from agent.core.pods import PodTable, Role
from tests.builders import a_container, a_row, a_share
from tests.unit.core.matching_scene import (
    G1,
    NOW_KUBELET,
    OLD_KUBELET,
    a_scene,
    ask,
    changed,
    granted,
    holding,
    knowing,
    named_pod,
    without_witness,
)

SHARE = a_share(uuid=G1)
POD = named_pod(1)
OTHER = named_pod(2)


def row_of(pod=POD, container="main", **changes: object) -> Row:
    row = a_row(
        pod_uid=pod.uid, pod=pod.name, container=container, shares=(SHARE,), epoch=OLD_KUBELET
    )
    return dataclasses.replace(row, **changes)  # type: ignore[arg-type]


def blind(*rows: Row, listed: bool = True) -> Evidence:
    """An agent that was restarted while the API server was away."""
    scene = a_scene(rows=rows)
    return changed(scene, table=PodTable(), listed=listed, list_failed=listed)


def gate(scene: Evidence, count: int = 1) -> tuple[Gate, bool]:
    with pytest.raises(Refusal) as caught:
        ask(scene, count)
    return caught.value.gate, caught.value.transient


UNKNOWN = (Gate.PODS_UNKNOWN, True)


def test_nobody_is_called_static_or_deleted_when_the_list_failed():
    for table in (PodTable(), PodTable(synced=True), PodTable(synced=True, stale=True)):
        assert UNKNOWN == gate(changed(blind(), table=table))


def test_a_list_that_answered_is_believed():
    scene = changed(a_scene(), listed=True)

    assert (Gate.NO_POD_ADMITTED, False) == gate(scene)


def test_without_a_witness_the_failed_list_is_named_too():
    assert UNKNOWN == gate(without_witness(blind()))


def test_the_list_is_tried_before_the_ledger_stands_in_for_it():
    assert ListPods() == ask(blind(row_of(), listed=False))


def test_a_pod_that_only_the_ledger_knows_is_asked_for_and_served_again():
    row = row_of(shares=(SHARE, SHARE))
    scene = blind(row)
    assert AskKubelet(*POD.key) == ask(scene, count=2)

    grant = granted(knowing(scene, holding(POD)), count=2)

    assert (row, row.shares) == (grant.replay, grant.shares)


def test_a_row_that_was_only_adopted_does_not_stand_in_for_its_pod():
    scene = blind(row_of(epoch=KubeletEpoch()))

    assert UNKNOWN == gate(knowing(scene, holding(POD)))


@pytest.mark.parametrize("count", [1, 3])
def test_a_request_for_another_number_is_not_for_it(count):
    scene = knowing(blind(row_of(shares=(SHARE, SHARE))), holding(POD))

    assert UNKNOWN == gate(scene, count)


def test_a_pod_that_the_kubelet_does_not_know_or_has_served_is_not_the_one():
    scene = blind(row_of())

    assert UNKNOWN == gate(knowing(scene, absent=(POD,)))
    assert UNKNOWN == gate(knowing(scene, holding(POD, main="GPU-1-0")))


def test_a_container_that_may_be_running_is_never_taken_for_the_one_that_asks():
    booked = row_of(confirmed=True)

    assert UNKNOWN == gate(knowing(blind(booked), holding(POD)))
    assert UNKNOWN == gate(knowing(blind(booked, row_of(container="b")), holding(POD)))


def test_the_containers_of_a_pod_come_in_the_order_of_their_answers():
    pod = named_pod(1, containers=(a_container(name="a"), a_container(name="b")))
    first, second = row_of(pod, "a"), row_of(pod, "b")
    assert first == granted(knowing(blind(first, second), holding(pod))).replay

    again = dataclasses.replace(first, epoch=NOW_KUBELET, confirmed=True)
    scene = knowing(blind(again, second), holding(pod, a="GPU-1-0"))

    assert second == granted(scene).replay


def test_an_init_container_is_looked_up_in_the_records_first():
    row = row_of(role=Role.INIT)
    scene = knowing(blind(row), Holding(*POD.key))
    assert ReadRecords() == ask(scene)

    unread = changed(scene, records_read=True, books=Books(NOW_KUBELET, frozenset()))
    read = changed(scene, records_read=True, books=Books(NOW_KUBELET, frozenset({row.key})))

    assert row == granted(unread).replay
    assert UNKNOWN == gate(read)


def test_two_that_could_be_meant_are_not_guessed_between():
    rows = (row_of(), row_of(OTHER))
    scene = knowing(blind(*rows), holding(POD), holding(OTHER))

    assert (Gate.MANY_PODS_ADMITTED, False) == gate(scene)


def test_the_pods_decide_again_as_soon_as_they_are_known():
    scene = knowing(blind(row_of()), holding(POD))
    assert isinstance(ask(scene), Grant)

    assert UNKNOWN == gate(changed(scene, table=PodTable(synced=True)))
