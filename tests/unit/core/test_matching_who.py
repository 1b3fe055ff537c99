"""Which pod an Allocate is for: the kubelet is the witness, the lock is the right."""

import dataclasses
import datetime as dt

from agent.core.errors import Gate
from agent.core.evidence import AskKubelet, AwaitLock, CheckRunning, ListPods, ReadRecords
from agent.core.ledger import ContainerKey
from agent.core.matching import used_up
from agent.core.pods import Phase, Role
from tests.builders import NOON, a_container, a_row, a_share
from tests.unit.core.matching_scene import (
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


def test_the_owner_alone_settles_it_when_every_row_is_confirmed() -> None:
    scene = knowing(a_scene(named_pod(3), POD, lock=POD), holding(POD))

    assert granted(scene).candidate.pod == POD


def test_the_others_are_asked_while_a_row_is_unconfirmed() -> None:
    other = named_pod(3)
    row = a_row(pod_uid=other.uid, pod=other.name, epoch=OLD_KUBELET, confirmed=True)
    scene = knowing(a_scene(other, POD, rows=(row,), lock=POD), holding(POD))

    assert ask(scene) == AskKubelet(*other.key)


def test_a_pod_that_was_started_without_being_asked_for_is_asked_about_beside_the_owner() -> None:
    ran = dataclasses.replace(a_container(), has_run=True)
    started = named_pod(3, annotations={}, phase=Phase.RUNNING, containers=(ran,))
    scene = knowing(a_scene(started, POD, lock=POD), holding(POD))

    assert ask(scene) == AskKubelet(*started.key)
    refused_by(knowing(scene, holding(POD), holding(started)), Gate.MANY_PODS_ADMITTED)


def test_an_owner_that_was_started_without_being_asked_for_does_not_hide_a_newcomer() -> None:
    ran = dataclasses.replace(a_container(), has_run=True)
    started = dataclasses.replace(POD, phase=Phase.RUNNING, containers=(ran,))
    unseen = knowing(a_scene(started, lock=started), holding(started))
    assert ask(unseen) == ListPods()
    assert granted(changed(unseen, listed=True)).candidate.pod == started

    shown = knowing(a_scene(STRAY, started, lock=started), holding(started))
    shown = changed(shown, listed=True)

    assert ask(shown) == AskKubelet(*STRAY.key)
    refused_by(knowing(shown, holding(STRAY)), Gate.MANY_PODS_ADMITTED)


def test_a_stray_pod_is_refused_and_not_given_the_owners_share() -> None:
    scene = knowing(a_scene(STRAY, POD, lock=POD), holding(STRAY), absent=(POD,))
    assert ask(scene) == AwaitLock()

    error = refused_by(changed(scene, waited=True), Gate.NO_RIGHT)

    assert "team-a/train-1" in error.sentence


def test_a_stray_pod_with_the_name_of_the_locks_owner_is_not_the_owner() -> None:
    scene = knowing(a_scene(POD, lock=POD), holding(POD))
    assert scene.lock is not None
    later = dataclasses.replace(scene.lock, stamp=NOON + dt.timedelta(seconds=9))
    scene = changed(scene, lock=later)
    assert ask(scene) == ListPods()
    assert ask(changed(scene, listed=True)) == AwaitLock()

    error = refused_by(changed(scene, listed=True, waited=True), Gate.NO_RIGHT)

    assert "a later pod of that name" in error.sentence


def test_a_bind_that_is_tried_again_stamps_the_lock_and_then_the_pod() -> None:
    scene = knowing(a_scene(POD, lock=POD), holding(POD))
    assert scene.lock is not None
    again = NOON + dt.timedelta(seconds=9)
    bound = {**POD.annotations, "hami.io/bind-time": str(int(again.timestamp()))}
    pod = dataclasses.replace(POD, annotations=bound)
    table = dataclasses.replace(scene.table, pods={pod.uid: pod})
    lock = dataclasses.replace(scene.lock, stamp=again)

    assert granted(changed(scene, table=table, lock=lock)).candidate.pod == pod


def test_a_stray_pod_of_another_count_does_not_take_part() -> None:
    stray = named_pod(2, annotations={}, containers=(a_container(count=2),))
    scene = knowing(a_scene(stray, POD, lock=POD), holding(POD))

    assert granted(scene).candidate.pod == POD


def test_two_pods_being_admitted_are_never_guessed_between() -> None:
    other = named_pod(3)
    row = a_row(pod_uid=other.uid, pod=other.name, epoch=OLD_KUBELET)
    scene = knowing(a_scene(other, POD, rows=(row,), lock=POD), holding(POD), holding(other))

    refused_by(scene, Gate.MANY_PODS_ADMITTED)


def test_of_two_that_wait_for_their_old_answers_the_owner_is_told_to_delete_one() -> None:
    other = named_pod(3)
    mine = (a_share(uuid=G1),)
    rows = tuple(
        a_row(pod_uid=one.uid, pod=one.name, epoch=OLD_KUBELET, shares=mine) for one in (POD, other)
    )
    scene = knowing(a_scene(other, POD, rows=rows), holding(POD), holding(other))

    error = refused_by(scene, Gate.MANY_PODS_ADMITTED)

    assert error.sentence.endswith("delete all but one of them.")
    assert granted(knowing(scene, holding(POD), absent=(other,))).replay == rows[0]


def test_nobody_known_asks_the_api_server_once_and_then_refuses() -> None:
    scene = knowing(a_scene(POD, lock=POD), absent=(POD,))
    assert ask(scene) == ListPods()

    refused_by(changed(scene, listed=True), Gate.NO_POD_ADMITTED)


def test_a_pod_claimed_by_a_call_in_flight_is_no_candidate() -> None:
    scene = changed(a_scene(POD, lock=POD), claimed=frozenset({POD.uid}), listed=True)

    refused_by(scene, Gate.NO_POD_ADMITTED)


def test_a_deleted_pod_that_the_kubelet_still_admits_is_refused_at_once() -> None:
    scene = knowing(a_scene(gone=(POD,), lock=POD), holding(POD))

    refused_by(scene, Gate.POD_DELETED)


def test_a_present_pod_wins_over_a_tombstone_of_its_name_with_equal_shares() -> None:
    successor = named_pod(1, uid=named_pod(9).uid)
    scene = knowing(a_scene(successor, gone=(POD,), lock=successor), holding(POD))

    assert ask(scene) == ListPods()
    assert granted(changed(scene, listed=True)).candidate.pod == successor


def test_a_present_pod_and_a_tombstone_with_other_shares_are_refused() -> None:
    text = f"{G2},NVIDIA,1,1:;"
    other = named_pod(9, groups=((),), annotations=annotated(text))
    successor = named_pod(1, uid=other.uid, groups=other.groups)
    scene = knowing(a_scene(successor, gone=(POD,), lock=successor), holding(POD))

    refused_by(scene, Gate.MANY_PODS_ADMITTED)


def test_a_refused_request_uses_up_the_oldest_deleted_pod_of_its_name() -> None:
    younger, present = (named_pod(1, uid=named_pod(n).uid, groups=((),)) for n in (8, 9))
    scene = knowing(a_scene(present, gone=(POD, younger), lock=present), holding(POD))

    assert POD.uid == used_up(1, scene, SETTINGS)
    assert younger.uid == used_up(1, changed(scene, claimed=frozenset({POD.uid})), SETTINGS)
    both = frozenset({POD.uid, younger.uid})
    assert None is used_up(1, changed(scene, claimed=both), SETTINGS)


def test_a_refused_request_that_may_have_been_anothers_uses_up_nobody() -> None:
    other = named_pod(3)
    scene = a_scene(other, gone=(POD,), lock=other)

    assert None is used_up(1, knowing(scene, holding(POD), holding(other)), SETTINGS)
    assert None is used_up(1, knowing(scene, absent=(POD, other)), SETTINGS)


def test_a_tombstone_that_was_answered_asks_for_nothing_any_more() -> None:
    settled = named_pod(1, annotations={**POD.annotations, "hami.io/bind-phase": "success"})

    assert ask(a_scene(gone=(settled,))) == ListPods()


def test_a_terminal_pod_is_no_candidate() -> None:
    assert ask(a_scene(named_pod(1, phase=Phase.FAILED))) == ListPods()


def test_a_static_pod_is_refused_with_that_reason() -> None:
    static = named_pod(1, static=True)

    refused_by(knowing(a_scene(static, lock=static), holding(static)), Gate.STATIC_POD)


def test_a_pod_without_any_lock_is_refused_with_the_name_of_the_setting() -> None:
    scene = changed(knowing(a_scene(POD), holding(POD)), waited=True)

    assert "unlockedPods" in refused_by(scene, Gate.NO_LOCK).sentence


def test_unique_serves_the_pod_without_a_lock_that_the_kubelet_confirms() -> None:
    scene = changed(knowing(a_scene(POD), holding(POD)), waited=True)

    assert granted(scene, settings=UNIQUE).candidate.pod == POD


def test_an_old_kubelet_serves_only_a_lock_owner_without_company() -> None:
    alone = without_witness(a_scene(POD, lock=POD))
    accompanied = without_witness(a_scene(POD, named_pod(3), lock=POD))

    assert granted(alone).candidate.pod == POD
    refused_by(accompanied, Gate.WITNESS_SILENT)


def test_a_container_whose_ids_the_kubelet_holds_is_not_the_one_being_admitted() -> None:
    pod = named_pod(
        1,
        containers=(a_container(name="c1"), a_container(name="c2")),
        groups=POD.groups * 2 if POD.groups else None,
    )
    row = a_row(pod_uid=pod.uid, pod=pod.name, container="c1", epoch=NOW_KUBELET)
    scene = knowing(a_scene(pod, rows=(row,), lock=pod), holding(pod, c1=f"{G1}-4"))

    assert granted(scene).candidate.container.name == "c2"


def test_a_row_that_the_kubelet_lost_is_replayed_without_any_lock() -> None:
    row = a_row(pod_uid=POD.uid, pod=POD.name, epoch=OLD_KUBELET, confirmed=True)
    row = a_row(
        pod_uid=POD.uid, pod=POD.name, epoch=OLD_KUBELET, shares=POD.groups[0] if POD.groups else ()
    )
    scene = knowing(a_scene(POD, rows=(row,)), holding(POD))

    assert granted(scene).replay == row


def test_a_running_container_is_replayed_only_when_its_cgroup_is_gone() -> None:
    pod = named_pod(1, containers=(a_container(running_id="containerd://abc"),))
    row = a_row(
        pod_uid=pod.uid, pod=pod.name, epoch=OLD_KUBELET, shares=POD.groups[0] if POD.groups else ()
    )
    scene = knowing(a_scene(pod, rows=(row,)), holding(pod))
    assert ask(scene) == CheckRunning(frozenset({"containerd://abc"}))
    checked = changed(scene, checked=frozenset({"containerd://abc"}), listed=True)
    alive = changed(
        checked,
        books=type(scene.books)(NOW_KUBELET, alive=frozenset({"containerd://abc"})),
    )

    assert granted(checked).replay == row
    refused_by(alive, Gate.NO_POD_ADMITTED)


def test_an_init_containers_row_sends_to_the_kubelets_own_file() -> None:
    pod = named_pod(
        1,
        containers=(a_container(name="init", role=Role.INIT), a_container()),
        groups=POD.groups * 2 if POD.groups else None,
    )
    row = a_row(
        pod_uid=pod.uid,
        pod=pod.name,
        container="init",
        role=Role.INIT,
        epoch=OLD_KUBELET,
        shares=POD.groups[0] if POD.groups else (),
    )
    scene = knowing(a_scene(pod, rows=(row,), lock=pod), holding(pod))
    assert ask(scene) == ReadRecords()
    key = ContainerKey(pod.uid, "init")
    recorded = changed(
        scene, records_read=True, books=type(scene.books)(NOW_KUBELET, frozenset({key}))
    )
    lost = changed(scene, records_read=True, books=type(scene.books)(NOW_KUBELET, frozenset()))

    assert granted(recorded).candidate.container.name == "main"
    assert granted(lost).replay == row


def test_a_row_of_an_init_container_sends_to_the_file_before_the_api_server_is_asked() -> None:
    row = a_row(pod_uid=POD.uid, pod=POD.name, role=Role.INIT, epoch=NOW_KUBELET)
    scene = a_scene(rows=(row,))

    assert ask(scene) == ReadRecords()
    assert ask(changed(scene, records_read=True)) == ListPods()


def test_an_old_kubelets_file_is_read_before_its_pod_is_served() -> None:
    row = a_row(pod_uid=POD.uid, pod=POD.name, container="c1", epoch=NOW_KUBELET)
    pod = named_pod(
        1,
        containers=(a_container(name="c1"), a_container(name="c2")),
        groups=POD.groups * 2 if POD.groups else None,
    )
    scene = a_scene(pod, rows=(row,), lock=pod)
    assert ask(without_witness(scene, read=False)) == ReadRecords()

    served = granted(without_witness(scene, recorded=frozenset({row.key})))

    assert served.candidate.container.name == "c2"


def test_an_old_kubelets_pod_that_nobody_has_seen_is_listed_for_once() -> None:
    scene = without_witness(a_scene(lock=POD))

    assert ask(scene) == ListPods()
    refused_by(changed(scene, listed=True), Gate.WITNESS_SILENT)


def test_a_container_that_the_scheduler_wrote_nothing_for_is_refused() -> None:
    pod = named_pod(
        1, containers=(a_container(name="init", role=Role.INIT), a_container(name="app"))
    )
    scene = changed(knowing(a_scene(pod, lock=pod), holding(pod)), records_read=True)

    refused_by(scene, Gate.NO_CONTAINER_LEFT)
