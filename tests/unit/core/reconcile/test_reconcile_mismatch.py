"""Another GPU than the answer's: what is a mismatch, what is drift, and what may start."""

import datetime as dt

import msgspec
import pytest

from agent.cluster import Role
from agent.errors import Refusal, RefusalReason
from agent.ledger import ContainerKey, Ledger, mismatch
from agent.model import SliceId
from agent.reconcile import Findings, check_start, gaps
from tests.builders import G1, G2, NOON, a_row, a_share
from tests.unit.core.allocation.matching_scene import NOW_KUBELET, OLD_KUBELET
from tests.unit.core.reconcile.test_reconcile import IDS, MINUTE, OTHER_IDS, POD, found, held

OFFERED = a_row(epoch=NOW_KUBELET, slice_ids=IDS, offered=True)
ELSEWHERE = (SliceId(f"{G2}-0"),)


def mismatched(findings: Findings) -> tuple[ContainerKey, ...]:
    return tuple(row.key for row in findings.confirmed if row.mismatched)


def test_another_gpu_although_the_right_one_was_offered_is_a_mismatch_and_said_once():
    findings = found(OFFERED, holdings=(held(POD, *ELSEWHERE),))

    assert (OFFERED.key,) == mismatched(findings)
    assert (0, 0) == gaps(Ledger(findings.confirmed), NOON)
    (told,) = findings.confirmed
    assert ELSEWHERE == told.slice_ids
    assert Findings() == found(told, holdings=(held(POD, *ELSEWHERE),))
    new_kubelet = found(told, holdings=(held(POD, *ELSEWHERE),), epoch=OLD_KUBELET)
    assert [OLD_KUBELET] == [row.epoch for row in new_kubelet.confirmed]


def test_the_offered_gpu_is_no_mismatch():
    assert () == mismatched(found(OFFERED, holdings=(held(POD, *OTHER_IDS),)))


@pytest.mark.parametrize(
    "ids",
    [
        ELSEWHERE,
        (SliceId(G1),),
        (SliceId("foreign"),),
        (*IDS, *OTHER_IDS),
        (*IDS, *ELSEWHERE),
    ],
    ids=["another GPU", "an id before a switch", "no id", "two for one", "one too many"],
)
def test_another_gpu_that_nobody_could_prevent_is_drift_for_as_long_as_it_lasts(ids):
    row = a_row(epoch=NOW_KUBELET, slice_ids=IDS)

    findings = found(row, holdings=(held(POD, *ids),))

    assert () == mismatched(findings)
    assert (1, 0) == gaps(Ledger(findings.confirmed), NOON)


def test_ids_of_an_init_container_that_are_used_again_are_drift_of_the_second_only():
    first = a_row(container="fetch", role=Role.INIT, epoch=NOW_KUBELET, slice_ids=IDS, offered=True)
    second = a_row(shares=(a_share(uuid=G2),), slice_ids=IDS, epoch=NOW_KUBELET)

    findings = found(
        first,
        second,
        holdings=(held(POD, *IDS),),
        recorded=dict.fromkeys({first.key, second.key}, frozenset(IDS)),
    )

    assert () == mismatched(findings)
    assert (1, 0) == gaps(Ledger(findings.confirmed), NOON)


def test_an_init_containers_mismatch_is_known_from_what_the_kubelet_asked_for():
    row = a_row(role=Role.INIT, epoch=NOW_KUBELET, slice_ids=ELSEWHERE, offered=True)

    known = (held(POD),)

    assert () == mismatched(found(row, holdings=known, recorded={}))
    recorded = {row.key: frozenset(IDS)}
    assert (row.key,) == mismatched(found(row, holdings=known, recorded=recorded))


def test_foreign_ids_are_named_as_they_are():
    row = msgspec.structs.replace(OFFERED, slice_ids=(SliceId("foreign"), *ELSEWHERE))

    assert f"slices of {G2}, foreign for it" in mismatch(row).sentence


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


def test_of_rows_with_the_same_ids_the_last_answer_decides_whether_it_may_start():
    wrong = msgspec.structs.replace(OFFERED, slice_ids=ELSEWHERE)
    key = msgspec.structs.replace(wrong.key, container="next")
    right = msgspec.structs.replace(
        wrong, key=key, shares=(a_share(uuid=G2),), answered_at=NOON + MINUTE
    )

    check_start(Ledger((right, wrong)), ELSEWHERE)
    with pytest.raises(Refusal):
        check_start(
            Ledger((right, msgspec.structs.replace(wrong, answered_at=NOON + 2 * MINUTE))),
            ELSEWHERE,
        )


@pytest.mark.parametrize("recorded", [None, {}])
def test_an_init_container_that_the_kubelet_shows_nowhere_is_drift_and_not_unconfirmed(recorded):
    row = a_row(role=Role.INIT)
    early = NOON + MINUTE - dt.timedelta(microseconds=1)

    assert () == found(row, recorded=recorded).confirmed
    assert (0, 0) == gaps(Ledger((row,)), early)
    assert (1, 0) == gaps(Ledger((row,)), NOON + MINUTE)
