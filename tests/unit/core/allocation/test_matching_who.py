"""Which pod an Allocate is for: the kubelet is the witness, the lock is the right."""

import datetime as dt

import msgspec
import pytest

from agent.allocate.match import (
    UNREAD,
    AskKubelet,
    AwaitLock,
    AwaitOthers,
    CheckRunning,
    Evidence,
    KubeletStart,
    ListPods,
    LookAtNode,
    LookAtPod,
    ReadRecords,
    rejected_pod,
)
from agent.cluster import NOT_HERE, Phase, PodTable, PodView, Role
from agent.errors import Refusal, RefusalReason
from agent.ledger import ContainerKey, Ledger, Row
from tests.builders import NOON, a_container, a_lock, a_pod, a_row, a_share
from tests.unit.core.allocation.matching_scene import (
    G1,
    G2,
    NOW_KUBELET,
    OLD_KUBELET,
    RAN,
    SETTINGS,
    UNIQUE,
    a_scene,
    annotated,
    ask,
    changed,
    dead_pod,
    granted,
    holding,
    knowing,
    named_pod,
    refused_by,
    row_of,
    without_witness,
)

POD = named_pod(1)
STRAY = named_pod(2, annotations={})


def test_the_lock_owner_is_asked_for_first() -> None:
    older = named_pod(3, created=NOON.replace(hour=1))

    assert ask(a_scene(older, POD, lock=POD)) == AskKubelet(POD.key)


def test_all_who_may_be_meant_are_asked_about_whoever_has_the_lock() -> None:
    other = named_pod(3)
    scene = knowing(a_scene(other, POD, lock=POD), holding(POD))

    assert ask(scene) == AskKubelet(other.key)
    assert granted(knowing(scene, absent=(other,))).candidate.pod == POD


def test_a_pod_that_was_started_without_being_asked_for_is_asked_about_beside_the_owner() -> None:
    started = dead_pod(3, annotations={})
    scene = knowing(a_scene(started, POD, lock=POD), holding(POD))

    assert ask(scene) == AskKubelet(started.key)
    both = knowing(scene, holding(POD), holding(started))
    assert ask(both) == ListPods()
    assert granted(changed(both, listed=True, alone=True)).candidate.pod == POD
    unlocked = changed(both, listed=True, lock=None)
    assert ask(unlocked) == AwaitLock(POD.key)
    assert ask(changed(unlocked, waited=True)) == LookAtNode()
    refused_by(changed(unlocked, waited=True, node_read=True), RefusalReason.MANY_PODS_ADMITTED)


def test_a_new_pod_that_may_have_been_admitted_without_asking_is_not_the_one() -> None:
    started = dead_pod(3, annotations={})
    scene = knowing(a_scene(started, POD, lock=POD), holding(POD), holding(started))
    scene = changed(scene, listed=True, alone=True)

    def asked_since(moment: dt.datetime) -> Evidence:
        return changed(scene, kubelet=KubeletStart(NOW_KUBELET, asks_since=moment))

    assert granted(asked_since(POD.created)).candidate.pod == POD
    late = asked_since(POD.created + dt.timedelta(seconds=1))
    refused_by(late, RefusalReason.MANY_PODS_ADMITTED)
    newer = named_pod(4, created=POD.created + dt.timedelta(seconds=1))
    beside = knowing(a_scene(started, POD, newer, lock=newer), holding(POD), holding(started))
    beside = changed(knowing(beside, holding(newer)), listed=True, alone=True, kubelet=late.kubelet)
    assert granted(beside).candidate.pod == newer


def test_beside_dead_containers_a_deleted_pod_costs_only_pods_of_other_names_their_start() -> None:
    dead = dead_pod(10)
    row = row_of(dead, shares=(a_share(uuid=G2),))

    def beside(gone: PodView) -> Evidence:
        scene = a_scene(POD, dead, rows=(row,), lock=POD, gone=(gone,))
        scene = changed(scene, records_read=True, listed=True, alone=True)
        return knowing(scene, holding(POD), holding(dead), holding(gone))

    namesake = named_pod(1, uid=named_pod(5).uid)
    assert granted(beside(namesake)).candidate.pod == POD
    refused_by(beside(named_pod(5)), RefusalReason.MANY_PODS_ADMITTED)


@pytest.mark.parametrize("is_answered", [True, False])
def test_beside_dead_containers_a_pod_is_not_told_from_a_deleted_one_of_its_name_that_runs(
    is_answered: bool,  # noqa: FBT001 -- a parameter of the test
) -> None:
    ran = msgspec.structs.replace(a_container(), has_run=True)
    dead = named_pod(10, phase=Phase.RUNNING, containers=(ran,))
    gone = named_pod(1, uid=named_pod(5).uid, containers=(a_container(running_id="r"),))
    # A dead one without a row was started unasked, or its answer was cut off.
    answered = (dead, gone) if is_answered else (gone,)
    rows = tuple(a_row(pod_uid=one.uid, pod=one.name, epoch=OLD_KUBELET) for one in answered)
    scene = a_scene(POD, dead, rows=rows, lock=POD, gone=(gone,))
    scene = changed(scene, records_read=True, listed=True, alone=True)
    scene = knowing(scene, holding(POD), holding(dead))

    assert ask(scene) == CheckRunning(frozenset({"r"}))
    ended = changed(scene, checked=frozenset({"r"}))
    assert granted(ended).candidate.pod == POD
    refused_by(changed(ended, alive={"r"}), RefusalReason.MANY_PODS_ADMITTED)
    # It makes no other new pod the only one that can be meant.
    other = named_pod(4)
    beside = a_scene(POD, other, dead, rows=rows, lock=other, gone=(gone,))
    beside = changed(beside, records_read=True, listed=True, alone=True)
    beside = knowing(beside, *map(holding, (POD, other, dead)))
    beside = changed(beside, alive={"r"})
    refused_by(beside, RefusalReason.MANY_PODS_ADMITTED)


def test_a_pod_that_alone_can_be_meant_asks_for_nothing_about_a_deleted_one_of_its_name() -> None:
    gone = named_pod(1, uid=named_pod(5).uid, containers=(a_container(running_id="r"),))
    rows = (a_row(pod_uid=gone.uid, pod=gone.name, epoch=NOW_KUBELET),)
    scene = a_scene(POD, rows=rows, lock=POD, gone=(gone,))

    assert ask(scene) == AskKubelet(POD.key)
    assert granted(knowing(scene, holding(POD))).candidate.pod == POD


def test_several_that_may_be_meant_while_the_pods_cannot_be_listed_may_be_others() -> None:
    dead = tuple(dead_pod(number) for number in (3, 4))
    rows = tuple(a_row(pod_uid=pod.uid, pod=pod.name, epoch=OLD_KUBELET) for pod in dead)
    scene = knowing(a_scene(*dead, rows=rows), *map(holding, dead))

    read = changed(scene, records_read=True, listed=True)
    assert "delete all but one" in refused_by(read, RefusalReason.MANY_PODS_ADMITTED).sentence
    assert refused_by(changed(read, list_failed=True), RefusalReason.PODS_UNKNOWN).transient


def test_an_owner_that_was_started_without_being_asked_for_does_not_hide_a_newcomer() -> None:
    started = msgspec.structs.replace(POD, phase=Phase.RUNNING, containers=(RAN,))
    unseen = knowing(a_scene(started, lock=started), holding(started))
    assert ask(unseen) == ListPods()
    assert granted(changed(unseen, listed=True)).candidate.pod == started

    shown = knowing(a_scene(STRAY, started, lock=started), holding(started))
    shown = changed(shown, listed=True)

    assert ask(shown) == AskKubelet(STRAY.key)
    both = changed(knowing(shown, holding(STRAY)), waited=True, node_read=True)
    refused_by(both, RefusalReason.MANY_PODS_ADMITTED)


def test_a_stray_pod_is_refused_and_not_given_the_owners_share() -> None:
    scene = knowing(a_scene(STRAY, POD, lock=POD), holding(STRAY), absent=(POD,))
    assert ask(scene) == AwaitLock(STRAY.key)
    assert ask(changed(scene, waited=True)) == LookAtNode()

    error = refused_by(changed(scene, waited=True, node_read=True), RefusalReason.NO_RIGHT)

    assert "team-a/train-1" in error.sentence


@pytest.mark.parametrize("dead", [1, 2, 9])
def test_dead_containers_that_nothing_tells_apart_do_not_cost_a_new_pod_its_start(dead) -> None:
    others = [dead_pod(10 + n) for n in range(dead)]
    rows = tuple(row_of(one, shares=(a_share(uuid=G2),)) for one in others)
    scene = changed(a_scene(POD, *others, rows=rows, lock=POD), records_read=True, listed=True)
    asked = knowing(scene, holding(POD), *map(holding, others))
    assert ask(asked) == AwaitOthers()
    assert granted(changed(asked, alone=True)).candidate.pod == POD
    assert granted(changed(asked, known_before={POD.key: True})).candidate.pod == POD
    for names in (None, frozenset({POD.key, others[0].key})):  # that call may be the new pod's
        beside = changed(asked, beside=(frozenset(), names), alone=True)
        refused_by(beside, RefusalReason.MANY_PODS_ADMITTED)
    clear = changed(asked, beside=(frozenset({others[0].key}),), alone=True)
    assert granted(clear).candidate.pod == POD

    before = changed(knowing(scene, absent=(POD,)), known_before={POD.key: False})
    theirs = knowing(before, holding(POD), *map(holding, others))  # it came between the two calls
    if dead == 1:
        assert granted(theirs).candidate.row == rows[0]
    else:
        refused_by(theirs, RefusalReason.MANY_PODS_ADMITTED)


def test_a_row_that_was_booked_for_a_namesakes_ids_is_asked_for_all_the_same() -> None:
    row = row_of(POD, epoch=NOW_KUBELET, confirmed=True)
    scene = a_scene(POD, rows=(row,), lock=POD)
    assert ask(scene) == ReadRecords()

    read = changed(scene, records_read=True, recorded=frozenset())

    assert ask(read) == AskKubelet(POD.key)
    assert granted(knowing(read, holding(POD))).candidate.row == row


def test_nobody_known_asks_the_api_server_once_and_then_refuses() -> None:
    scene = knowing(a_scene(POD, lock=POD), absent=(POD,))
    assert ask(scene) == LookAtNode()
    assert ask(changed(scene, node_read=True)) == ListPods()

    refused_by(changed(scene, listed=True), RefusalReason.NO_POD_ADMITTED)


@pytest.mark.parametrize("lock", [None, POD])
def test_the_lock_is_read_before_pods_are_listed_unless_its_owner_may_be_asking(lock) -> None:
    other = named_pod(2)
    scene = knowing(a_scene(other, lock=lock), absent=(other,))

    assert ask(scene) == (LookAtNode() if lock is None else ListPods())
    assert ask(changed(scene, node_read=True, node_unread=True)) == ListPods()


def test_the_lock_is_sought_before_a_pod_is_read_whose_name_can_return() -> None:
    pod = named_pod(1, reusable_name=True)
    scene = knowing(a_scene(pod), holding(pod))
    assert ask(scene) == AwaitLock(pod.key)
    waited = changed(scene, waited=True)
    assert ask(waited) == LookAtNode()

    assert ask(changed(waited, node_read=True)) == LookAtPod(pod.key)
    assert ask(knowing(a_scene(pod, lock=pod), holding(pod))) == LookAtPod(pod.key)


def test_a_node_that_could_not_be_read_blames_no_scheduler() -> None:
    for lock in (None, named_pod(2)):
        scene = knowing(a_scene(POD, lock=lock), holding(POD))
        unread = changed(scene, waited=True, node_read=True, node_unread=True)

        refused_by(unread, RefusalReason.PODS_UNKNOWN)


@pytest.mark.parametrize("gone", [(POD,), (POD, named_pod(3))])
def test_deleted_pods_that_the_kubelet_still_admits_are_refused_after_a_list(gone) -> None:
    scene = knowing(a_scene(gone=gone, lock=POD), *map(holding, gone))
    assert ask(scene) == ListPods()

    refused_by(changed(scene, listed=True), RefusalReason.POD_DELETED)


@pytest.mark.parametrize("seconds", [61, -1], ids=["long ago", "before the clock was set back"])
def test_a_pod_that_was_deleted_long_ago_is_asked_for_no_more(seconds) -> None:
    scene = a_scene(gone=(POD,), lock=POD)
    late = changed(scene, now=NOON + dt.timedelta(seconds=seconds), listed=True)

    refused_by(late, RefusalReason.NO_POD_ADMITTED)


@pytest.mark.parametrize("text", [f"{G1},NVIDIA,3000,30:;", f"{G2},NVIDIA,1,1:;"])
def test_a_present_pod_wins_over_a_tombstone_of_its_name_whatever_their_shares(text) -> None:
    successor = named_pod(1, uid=named_pod(9).uid, annotations=annotated(text))
    scene = knowing(a_scene(successor, gone=(POD,), lock=successor), holding(POD))

    assert granted(scene).candidate.pod == successor


def test_a_refused_request_uses_up_the_oldest_deleted_pod_of_its_name() -> None:
    younger, present = (named_pod(1, uid=named_pod(n).uid, groups=((),)) for n in (8, 9))
    scene = knowing(a_scene(present, gone=(POD, younger), lock=present), holding(POD))

    assert POD.uid == rejected_pod(scene)
    assert younger.uid == rejected_pod(changed(scene, claimed=frozenset({POD.uid})))
    both = frozenset({POD.uid, younger.uid})
    assert present.uid == rejected_pod(changed(scene, claimed=both))


def test_a_refused_request_that_a_deleted_pod_may_have_sent_uses_up_no_successor() -> None:
    former = named_pod(1, uid=named_pod(8).uid)
    row = row_of(former)
    scene = knowing(a_scene(POD, gone=(former,), rows=(row,), lock=POD), holding(POD))

    assert None is rejected_pod(scene)
    late = changed(scene, now=scene.now + dt.timedelta(seconds=61))
    assert POD.uid == rejected_pod(late)
    other = named_pod(3)
    beside = a_scene(POD, gone=(other,), rows=(row_of(other),), lock=POD)
    assert POD.uid == rejected_pod(knowing(beside, holding(POD)))


def test_a_refused_request_that_may_have_been_anothers_uses_up_nobody() -> None:
    other = named_pod(3)
    scene = a_scene(other, gone=(POD,), lock=other)

    assert None is rejected_pod(knowing(scene, holding(POD), holding(other)))
    assert None is rejected_pod(knowing(scene, absent=(POD, other)))
    assert None is rejected_pod(knowing(scene, holding(other)))  # POD: no answer


def test_a_row_of_an_init_container_sends_to_the_file_before_the_api_server_is_asked() -> None:
    row = a_row(pod_uid=POD.uid, pod=POD.name, role=Role.INIT, epoch=NOW_KUBELET)
    scene = a_scene(rows=(row,))

    assert ask(scene) == ReadRecords()
    assert ask(changed(scene, records_read=True, node_read=True)) == ListPods()


ROW = row_of(POD)


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
    assert UNKNOWN == gate(without_witness(blind()))
    assert (RefusalReason.NO_POD_ADMITTED, False) == gate(changed(a_scene(), listed=True))


def test_a_pod_that_only_the_ledger_knows_is_no_pod_until_the_pods_were_listed():
    scene = knowing(blind(ROW), holding(POD))
    read = {"records_read": True, "node_read": True}
    unlisted = changed(scene, listed=False, **read)

    assert ListPods() == ask(unlisted)
    assert UNKNOWN == gate(scene)
    known = changed(unlisted, table=a_scene(POD).table, listed=True)
    assert ROW == granted(known).candidate.row


def test_an_old_kubelet_serves_only_a_lock_owner_without_company_after_a_list() -> None:
    alone = without_witness(a_scene(POD, lock=POD))
    unlocked = changed(alone, lock=None, listed=True)
    row = row_of(POD)
    again = without_witness(a_scene(POD, rows=(row,), lock=POD))
    assert ask(alone) == ListPods()
    for scene in (alone, again):
        refused_by(changed(scene, list_failed=True), RefusalReason.PODS_UNKNOWN)
    assert granted(changed(alone, listed=True)).candidate.pod == POD
    assert granted(changed(again, listed=True)).candidate.row == row
    # A first answer waits for the lock.
    assert ask(unlocked) == AwaitLock(POD.key)
    assert ask(changed(unlocked, waited=True)) == LookAtNode()
    read = changed(unlocked, waited=True, node_read=True)
    refused_by(read, RefusalReason.NO_LOCK)
    refused_by(changed(read, lock=a_lock(name="other")), RefusalReason.NO_RIGHT)

    for settings in (SETTINGS, UNIQUE):
        beside = changed(without_witness(a_scene(POD, named_pod(3), lock=POD)), listed=True)
        sentence = refused_by(beside, RefusalReason.WITNESS_SILENT, settings=settings).sentence
        assert sentence.endswith("upgrade the kubelet to 1.34.")


def test_an_old_kubelet_asks_for_a_deleted_pod_for_ten_seconds_or_until_a_refusal() -> None:
    other = named_pod(3)
    asked = changed(without_witness(a_scene(POD, gone=(other,), lock=POD)), listed=True)

    refused_by(asked, RefusalReason.WITNESS_SILENT)
    assert other.uid == rejected_pod(asked)
    later = changed(asked, claimed=frozenset({other.uid}))
    assert granted(later).candidate.pod == POD
    assert None is rejected_pod(later)
    late = changed(asked, now=asked.now + dt.timedelta(seconds=11))
    assert granted(late).candidate.pod == POD


def test_an_old_kubelets_file_is_read_before_its_pod_is_served() -> None:
    row = a_row(pod_uid=POD.uid, pod=POD.name, container="c1", epoch=NOW_KUBELET)
    pod = named_pod(
        1,
        containers=(a_container(name="c1"), a_container(name="c2")),
        groups=POD.groups * 2 if POD.groups else None,
    )
    scene = a_scene(pod, rows=(row,), lock=pod)
    assert ask(without_witness(scene, read=False)) == ReadRecords()

    read = without_witness(scene, recorded=frozenset({row.key}))
    served = granted(changed(read, listed=True))

    assert served.candidate.container.name == "c2"


# The lock is the right, whatever the times say, and a name is looked at before it is served.

RETURNING = named_pod(1, reusable_name=True)


@pytest.mark.parametrize("bound", ["", "soon", "-1", "0", "99999999999999999999", "1788264000"])
@pytest.mark.parametrize("days", [-9000, 0, 9000])
def test_neither_bind_time_nor_the_locks_stamp_decides_a_right(bound, days) -> None:
    forged = {**POD.annotations, "hami.io/bind-time": bound}
    pod = msgspec.structs.replace(POD, annotations=forged)
    scene = knowing(a_scene(pod, lock=pod), holding(pod))
    assert scene.lock is not None
    lock = msgspec.structs.replace(scene.lock, stamp=NOON + dt.timedelta(days=days))

    assert granted(changed(scene, lock=lock)).candidate.pod == pod


def test_the_grant_names_the_text_of_the_lock_that_proves_the_right() -> None:
    scene = knowing(a_scene(POD, lock=POD), holding(POD))
    assert scene.lock is not None

    assert scene.lock.value == granted(scene).lock
    unseen = changed(scene, lock=None)
    assert ask(unseen, settings=UNIQUE) == AwaitLock(POD.key)
    assert ask(changed(unseen, waited=True), settings=UNIQUE) == LookAtNode()
    assert "" == granted(changed(unseen, waited=True, node_read=True), settings=UNIQUE).lock


def test_a_lock_that_just_went_proves_the_right_until_another_pod_was_answered_under_it() -> None:
    scene = knowing(a_scene(POD, STRAY, lock=POD), holding(POD), absent=(STRAY,))
    went = changed(scene, lock=None, former_locks=(scene.lock,))
    taken = changed(
        scene, lock=a_lock(name="next"), former_locks=(a_lock(name="other"), scene.lock)
    )
    assert scene.lock is not None

    for one in (went, taken):
        assert scene.lock.value == granted(one).lock
    spent = a_row(pod_uid=named_pod(9).uid, pod=POD.name, lock=scene.lock.value)
    assert ask(changed(went, ledger=Ledger((spent,)))) == AwaitLock(POD.key)
    ended = {scene.lock.value: named_pod(9).uid}  # its row is closed already
    assert ask(changed(went, used_locks=ended)) == AwaitLock(POD.key)
    for after in (changed(went, ledger=Ledger((spent,))), changed(went, used_locks=ended)):
        assert scene.lock.value == granted(changed(after, orphaned_locks=ended)).lock
        others = {scene.lock.value: named_pod(8).uid}
        assert ask(changed(after, orphaned_locks=others)) == AwaitLock(POD.key)
    stray = knowing(changed(went, known={}), holding(STRAY), absent=(POD,))
    assert ask(stray) == AwaitLock(STRAY.key)


@pytest.mark.parametrize("role", [Role.APP, Role.INIT])
def test_no_lock_is_worth_anything_to_a_pod_that_was_created_with_its_node(role) -> None:
    containers = (a_container(role=role), a_container(name="app", count=0))
    owner = named_pod(1, containers=containers)
    scene = knowing(a_scene(owner, lock=owner), holding(owner))
    scene = changed(scene, recorded=frozenset(), records_read=True)
    assert scene.lock is not None
    assert scene.lock.value == granted(scene).lock

    stray = msgspec.structs.replace(owner, scheduled=False)
    taken = changed(scene, table=a_scene(stray).table)
    for lock, former in ((scene.lock, ()), (None, (scene.lock,)), (None, ())):
        one = changed(taken, lock=lock, former_locks=former)
        refusal = refused_by(one, RefusalReason.NO_LOCK)  # at once: it waits for no lock
        assert "without nodeName" in refusal.sentence
        assert "" == granted(one, settings=UNIQUE).lock


def test_a_lock_that_another_pod_was_answered_under_is_looked_at_before_it_counts() -> None:
    scene = knowing(a_scene(POD, lock=POD), holding(POD))
    assert scene.lock is not None
    spent = a_row(pod_uid=named_pod(9).uid, pod=POD.name, lock=scene.lock.value)
    shown = changed(scene, ledger=Ledger((spent,)))

    assert ask(shown) == AwaitLock(POD.key)
    assert ask(changed(shown, waited=True)) == LookAtNode()
    assert scene.lock.value == granted(changed(shown, waited=True, node_read=True)).lock
    newer = a_lock(name=POD.name, stamp=NOON + dt.timedelta(seconds=1))
    assert newer.value == granted(changed(shown, lock=newer)).lock


def test_where_the_api_server_is_silent_no_record_of_the_kubelet_names_the_pod() -> None:
    scene = knowing(a_scene(RETURNING, lock=RETURNING), holding(RETURNING))
    scene = changed(scene, pod_uids={RETURNING.key: UNREAD}, listed=True, list_failed=True)
    known = frozenset({ContainerKey(RETURNING.uid, "other")})
    read = changed(scene, recorded=known, records_read=True)

    refused_by(read, RefusalReason.PODS_UNKNOWN)


@pytest.mark.parametrize("found", [NOT_HERE, named_pod(9).uid], ids=["gone", "another"])
def test_where_another_pod_has_the_name_all_are_listed_and_it_begins_again(found) -> None:
    scene = knowing(a_scene(RETURNING, lock=RETURNING), holding(RETURNING))
    scene = changed(scene, pod_uids={RETURNING.key: found})
    assert ask(scene) == ListPods()

    successor = msgspec.structs.replace(RETURNING, uid=named_pod(9).uid)
    shown = a_scene(successor, gone=(RETURNING,), lock=RETURNING)
    listed = changed(scene, table=shown.table, listed=True)
    assert granted(listed).candidate.pod == successor


def test_where_another_pod_has_the_name_and_the_pods_cannot_be_listed_nobody_is_served() -> None:
    scene = knowing(a_scene(RETURNING, lock=RETURNING), holding(RETURNING))
    known = changed(scene, pod_uids={RETURNING.key: named_pod(9).uid}, listed=True)

    assert granted(known).candidate.pod == RETURNING  # a LIST is newer than the GET
    refusal = refused_by(changed(known, list_failed=True), RefusalReason.PODS_UNKNOWN)
    assert refusal.transient


def test_behind_the_first_answer_of_its_admission_a_pod_is_not_looked_at_again() -> None:
    both = (a_container(name="a"), a_container(name="b"))
    text = f"{G1},NVIDIA,1000,10:;{G1},NVIDIA,2000,10:;"
    pod = a_pod(name="train-1", containers=both, annotations=annotated(text), reusable_name=True)
    row = a_row(pod_uid=pod.uid, pod=pod.name, container="a", epoch=NOW_KUBELET)
    scene = knowing(a_scene(pod, rows=(row,), lock=pod), holding(pod, a=f"{G1}-0"))
    scene = changed(scene, records_read=True)

    assert "b" == granted(scene).candidate.container.name
    again = changed(scene, ledger=Ledger((msgspec.structs.replace(row, epoch=OLD_KUBELET),)))
    assert ask(again) == ListPods()
    namesake = knowing(scene, holding(pod))  # the kubelet has no ids for what was answered
    assert ask(changed(namesake, recorded=frozenset({row.key}))) == LookAtPod(pod.key)


def test_behind_an_init_container_a_pod_whose_name_can_return_is_looked_at_again() -> None:
    """PodResources lists none, so it cannot tell the pod from one that took its name since."""
    both = (a_container(name="init", role=Role.INIT), a_container())
    text = f"{G1},NVIDIA,1000,10:;{G1},NVIDIA,2000,10:;"
    pod = a_pod(name="train-1", containers=both, annotations=annotated(text), reusable_name=True)
    row = a_row(pod_uid=pod.uid, pod=pod.name, container="init", epoch=NOW_KUBELET, role=Role.INIT)
    scene = knowing(a_scene(pod, rows=(row,), lock=pod), holding(pod))
    scene = changed(scene, recorded=frozenset({row.key}), records_read=True)

    assert ask(scene) == LookAtPod(pod.key)
    same = changed(scene, pod_uids={pod.key: pod.uid})
    assert "main" == granted(same).candidate.container.name


def test_a_replay_of_a_pod_whose_name_can_return_is_looked_at_too() -> None:
    row = a_row(pod_uid=RETURNING.uid, pod=RETURNING.name, epoch=OLD_KUBELET)
    scene = knowing(a_scene(RETURNING, rows=(row,)), holding(RETURNING))
    assert ask(scene) == ListPods()

    admitted = KubeletStart(NOW_KUBELET, begun=frozenset())
    assert ask(changed(scene, kubelet=admitted)) == LookAtPod(RETURNING.key)
