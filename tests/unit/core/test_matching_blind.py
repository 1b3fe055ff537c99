"""While the pods cannot be listed, nobody is served, and nobody is called static or deleted."""

import pytest

from agent.core.allocation.evidence import Evidence, ListPods
from agent.core.cluster.pods import PodTable
from agent.core.errors import Refusal, RefusalReason
from agent.core.state.ledger import Row
from tests.builders import a_row, a_share
from tests.unit.core.matching_scene import (
    G1,
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

POD = named_pod(1)
ROW = a_row(pod_uid=POD.uid, pod=POD.name, shares=(a_share(uuid=G1),), epoch=OLD_KUBELET)


def blind(*rows: Row) -> Evidence:
    """An agent that was restarted while the API server was away."""
    return changed(a_scene(rows=rows), table=PodTable(), listed=True, list_failed=True)


def gate(scene: Evidence) -> tuple[RefusalReason, bool]:
    with pytest.raises(Refusal) as caught:
        ask(changed(scene, records_read=True))
    return caught.value.gate, caught.value.transient


UNKNOWN = (RefusalReason.PODS_UNKNOWN, True)


def test_nobody_is_called_static_or_deleted_when_the_list_failed():
    for table in (PodTable(), PodTable(synced=True), PodTable(synced=True, stale=True)):
        assert UNKNOWN == gate(changed(blind(), table=table))


def test_a_list_that_answered_is_believed():
    scene = changed(a_scene(), listed=True)

    assert (RefusalReason.NO_POD_ADMITTED, False) == gate(scene)


def test_without_a_witness_the_failed_list_is_named_too():
    assert UNKNOWN == gate(without_witness(blind()))


def test_a_pod_that_only_the_ledger_knows_is_no_pod_until_the_pods_were_listed():
    scene = knowing(blind(ROW), holding(POD))
    unlisted = changed(scene, listed=False, list_failed=False, records_read=True)

    assert ListPods() == ask(unlisted)
    assert UNKNOWN == gate(scene)
    known = changed(unlisted, table=a_scene(POD).table, listed=True)
    assert ROW == granted(known).replay
