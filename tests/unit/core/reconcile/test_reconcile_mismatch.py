"""Another GPU than the answer's: what is a mismatch, what is drift, and what may start."""

import datetime as dt

import msgspec
import pytest

from agent.cluster import Role
from agent.errors import Refusal, RefusalReason
from agent.ledger import ContainerKey, Ledger, gaps
from agent.model import SliceId
from agent.reconcile import Findings, check_start
from tests.builders import G1, G2, NOON, a_row, a_share
from tests.unit.core.allocation.matching_scene import NOW_KUBELET, OLD_KUBELET
from tests.unit.core.reconcile.test_reconcile import IDS, MINUTE, OTHER_IDS, POD, found, held

OFFERED = a_row(epoch=NOW_KUBELET, slice_ids=IDS, offered=True)
ELSEWHERE = (SliceId(f"{G2}-0"),)


def mismatched(findings: Findings) -> tuple[ContainerKey, ...]:
    return tuple(row.key for row in findings.confirmed if row.mismatched)


NOT_OFFERED = a_row(epoch=NOW_KUBELET, slice_ids=IDS)
FIRST = a_row(container="fetch", role=Role.INIT, epoch=NOW_KUBELET, slice_ids=IDS, offered=True)
SECOND = a_row(shares=(a_share(uuid=G2),), slice_ids=IDS, epoch=NOW_KUBELET)
INIT = a_row(role=Role.INIT, epoch=NOW_KUBELET, slice_ids=ELSEWHERE, offered=True)
BOTH = dict.fromkeys({FIRST.key, SECOND.key}, frozenset(IDS))


@pytest.mark.parametrize(
    ("rows", "ids", "recorded", "mismatches", "drifted"),
    [
        # Another GPU although the right one was offered; other ids of the offered one.
        ((OFFERED,), ELSEWHERE, None, (OFFERED.key,), 0),
        ((OFFERED,), OTHER_IDS, None, (), 0),
        # What nobody could prevent: another GPU, an id before a switch, no id, too many.
        ((NOT_OFFERED,), ELSEWHERE, None, (), 1),
        ((NOT_OFFERED,), (SliceId(G1),), None, (), 1),
        ((NOT_OFFERED,), (SliceId("foreign"),), None, (), 1),
        ((NOT_OFFERED,), (*IDS, *OTHER_IDS), None, (), 1),
        ((NOT_OFFERED,), (*IDS, *ELSEWHERE), None, (), 1),
        # The ids of an init container are used again: drift of the second alone.
        ((FIRST, SECOND), IDS, BOTH, (), 1),
        # An init container's ids are known from what the kubelet asked for and recorded.
        ((INIT,), (), {}, (), 0),
        ((INIT,), (), {INIT.key: frozenset(IDS)}, (INIT.key,), 0),
    ],
)
def test_another_gpu_is_a_mismatch_if_the_right_one_was_offered_and_drift_otherwise(
    rows, ids, recorded, mismatches, drifted
):
    look = {"holdings": (held(POD, *ids),), "recorded": recorded}

    findings = found(*rows, **look)

    assert mismatches == mismatched(findings)
    assert (drifted, 0) == gaps(Ledger(findings.confirmed), NOON)
    # It is said once, and a new kubelet confirms the same.
    if findings.confirmed:
        assert Findings() == found(*findings.confirmed, **look)
        anew = found(*findings.confirmed, **look, epoch=OLD_KUBELET)
        assert {OLD_KUBELET} == {row.epoch for row in anew.confirmed}


def test_only_the_container_of_a_mismatch_may_not_start():
    wrong = msgspec.structs.replace(OFFERED, slice_ids=ELSEWHERE)

    with pytest.raises(Refusal) as caught:
        check_start(Ledger((wrong,)), ELSEWHERE)
    assert RefusalReason.OTHER_GPU_BOOKED is caught.value.gate
    check_start(Ledger((wrong,)), IDS)
    check_start(Ledger((wrong,)), (*IDS, *ELSEWHERE))
    check_start(Ledger((OFFERED,)), IDS)
    check_start(Ledger((msgspec.structs.replace(wrong, offered=False),)), ELSEWHERE)
    check_start(Ledger(), ELSEWHERE)


@pytest.mark.parametrize("recorded", [None, {}])
def test_an_init_container_that_the_kubelet_shows_nowhere_is_drift_and_not_unconfirmed(recorded):
    row = a_row(role=Role.INIT)
    early = NOON + MINUTE - dt.timedelta(microseconds=1)

    assert () == found(row, recorded=recorded).confirmed
    assert (0, 0) == gaps(Ledger((row,)), early)
    assert (1, 0) == gaps(Ledger((row,)), NOON + MINUTE)
