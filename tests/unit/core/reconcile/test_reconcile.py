"""What differs between the ledger, the kubelet and the API."""

import datetime as dt
from functools import partial

import msgspec
import pytest

from agent.cluster import Phase, PodTable, PodView, Role, Tombstone
from agent.ledger import ContainerHolding, ContainerKey, Holder, Holding, KubeletEpoch, Ledger, Row
from agent.model import SliceId
from agent.reconcile.rules import Findings, ReconcileFacts, Stranger, judge_by_scheduler
from tests.builders import G1, NOON, a_container, a_pod, a_pod_uid, a_row
from tests.unit.core.allocation.matching_scene import NOW_KUBELET, OLD_KUBELET, RESOURCE, annotated

IDS = (SliceId(f"{G1}-0"),)
OTHER_IDS = (SliceId(f"{G1}-7"),)
POD = a_pod(annotations=annotated(), phase=Phase.RUNNING)
MINUTE = dt.timedelta(seconds=60)


def held(pod: PodView, *ids: SliceId, container: str = "main") -> Holding:
    containers = (ContainerHolding(container, {RESOURCE: frozenset(ids)} if ids else {}),)
    return Holding(pod.namespace, pod.name, containers)


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
    seen = ReconcileFacts(table, holdings, NOW_KUBELET, NOON, complete=True)
    return judge_by_scheduler(Ledger(rows), msgspec.structs.replace(seen, **changes), RESOURCE)


def test_a_row_is_confirmed_under_the_kubelet_that_names_its_ids():
    row = a_row(epoch=OLD_KUBELET)

    (confirmed,) = found(row, holdings=(held(POD, *IDS),)).confirmed

    assert (True, NOW_KUBELET, IDS) == (confirmed.confirmed, confirmed.epoch, confirmed.slice_ids)
    assert row.edits == confirmed.edits


def test_a_row_that_is_confirmed_already_is_no_finding():
    row = a_row(epoch=NOW_KUBELET, confirmed=True, slice_ids=IDS)

    assert Findings() == found(row, holdings=(held(POD, *IDS),))


def test_other_ids_of_the_same_gpu_are_taken_over_and_no_drift():
    row = a_row(epoch=NOW_KUBELET, confirmed=True, slice_ids=IDS)

    findings = found(row, holdings=(held(POD, *OTHER_IDS),))

    assert (OTHER_IDS, 0) == (findings.confirmed[0].slice_ids, findings.drifted)


@pytest.mark.parametrize("holding", [(), (held(POD),), (held(POD, *IDS, container="other"),)])
def test_a_kubelet_that_names_no_ids_confirms_nothing(holding):
    assert () == found(a_row(), holdings=holding).confirmed


def test_an_init_container_is_confirmed_by_the_file_of_a_kubelet_that_knows_its_pod():
    row = a_row(role=Role.INIT, epoch=OLD_KUBELET)
    known, recorded = (held(POD),), {row.key: frozenset(IDS)}

    assert () == found(row, holdings=(held(POD, *IDS),)).confirmed
    assert () == found(row, holdings=known, recorded={}).confirmed
    (confirmed,) = found(row, holdings=known, recorded=recorded).confirmed
    assert (True, NOW_KUBELET) == (confirmed.confirmed, confirmed.epoch)


def test_an_init_container_of_a_pod_that_a_new_kubelet_has_not_taken_up_is_not_confirmed():
    row = a_row(role=Role.INIT, epoch=OLD_KUBELET)

    assert () == found(row, recorded=dict.fromkeys({row.key}, frozenset(IDS))).confirmed


def test_a_row_that_stays_unconfirmed_is_counted_after_a_minute():
    row = a_row()

    assert 0 == found(row, now=NOON + MINUTE - dt.timedelta(microseconds=1)).unconfirmed
    assert 1 == found(row, now=NOON + MINUTE).unconfirmed
    assert (
        0 == found(msgspec.structs.replace(row, confirmed=True), now=NOON + 9 * MINUTE).unconfirmed
    )


@pytest.mark.parametrize("hours", [-9, 9], ids=["back", "forward"])
def test_a_clock_that_was_set_keeps_no_row_of_a_deleted_pod(hours):
    now = NOON + dt.timedelta(hours=hours)
    young = KubeletEpoch(7, int(NOON.timestamp() * 1e9))

    assert (a_row(),) == found(a_row(), pods=(), gone=(POD,), now=now, epoch=young).over
    assert (a_row(),) == found(a_row(), pods=(), now=now, epoch=young).over
    assert 1 == found(a_row(), now=now).unconfirmed


def test_an_answer_of_the_future_hides_no_row_and_its_pod_has_a_minute_since_we_look():
    row = a_row(answered_at=NOON + dt.timedelta(hours=9))

    assert () == found(row, pods=(), since=NOON, now=NOON + MINUTE / 2).over
    assert (row,) == found(row, pods=(), since=NOON, now=NOON + MINUTE).over


def test_a_row_that_is_closed_is_not_counted_as_unconfirmed():
    findings = found(a_row(), pods=(), now=NOON + 9 * MINUTE)

    assert (1, 0) == (len(findings.over), findings.unconfirmed)


LISTS = {
    "not listed": (),
    "listed without ids": (held(POD),),
    "listed with its ids": (held(POD, *IDS),),
    "listed with others": (held(POD, *OTHER_IDS),),
}
"""What a kubelet says of a pod that has ended: before 1.34 it lists it."""


@pytest.mark.parametrize("holdings", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("confirmed", [False, True])
def test_the_row_of_a_pod_that_succeeded_is_over_whatever_the_kubelet_lists(
    holdings, role, confirmed
):
    ended = msgspec.structs.replace(POD, phase=Phase.SUCCEEDED)
    row = a_row(confirmed=confirmed, role=role, epoch=NOW_KUBELET, slice_ids=IDS)
    recorded = {row.key: frozenset(IDS)}

    assert (row,) == found(row, pods=(ended,), holdings=holdings).over
    assert (row,) == found(row, pods=(ended,), holdings=holdings, recorded=recorded).over
    assert () == found(row, holdings=holdings).over


@pytest.mark.parametrize("holdings", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize(("seconds", "over"), [(0, 0), (59, 0), (60, 1), (7200, 1)])
def test_the_row_of_a_failed_pod_is_over_after_a_minute_whatever_the_kubelet_lists(
    holdings, seconds, over
):
    """A pod that the kubelet rejects at its start is failed while its containers still run."""
    ended = msgspec.structs.replace(POD, phase=Phase.FAILED)
    now, failed = NOON + dt.timedelta(seconds=seconds), {ended.uid: NOON}

    assert over == len(
        found(a_row(), pods=(ended,), holdings=holdings, now=now, failed=failed).over
    )


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.PENDING, Phase.SUCCEEDED, Phase.FAILED])
def test_a_stranger_that_has_ended_keeps_no_ids_although_the_kubelet_lists_it(phase):
    stranger = a_pod(phase=phase)
    holder = Holder(stranger.namespace, stranger.name, "main")
    kept = Stranger(holder, IDS, RESOURCE).row(NOON - 9 * MINUTE, NOW_KUBELET)
    look = partial(
        found,
        pods=(stranger,),
        holdings=(held(stranger, *IDS),),
        failed={stranger.uid: NOON - MINUTE},
        idle={kept.key: NOON - MINUTE},
    )
    ends = phase in {Phase.SUCCEEDED, Phase.FAILED}

    assert len(look().strangers) == (not ends)
    assert len(look(kept).over) == ends


def test_a_pod_that_has_ended_takes_nothing_from_the_next_one_of_its_name():
    old, new = a_row(confirmed=True), a_row(pod_uid=a_pod_uid(2), epoch=OLD_KUBELET)
    ended = msgspec.structs.replace(POD, phase=Phase.SUCCEEDED)
    there = msgspec.structs.replace(POD, uid=new.key.pod_uid)

    findings = found(old, new, pods=(ended, there), holdings=(held(there, *IDS),))

    assert (old,) == findings.over


@pytest.mark.parametrize(("seconds", "vanished"), [(59, 0), (60, 1)])
def test_the_row_of_a_deleted_pod_outlives_it_by_a_minute(seconds, vanished):
    row = a_row(answered_at=NOON - 9 * MINUTE)
    now = NOON + dt.timedelta(seconds=seconds)

    assert vanished == len(found(row, pods=(), gone=(POD,), now=now).over)


def test_a_pod_that_was_deleted_while_nobody_looked_may_have_been_just_before():
    row = a_row(answered_at=NOON - 9 * MINUTE)

    assert () == found(row, pods=(), since=NOON, now=NOON + MINUTE / 2).over
    assert (row,) == found(row, pods=(), since=NOON, now=NOON + MINUTE).over


def test_a_kubelet_that_just_started_does_not_say_that_a_pod_is_gone():
    row, later = a_row(answered_at=NOON - 9 * MINUTE), NOON + 9 * MINUTE
    born = later - dt.timedelta(seconds=29)
    young = KubeletEpoch(7, int(born.timestamp() * 1e9))

    assert () == found(row, pods=(), gone=(POD,), now=later, epoch=young).over
    assert (row,) == found(
        row, pods=(), gone=(POD,), now=later + dt.timedelta(seconds=1), epoch=young
    ).over


def test_a_pod_deleted_before_we_looked_is_gone_since_its_answer():
    other = msgspec.structs.replace(POD, uid=a_pod_uid(9), name="other")

    assert () == found(a_row(), pods=(), gone=(other,)).over
    assert 1 == len(found(a_row(), pods=(), gone=(other,), now=NOON + MINUTE).over)


def test_a_deleted_pod_that_the_kubelet_still_has_keeps_its_row():
    row = a_row()
    later = NOON + 9 * MINUTE

    assert () == found(row, pods=(), holdings=(held(POD, *IDS),), now=later).over


def test_a_successor_of_the_same_name_does_not_keep_the_row():
    successor = msgspec.structs.replace(POD, uid=a_pod_uid(9))
    later = NOON + MINUTE

    findings = found(
        a_row(), pods=(successor,), gone=(POD,), holdings=(held(POD, *IDS),), now=later
    )

    assert (a_row(),) == findings.over


@pytest.mark.parametrize(
    "changes",
    [
        {"complete": False},
        {"table": PodTable()},
        {"table": PodTable(synced=True, stale=True)},
    ],
    ids=["a partial look", "pods are not listed yet", "the watch is down"],
)
def test_nothing_vanishes_on_half_a_view(changes):
    assert () == found(a_row(), now=NOON + 9 * MINUTE, **changes).over


def test_a_holder_that_the_ledger_does_not_know_is_taken_over():
    (adoption,) = found(holdings=(held(POD, *OTHER_IDS, *IDS),)).adopt

    assert (POD, POD.containers[0]) == (adoption.pod, adoption.container)
    assert IDS + OTHER_IDS == adoption.ids


@pytest.mark.parametrize(
    "pod",
    [
        msgspec.structs.replace(POD, phase=Phase.FAILED),
        msgspec.structs.replace(POD, groups=None),
        msgspec.structs.replace(POD, containers=(a_container(count=0),)),
        msgspec.structs.replace(POD, name="another"),
    ],
    ids=["terminal", "not placed", "asks for none", "unknown"],
)
def test_who_holds_without_a_right_to_a_row_is_not_taken_over(pod):
    assert () == found(pods=(pod,), holdings=(held(POD, *IDS),)).adopt


def test_a_holder_with_a_row_or_without_ids_is_not_taken_over():
    assert () == found(a_row(), holdings=(held(POD, *IDS),)).adopt
    assert () == found(holdings=(held(POD),)).adopt


def test_the_ids_of_a_deleted_pod_are_not_taken_for_its_successors():
    successor = msgspec.structs.replace(POD, uid=a_pod_uid(9), phase=Phase.PENDING)
    running = msgspec.structs.replace(successor, phase=Phase.RUNNING)

    assert () == found(pods=(successor,), gone=(POD,), holdings=(held(POD, *IDS),)).adopt
    assert 1 == len(found(pods=(running,), gone=(POD,), holdings=(held(POD, *IDS),)).adopt)
    assert 1 == len(found(pods=(successor,), holdings=(held(POD, *IDS),)).adopt)


def test_the_ids_of_a_pod_that_went_while_nobody_looked_are_not_taken_for_its_successors():
    successor = msgspec.structs.replace(POD, uid=a_pod_uid(9), phase=Phase.PENDING)
    running = msgspec.structs.replace(successor, phase=Phase.RUNNING)
    orphan = a_row(answered_at=NOON - 9 * MINUTE)
    other = a_row(pod="another", answered_at=NOON - 9 * MINUTE)

    findings = found(orphan, pods=(successor,), holdings=(held(POD, *IDS),))

    assert ((orphan,), ()) == (findings.over, findings.adopt)
    assert 1 == len(found(orphan, pods=(running,), holdings=(held(POD, *IDS),)).adopt)
    assert 1 == len(found(other, pods=(successor,), holdings=(held(POD, *IDS),)).adopt)


def test_ids_that_the_kubelets_file_has_under_another_uid_are_no_holders_whose_name_can_return():
    pod = msgspec.structs.replace(POD, phase=Phase.PENDING, reusable_name=True)
    another = {ContainerKey(a_pod_uid(9), "main"): frozenset(IDS)}
    holdings = (held(POD, *IDS),)

    assert () == found(pods=(pod,), holdings=holdings, recorded=another).adopt
    own = {ContainerKey(pod.uid, "main"): frozenset(IDS)}
    assert 1 == len(found(pods=(pod,), holdings=holdings, recorded=own).adopt)
    running = msgspec.structs.replace(pod, phase=Phase.RUNNING)
    generated = msgspec.structs.replace(pod, reusable_name=False)
    for one in (running, generated):
        assert 1 == len(found(pods=(one,), holdings=holdings, recorded=another).adopt)
    assert 1 == len(found(pods=(pod,), holdings=holdings, recorded=None).adopt)


def test_a_short_look_after_an_answer_takes_nobody_over():
    assert () == found(holdings=(held(POD, *IDS),), complete=False).adopt
