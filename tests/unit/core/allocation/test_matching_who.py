"""Which pod an Allocate is for: the kubelet is the witness, the lock is the right."""

import datetime as dt

import msgspec
import pytest

from agent.allocate.candidates import (
    AskKubelet,
    AwaitLock,
    AwaitOthers,
    CheckRunning,
    Evidence,
    KubeletStart,
    KubeletView,
    ListPods,
    LookAtNode,
    LookAtPod,
    ReadRecords,
)
from agent.allocate.match import rejected_pod
from agent.cluster import Phase, PodTable, PodView, Role
from agent.errors import Refusal, RefusalReason
from agent.ledger import Row
from tests.builders import NOON, a_container, a_lock, a_row, a_share
from tests.unit.core.allocation.matching_scene import (
    G1,
    G2,
    NOW_KUBELET,
    OLD_KUBELET,
    SETTINGS,
    UNIQUE,
    a_scene,
    annotated,
    ask,
    changed,
    granted,
    holding,
    knowing,
    named_pod,
    refused_by,
    without_witness,
)

POD = named_pod(1)
STRAY = named_pod(2, annotations={})


def test_the_lock_owner_is_asked_for_first() -> None:
    older = named_pod(3, created=NOON.replace(hour=1))

    assert ask(a_scene(older, POD, lock=POD)) == AskKubelet(*POD.key)


def test_all_who_may_be_meant_are_asked_about_whoever_has_the_lock() -> None:
    other = named_pod(3)
    scene = knowing(a_scene(other, POD, lock=POD), holding(POD))

    assert ask(scene) == AskKubelet(*other.key)
    assert granted(knowing(scene, absent=(other,))).candidate.pod == POD


def test_a_pod_that_was_started_without_being_asked_for_is_asked_about_beside_the_owner() -> None:
    ran = msgspec.structs.replace(a_container(), has_run=True)
    started = named_pod(3, annotations={}, phase=Phase.RUNNING, containers=(ran,))
    scene = knowing(a_scene(started, POD, lock=POD), holding(POD))

    assert ask(scene) == AskKubelet(*started.key)
    both = knowing(scene, holding(POD), holding(started))
    assert ask(both) == ListPods()
    assert granted(changed(both, listed=True, alone=True)).candidate.pod == POD
    unlocked = changed(both, listed=True, lock=None)
    assert ask(unlocked) == AwaitLock(*POD.key)
    assert ask(changed(unlocked, waited=True)) == LookAtNode()
    refused_by(changed(unlocked, waited=True, node_read=True), RefusalReason.MANY_PODS_ADMITTED)


def test_a_new_pod_that_may_have_been_admitted_without_asking_is_not_the_one_that_is_meant() -> (
    None
):
    ran = msgspec.structs.replace(a_container(), has_run=True)
    started = named_pod(3, annotations={}, phase=Phase.RUNNING, containers=(ran,))
    scene = knowing(a_scene(started, POD, lock=POD), holding(POD), holding(started))
    scene = changed(scene, listed=True, alone=True)

    def asked_since(moment: dt.datetime) -> Evidence:
        return changed(
            scene, kubelet=KubeletView(NOW_KUBELET, start=KubeletStart(asks_since=moment))
        )

    assert granted(asked_since(POD.created)).candidate.pod == POD
    late = asked_since(POD.created + dt.timedelta(seconds=1))
    refused_by(late, RefusalReason.MANY_PODS_ADMITTED)
    newer = named_pod(4, created=POD.created + dt.timedelta(seconds=1))
    beside = knowing(a_scene(started, POD, newer, lock=newer), holding(POD), holding(started))
    beside = changed(knowing(beside, holding(newer)), listed=True, alone=True, kubelet=late.kubelet)
    assert granted(beside).candidate.pod == newer


def test_beside_dead_containers_a_deleted_pod_costs_only_pods_of_other_names_their_start() -> None:
    ran = msgspec.structs.replace(a_container(), has_run=True)
    dead = named_pod(10, phase=Phase.RUNNING, containers=(ran,))
    row = a_row(pod_uid=dead.uid, pod=dead.name, epoch=OLD_KUBELET, shares=(a_share(uuid=G2),))

    def beside(gone: PodView) -> Evidence:
        scene = a_scene(POD, dead, rows=(row,), lock=POD, gone=(gone,))
        scene = changed(scene, records_read=True, listed=True, alone=True)
        return knowing(scene, holding(POD), holding(dead), holding(gone))

    namesake = named_pod(1, uid=named_pod(5).uid)
    assert granted(beside(namesake)).candidate.pod == POD
    refused_by(beside(named_pod(5)), RefusalReason.MANY_PODS_ADMITTED)


def test_several_that_may_be_meant_while_the_pods_cannot_be_listed_may_be_others() -> None:
    ran = msgspec.structs.replace(a_container(), has_run=True)
    dead = tuple(named_pod(number, phase=Phase.RUNNING, containers=(ran,)) for number in (3, 4))
    rows = tuple(a_row(pod_uid=pod.uid, pod=pod.name, epoch=OLD_KUBELET) for pod in dead)
    scene = knowing(a_scene(*dead, rows=rows), *map(holding, dead))

    read = changed(scene, records_read=True, listed=True)
    assert "delete all but one" in refused_by(read, RefusalReason.MANY_PODS_ADMITTED).sentence
    assert refused_by(changed(read, list_failed=True), RefusalReason.PODS_UNKNOWN).transient


def test_an_owner_that_was_started_without_being_asked_for_does_not_hide_a_newcomer() -> None:
    ran = msgspec.structs.replace(a_container(), has_run=True)
    started = msgspec.structs.replace(POD, phase=Phase.RUNNING, containers=(ran,))
    unseen = knowing(a_scene(started, lock=started), holding(started))
    assert ask(unseen) == ListPods()
    assert granted(changed(unseen, listed=True)).candidate.pod == started

    shown = knowing(a_scene(STRAY, started, lock=started), holding(started))
    shown = changed(shown, listed=True)

    assert ask(shown) == AskKubelet(*STRAY.key)
    both = changed(knowing(shown, holding(STRAY)), waited=True, node_read=True)
    refused_by(both, RefusalReason.MANY_PODS_ADMITTED)


def test_a_stray_pod_is_refused_and_not_given_the_owners_share() -> None:
    scene = knowing(a_scene(STRAY, POD, lock=POD), holding(STRAY), absent=(POD,))
    assert ask(scene) == AwaitLock(*STRAY.key)
    assert ask(changed(scene, waited=True)) == LookAtNode()

    error = refused_by(changed(scene, waited=True, node_read=True), RefusalReason.NO_RIGHT)

    assert "team-a/train-1" in error.sentence


def test_a_stray_pod_of_another_count_does_not_take_part() -> None:
    stray = named_pod(2, annotations={}, containers=(a_container(count=2),))
    scene = knowing(a_scene(stray, POD, lock=POD), holding(POD))

    assert granted(scene).candidate.pod == POD


def test_of_two_that_wait_for_their_old_answers_the_owner_is_told_to_delete_one() -> None:
    other = named_pod(3)
    mine = (a_share(uuid=G1),)
    rows = tuple(
        a_row(pod_uid=one.uid, pod=one.name, epoch=OLD_KUBELET, shares=mine) for one in (POD, other)
    )
    scene = knowing(a_scene(other, POD, rows=rows), holding(POD), holding(other))

    error = refused_by(changed(scene, listed=True), RefusalReason.MANY_PODS_ADMITTED)

    assert error.sentence.endswith("delete all but one of them.")
    alone = changed(knowing(scene, holding(POD), absent=(other,)), listed=True)
    assert granted(alone).replay == rows[0]


@pytest.mark.parametrize("dead", [1, 2, 9])
def test_dead_containers_that_nothing_tells_apart_do_not_cost_a_new_pod_its_start(dead) -> None:
    ran = msgspec.structs.replace(a_container(), has_run=True)
    others = [named_pod(10 + n, phase=Phase.RUNNING, containers=(ran,)) for n in range(dead)]
    rows = tuple(
        a_row(pod_uid=one.uid, pod=one.name, epoch=OLD_KUBELET, shares=(a_share(uuid=G2),))
        for one in others
    )
    scene = changed(a_scene(POD, *others, rows=rows, lock=POD), records_read=True, listed=True)
    asked = knowing(scene, holding(POD), *map(holding, others))
    assert ask(asked) == AwaitOthers()
    assert granted(changed(asked, alone=True)).candidate.pod == POD
    assert granted(changed(asked, present=frozenset({POD.key}))).candidate.pod == POD
    for names in (None, frozenset({POD.key, others[0].key})):  # that call may be the new pod's
        beside = changed(asked, beside=(frozenset(), names), alone=True)
        refused_by(beside, RefusalReason.MANY_PODS_ADMITTED)
    clear = changed(asked, beside=(frozenset({others[0].key}),), alone=True)
    assert granted(clear).candidate.pod == POD

    before = changed(knowing(scene, absent=(POD,)), absent=frozenset({POD.key}))
    theirs = knowing(before, holding(POD), *map(holding, others))  # it came between the two calls
    if dead == 1:
        assert granted(theirs).replay == rows[0]
    else:
        refused_by(theirs, RefusalReason.MANY_PODS_ADMITTED)


def test_a_row_that_was_booked_for_a_namesakes_ids_is_asked_for_all_the_same() -> None:
    mine = (a_share(uuid=G1),)
    row = a_row(pod_uid=POD.uid, pod=POD.name, epoch=NOW_KUBELET, confirmed=True, shares=mine)
    scene = a_scene(POD, rows=(row,), lock=POD)
    assert ask(scene) == ReadRecords()

    kubelet = msgspec.structs.replace(scene.kubelet, recorded=frozenset())
    read = changed(scene, records_read=True, kubelet=kubelet)

    assert ask(read) == AskKubelet(*POD.key)
    assert granted(knowing(read, holding(POD))).replay == row


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
    assert ask(scene) == AwaitLock(*pod.key)
    waited = changed(scene, waited=True)
    assert ask(waited) == LookAtNode()

    assert ask(changed(waited, node_read=True)) == LookAtPod(*pod.key)
    assert ask(knowing(a_scene(pod, lock=pod), holding(pod))) == LookAtPod(*pod.key)


def test_a_node_that_could_not_be_read_blames_no_scheduler() -> None:
    for lock in (None, named_pod(2)):
        scene = knowing(a_scene(POD, lock=lock), holding(POD))
        unread = changed(scene, waited=True, node_read=True, node_unread=True)

        refused_by(unread, RefusalReason.PODS_UNKNOWN)


def test_a_pod_claimed_by_a_call_in_flight_is_no_candidate() -> None:
    scene = changed(a_scene(POD, lock=POD), claimed=frozenset({POD.uid}), listed=True)

    refused_by(scene, RefusalReason.NO_POD_ADMITTED)


def test_a_deleted_pod_that_the_kubelet_still_admits_is_refused_after_a_list() -> None:
    scene = knowing(a_scene(gone=(POD,), lock=POD), holding(POD))
    assert ask(scene) == ListPods()

    refused_by(changed(scene, listed=True), RefusalReason.POD_DELETED)


def test_of_several_deleted_pods_that_the_kubelet_admits_none_is_guessed_and_none_is_served() -> (
    None
):
    other = named_pod(3)
    scene = knowing(a_scene(gone=(POD, other)), holding(POD), holding(other))

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

    assert POD.uid == rejected_pod(1, scene, SETTINGS)
    assert younger.uid == rejected_pod(1, changed(scene, claimed=frozenset({POD.uid})), SETTINGS)
    both = frozenset({POD.uid, younger.uid})
    assert present.uid == rejected_pod(1, changed(scene, claimed=both), SETTINGS)


def test_a_refused_request_that_a_deleted_pod_may_have_sent_uses_up_no_successor() -> None:
    former = named_pod(1, uid=named_pod(8).uid)
    row = a_row(pod_uid=former.uid, pod=former.name, epoch=OLD_KUBELET, shares=(a_share(uuid=G1),))
    scene = knowing(a_scene(POD, gone=(former,), rows=(row,), lock=POD), holding(POD))

    assert None is rejected_pod(1, scene, SETTINGS)
    late = changed(scene, now=scene.now + dt.timedelta(seconds=61))
    assert POD.uid == rejected_pod(1, late, SETTINGS)


def test_a_refused_request_that_may_have_been_anothers_uses_up_nobody() -> None:
    other = named_pod(3)
    scene = a_scene(other, gone=(POD,), lock=other)

    assert None is rejected_pod(1, knowing(scene, holding(POD), holding(other)), SETTINGS)
    assert None is rejected_pod(1, knowing(scene, absent=(POD, other)), SETTINGS)
    assert None is rejected_pod(1, knowing(scene, holding(other)), SETTINGS)  # POD: no answer


def test_a_terminal_pod_is_no_candidate() -> None:
    assert ask(a_scene(named_pod(1, phase=Phase.FAILED))) == LookAtNode()


def test_unique_serves_the_pod_without_a_lock_that_the_kubelet_confirms() -> None:
    scene = changed(knowing(a_scene(POD), holding(POD)), waited=True, node_read=True)

    assert granted(scene, settings=UNIQUE).candidate.pod == POD


def test_a_running_container_is_replayed_only_when_its_cgroup_is_gone() -> None:
    pod = named_pod(1, containers=(a_container(running_id="containerd://abc"),))
    row = a_row(
        pod_uid=pod.uid, pod=pod.name, epoch=OLD_KUBELET, shares=POD.groups[0] if POD.groups else ()
    )
    scene = knowing(a_scene(pod, rows=(row,)), holding(pod))
    assert ask(scene) == CheckRunning(frozenset({"containerd://abc"}))
    checked = changed(
        scene, checked=frozenset({"containerd://abc"}), listed=True, records_read=True
    )
    alive = changed(
        checked,
        kubelet=type(scene.kubelet)(NOW_KUBELET, alive=frozenset({"containerd://abc"})),
    )

    assert granted(checked).replay == row
    refused_by(alive, RefusalReason.NO_POD_ADMITTED)


def test_an_init_container_sends_to_the_file_for_it_is_listed_nowhere_else() -> None:
    containers = (a_container(name="init", role=Role.INIT), a_container())
    pod = named_pod(1, containers=containers)

    assert ask(knowing(a_scene(pod, lock=pod), holding(pod))) == ReadRecords()


def test_a_row_of_an_init_container_sends_to_the_file_before_the_api_server_is_asked() -> None:
    row = a_row(pod_uid=POD.uid, pod=POD.name, role=Role.INIT, epoch=NOW_KUBELET)
    scene = a_scene(rows=(row,))

    assert ask(scene) == ReadRecords()
    assert ask(changed(scene, records_read=True, node_read=True)) == ListPods()


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
    read = {"records_read": True, "node_read": True}
    unlisted = changed(scene, listed=False, list_failed=False, **read)

    assert ListPods() == ask(unlisted)
    assert UNKNOWN == gate(scene)
    known = changed(unlisted, table=a_scene(POD).table, listed=True)
    assert ROW == granted(known).replay


def test_an_old_kubelet_serves_only_a_lock_owner_without_company() -> None:
    alone = without_witness(a_scene(POD, lock=POD))
    accompanied = without_witness(a_scene(POD, named_pod(3), lock=POD))

    assert ask(alone) == ask(accompanied) == ListPods()
    assert granted(changed(alone, listed=True)).candidate.pod == POD
    assert ask(changed(accompanied, listed=True)) == AwaitLock()
    assert ask(changed(accompanied, listed=True, waited=True)) == LookAtNode()
    known = changed(accompanied, listed=True, waited=True, node_read=True)
    for settings in (SETTINGS, UNIQUE):
        refused_by(known, RefusalReason.WITNESS_SILENT, settings=settings)


def test_an_old_kubelet_gives_no_first_answer_while_the_pods_cannot_be_listed() -> None:
    row = a_row(pod_uid=POD.uid, pod=POD.name, epoch=OLD_KUBELET, shares=(a_share(uuid=G1),))
    silent = {"listed": True, "list_failed": True}

    first = without_witness(a_scene(POD, lock=POD))
    refused_by(changed(first, **silent), RefusalReason.PODS_UNKNOWN)
    again = without_witness(a_scene(POD, rows=(row,), lock=POD))
    refused_by(changed(again, **silent), RefusalReason.PODS_UNKNOWN)
    seen = msgspec.structs.replace(
        again.kubelet, start=KubeletStart(begun=frozenset())
    )  # it was never started, so it is being admitted
    assert granted(changed(again, kubelet=seen, **silent)).replay == row


def test_an_old_kubelets_lone_candidate_waits_for_its_lock_before_it_is_refused() -> None:
    scene = changed(without_witness(a_scene(POD)), listed=True)

    assert ask(scene) == AwaitLock(*POD.key)
    assert ask(changed(scene, waited=True)) == LookAtNode()
    refused_by(changed(scene, waited=True, node_read=True), RefusalReason.NO_LOCK)
    refused_by(
        changed(scene, waited=True, node_read=True, lock=a_lock(name="other")),
        RefusalReason.NO_RIGHT,
    )


def test_an_old_kubelet_asks_for_a_deleted_pod_for_ten_seconds_and_not_again_after_a_refusal() -> (
    None
):
    other = named_pod(3)
    asked = changed(
        without_witness(a_scene(POD, gone=(other,), lock=POD)),
        listed=True,
        waited=True,
        node_read=True,
    )

    refused_by(asked, RefusalReason.WITNESS_SILENT)
    assert other.uid == rejected_pod(1, asked, SETTINGS)
    assert granted(changed(asked, claimed=frozenset({other.uid}))).candidate.pod == POD
    late = changed(asked, now=NOON + dt.timedelta(seconds=11))
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


def test_an_old_kubelets_pod_that_nobody_has_seen_is_listed_for_once() -> None:
    scene = without_witness(a_scene(lock=POD))

    assert ask(scene) == ListPods()
    refused_by(changed(scene, listed=True), RefusalReason.NO_POD_ADMITTED)
