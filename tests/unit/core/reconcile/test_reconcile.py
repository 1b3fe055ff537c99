"""What differs between the ledger, the kubelet and the API."""

import datetime as dt
from functools import partial

import pytest
from msgspec.structs import replace

from agent.cluster import Phase, PodTable, PodView, Role, Tombstone
from agent.errors import Refusal, RefusalReason
from agent.ledger import ContainerKey, Holding, Ledger, Row, gaps, mismatch
from agent.model import SliceId
from agent.reconcile import Findings, ReconcileFacts, check_start, judge_by_scheduler
from tests.builders import G1, G2, NOON, a_container, a_pod, a_pod_uid, a_row, a_share
from tests.unit.core.allocation.matching_scene import NOW_KUBELET, OLD_KUBELET, RESOURCE, annotated

IDS = (SliceId(f"{G1}-0"),)
OTHER_IDS = (SliceId(f"{G1}-7"),)
POD = a_pod(annotations=annotated(), phase=Phase.RUNNING)
MINUTE = dt.timedelta(seconds=60)


def held(pod: PodView, *ids: SliceId, container: str = "main") -> Holding:
    ids_by_resource = {RESOURCE: frozenset(ids)} if ids else {}
    return Holding(pod.namespace, pod.name, {container: ids_by_resource})


def found(
    *rows: Row,
    pods: tuple[PodView, ...] = (POD,),
    holdings: tuple[Holding, ...] = (),
    gone: tuple[PodView, ...] = (),
    **changes: object,
) -> Findings:
    table = PodTable(
        {pod.uid: pod for pod in pods}, tuple(Tombstone(p, NOON) for p in gone), synced=True
    )
    seen = ReconcileFacts(table, holdings, NOW_KUBELET, NOON)
    return judge_by_scheduler(Ledger(rows), replace(seen, **changes), RESOURCE)


def test_other_ids_of_the_same_gpu_are_taken_over_and_no_drift():
    row = a_row(epoch=NOW_KUBELET, confirmed=True, slice_ids=IDS)
    findings = found(row, holdings=(held(POD, *OTHER_IDS),))
    assert OTHER_IDS == findings.confirmed[0].slice_ids
    assert (0, 0) == gaps(Ledger(findings.confirmed), NOON)


@pytest.mark.parametrize("hours", [-9, 9], ids=["back", "forward"])
def test_a_clock_that_was_set_changes_no_grace(hours):
    now = NOON + dt.timedelta(hours=hours)
    idle = found(a_row(), pods=()).idle
    assert () == found(a_row(), pods=(), now=now, idle=idle, elapsed=59.0).over
    assert (a_row(),) == found(a_row(), pods=(), now=now, idle=idle, elapsed=60.0).over
    assert (0, 1) == gaps(Ledger((a_row(),)), now)


LISTS = {
    "not listed": (),
    "listed without ids": (held(POD),),
    "listed with its ids": (held(POD, *IDS),),
    "listed with others": (held(POD, *OTHER_IDS),),
}
"""What a kubelet says of a pod that has ended: before 1.34 it lists it."""


@pytest.mark.parametrize("holdings", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    ("phase", "seconds", "over"),
    [
        (Phase.SUCCEEDED, 0, 1),
        # A pod that the kubelet rejects at its start is failed while its containers still run.
        (Phase.FAILED, 59, 0),
        (Phase.FAILED, 60, 1),
        (Phase.RUNNING, 0, 0),
    ],
)
def test_the_row_of_an_ended_pod_is_over_whatever_the_kubelet_lists(
    holdings, role, phase, seconds, over
):
    pod = replace(POD, phase=phase)
    row = a_row(role=role, epoch=NOW_KUBELET, slice_ids=IDS)
    for recorded in (None, {row.key: frozenset(IDS)}):
        look = partial(found, row, pods=(pod,), holdings=holdings, recorded=recorded)
        assert over == len(look(idle=look().idle, elapsed=seconds).over)


@pytest.mark.parametrize("phase", Phase)
def test_a_stranger_that_has_ended_keeps_no_ids_although_the_kubelet_lists_it(phase):
    stranger = a_pod(phase=phase)
    look = partial(found, pods=(stranger,), holdings=(held(stranger, *IDS),))
    (kept,) = found(pods=(a_pod(),), holdings=(held(stranger, *IDS),)).strangers
    idle = {(kept.key, kept.answered_at): -60.0}
    assert stranger.terminal == (not look().strangers)
    assert stranger.terminal == bool(look(kept, idle=idle).over)


OLD_ROW = a_row(answered_at=NOON - 9 * MINUTE)
SUCCESSOR = replace(POD, uid=a_pod_uid(9))
HELD = (held(POD, *IDS),)


@pytest.mark.parametrize(
    ("seen", "is_over"),
    [
        ({}, True),
        ({"gone": (POD,)}, True),
        # The kubelet still has the deleted pod, or its successor.
        ({"holdings": HELD}, False),
        ({"pods": (SUCCESSOR,), "holdings": HELD}, True),
        # Half a view: pods are not listed yet; the watch is down.
        ({"table": PodTable()}, False),
        ({"table": PodTable(synced=True, stale=True)}, False),
    ],
)
def test_the_row_of_a_deleted_pod_is_over_when_all_views_say_so_for_a_minute(seen, is_over):
    for row in (a_row(), OLD_ROW, a_row(answered_at=NOON + 9 * MINUTE)):
        first = found(row, **{"pods": (), **seen})
        early, later = (
            found(row, **{"pods": (), **seen, "idle": first.idle, "elapsed": elapsed})
            for elapsed in (59.0, 60.0)
        )
        assert [False, False, is_over] == [bool(each.over) for each in (first, early, later)]


WAITING = replace(SUCCESSOR, phase=Phase.PENDING)
NAMED = replace(POD, phase=Phase.PENDING, reusable_name=True)
OF_ANOTHER = {ContainerKey(a_pod_uid(9), "main"): frozenset(IDS)}


@pytest.mark.parametrize(
    ("rows", "pod", "seen", "count"),
    [
        ([], POD, {}, 1),
        ([], POD, {"holdings": (held(POD),)}, 0),
        ([a_row()], POD, {}, 0),
        # Who holds without a right: ended, not placed, asks for none, unknown.
        ([], replace(POD, phase=Phase.FAILED), {}, 0),
        ([], replace(POD, groups=None), {}, 0),
        ([], replace(POD, containers=(a_container(count=0),)), {}, 0),
        ([], replace(POD, name="another"), {}, 0),
        # The ids may be those of a deleted pod of that name, until its successor runs.
        ([], WAITING, {}, 1),
        ([], WAITING, {"gone": (POD,)}, 0),
        ([], SUCCESSOR, {"gone": (POD,)}, 1),
        ([OLD_ROW], WAITING, {}, 0),
        ([OLD_ROW], SUCCESSOR, {}, 1),
        ([a_row(pod="another", answered_at=NOON - 9 * MINUTE)], WAITING, {}, 1),
        # The kubelet's file has them under another UID: that counts where a name can return.
        ([], NAMED, {"recorded": OF_ANOTHER}, 0),
        ([], NAMED, {"recorded": None}, 1),
        ([], NAMED, {"recorded": {ContainerKey(POD.uid, "main"): frozenset(IDS)}}, 1),
        ([], replace(NAMED, phase=Phase.RUNNING), {"recorded": OF_ANOTHER}, 1),
        ([], replace(NAMED, reusable_name=False), {"recorded": OF_ANOTHER}, 1),
    ],
)
def test_a_holder_is_taken_over_if_it_has_a_right_and_the_ids_are_its_own(rows, pod, seen, count):
    assert count == len(found(*rows, **{"pods": (pod,), "holdings": HELD, **seen}).adopt)


# Another GPU than the answer's: what is a mismatch, what is drift, and what may start.

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


def test_foreign_ids_are_named_as_they_are():
    row = replace(OFFERED, slice_ids=(SliceId("foreign"), *ELSEWHERE))
    assert f"slices of {G2}, foreign for it" in mismatch(row).sentence


def test_only_the_container_of_a_mismatch_may_not_start():
    wrong = replace(OFFERED, slice_ids=ELSEWHERE)

    with pytest.raises(Refusal) as caught:
        check_start(Ledger((wrong,)), ELSEWHERE)
    assert RefusalReason.OTHER_GPU_BOOKED is caught.value.gate
    check_start(Ledger((wrong,)), IDS)
    check_start(Ledger((wrong,)), (*IDS, *ELSEWHERE))
    check_start(Ledger((OFFERED,)), IDS)
    # Of rows with the same ids the last answer decides.
    next_key, later = ContainerKey(POD.uid, "next"), NOON + MINUTE
    right = replace(wrong, key=next_key, shares=(a_share(uuid=G2),), answered_at=later)
    check_start(Ledger((right, wrong)), ELSEWHERE)
    with pytest.raises(Refusal):
        check_start(Ledger((right, replace(wrong, answered_at=later + MINUTE))), ELSEWHERE)
    check_start(Ledger((replace(wrong, offered=False),)), ELSEWHERE)
    check_start(Ledger(), ELSEWHERE)
