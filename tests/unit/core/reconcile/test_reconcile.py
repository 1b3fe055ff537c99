"""What differs between the ledger, the kubelet and the API."""

import datetime as dt
from functools import partial

import msgspec
import pytest

from agent.cluster import Phase, PodTable, PodView, Role, Tombstone
from agent.ledger import ContainerKey, Holding, Ledger, Row, gaps
from agent.model import SliceId
from agent.reconcile import Findings, ReconcileFacts, judge_by_scheduler
from tests.builders import G1, NOON, a_container, a_pod, a_pod_uid, a_row
from tests.unit.core.allocation.matching_scene import NOW_KUBELET, RESOURCE, annotated

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
    return judge_by_scheduler(Ledger(rows), msgspec.structs.replace(seen, **changes), RESOURCE)


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
    pod = msgspec.structs.replace(POD, phase=phase)
    row = a_row(role=role, epoch=NOW_KUBELET, slice_ids=IDS)
    for recorded in (None, {row.key: frozenset(IDS)}):
        look = partial(found, row, pods=(pod,), holdings=holdings, recorded=recorded)
        assert over == len(look(idle=look().idle, elapsed=seconds).over)


OLD_ROW = a_row(answered_at=NOON - 9 * MINUTE)
SUCCESSOR = msgspec.structs.replace(POD, uid=a_pod_uid(9))
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


WAITING = msgspec.structs.replace(SUCCESSOR, phase=Phase.PENDING)
NAMED = msgspec.structs.replace(POD, phase=Phase.PENDING, reusable_name=True)
OF_ANOTHER = {ContainerKey(a_pod_uid(9), "main"): frozenset(IDS)}


@pytest.mark.parametrize(
    ("rows", "pod", "seen", "count"),
    [
        ([], POD, {}, 1),
        ([], POD, {"holdings": (held(POD),)}, 0),
        ([a_row()], POD, {}, 0),
        # Who holds without a right: ended, not placed, asks for none, unknown.
        ([], msgspec.structs.replace(POD, phase=Phase.FAILED), {}, 0),
        ([], msgspec.structs.replace(POD, groups=None), {}, 0),
        ([], msgspec.structs.replace(POD, containers=(a_container(count=0),)), {}, 0),
        ([], msgspec.structs.replace(POD, name="another"), {}, 0),
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
        ([], msgspec.structs.replace(NAMED, phase=Phase.RUNNING), {"recorded": OF_ANOTHER}, 1),
        ([], msgspec.structs.replace(NAMED, reusable_name=False), {"recorded": OF_ANOTHER}, 1),
    ],
)
def test_a_holder_is_taken_over_if_it_has_a_right_and_the_ids_are_its_own(rows, pod, seen, count):
    assert count == len(found(*rows, **{"pods": (pod,), "holdings": HELD, **seen}).adopt)
