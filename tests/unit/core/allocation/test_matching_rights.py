"""The lock is the right, whatever the times say, and a name is looked at before it is served."""

import datetime as dt

import msgspec
import pytest

from agent.allocate.candidates import (
    NOT_HERE,
    UNREAD,
    AwaitLock,
    KubeletStart,
    KubeletView,
    ListPods,
    LookAtNode,
    LookAtPod,
)
from agent.cluster import Role
from agent.errors import RefusalReason
from agent.hami.pod import decode_pod_devices
from agent.ledger import ContainerKey, Ledger
from tests.builders import NOON, a_container, a_lock, a_pod, a_row
from tests.unit.core.allocation.matching_scene import (
    G1,
    NOW_KUBELET,
    OLD_KUBELET,
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
)

POD = named_pod(1)
STRAY = named_pod(2, annotations={})
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
    assert ask(unseen, settings=UNIQUE) == AwaitLock(*POD.key)
    assert ask(changed(unseen, waited=True), settings=UNIQUE) == LookAtNode()
    assert "" == granted(changed(unseen, waited=True, node_read=True), settings=UNIQUE).lock


def test_a_lock_that_just_went_proves_the_right_until_another_pod_was_answered_under_it() -> None:
    scene = knowing(a_scene(POD, STRAY, lock=POD), holding(POD), absent=(STRAY,))
    went = changed(scene, lock=None, released_locks=(scene.lock,))
    taken = changed(
        scene, lock=a_lock(name="next"), released_locks=(a_lock(name="other"), scene.lock)
    )
    assert scene.lock is not None
    spent = a_row(pod_uid=named_pod(9).uid, pod=POD.name, lock=scene.lock.value)

    for one in (went, taken):
        assert scene.lock.value == granted(one).lock
    assert ask(changed(went, ledger=Ledger((spent,)))) == AwaitLock(*POD.key)
    ended = {scene.lock.value: named_pod(9).uid}  # its row is closed already
    assert ask(changed(went, used_locks=ended)) == AwaitLock(*POD.key)
    for outlived in (changed(went, ledger=Ledger((spent,))), changed(went, used_locks=ended)):
        assert scene.lock.value == granted(changed(outlived, outlived=ended)).lock
        others = {scene.lock.value: named_pod(8).uid}
        assert ask(changed(outlived, outlived=others)) == AwaitLock(*POD.key)
    stray = knowing(changed(went, known={}), holding(STRAY), absent=(POD,))
    assert ask(stray) == AwaitLock(*STRAY.key)


@pytest.mark.parametrize("role", [Role.APP, Role.INIT])
def test_no_lock_is_worth_anything_to_a_pod_that_was_created_with_its_node(role) -> None:
    containers = (a_container(role=role), a_container(name="app", count=0))
    owner = named_pod(1, containers=containers)
    scene = knowing(a_scene(owner, lock=owner), holding(owner))
    scene = changed(scene, kubelet=KubeletView(NOW_KUBELET, frozenset()), records_read=True)
    assert scene.lock is not None
    assert scene.lock.value == granted(scene).lock

    stray = msgspec.structs.replace(owner, scheduled=False)
    taken = changed(scene, table=a_scene(stray).table)
    for lock, former in ((scene.lock, ()), (None, (scene.lock,)), (None, ())):
        one = changed(taken, lock=lock, released_locks=former)
        refusal = refused_by(one, RefusalReason.NO_LOCK)  # at once: it waits for no lock
        assert "without nodeName" in refusal.sentence
        assert "" == granted(one, settings=UNIQUE).lock


def test_a_lock_that_another_pod_was_answered_under_is_looked_at_before_it_counts() -> None:
    scene = knowing(a_scene(POD, lock=POD), holding(POD))
    assert scene.lock is not None
    spent = a_row(pod_uid=named_pod(9).uid, pod=POD.name, lock=scene.lock.value)
    shown = changed(scene, ledger=Ledger((spent,)))

    assert ask(shown) == AwaitLock(*POD.key)
    assert ask(changed(shown, waited=True)) == LookAtNode()
    assert scene.lock.value == granted(changed(shown, waited=True, node_read=True)).lock
    newer = a_lock(name=POD.name, stamp=NOON + dt.timedelta(seconds=1))
    assert newer.value == granted(changed(shown, lock=newer)).lock


def test_a_pod_whose_name_can_return_is_looked_at_once_before_it_is_answered() -> None:
    scene = knowing(a_scene(RETURNING, lock=RETURNING), holding(RETURNING))
    assert ask(scene) == LookAtPod(*RETURNING.key)

    same = changed(scene, pod_uids_read={RETURNING.key: RETURNING.uid})
    assert granted(same).candidate.pod == RETURNING


@pytest.mark.parametrize(
    ("recorded", "held", "right"),
    [
        (None, True, False),
        ((), True, False),
        ((9,), True, False),
        ((1,), True, True),
        ((9, 1), True, True),
        ((1,), False, False),
    ],
    ids=["no file", "nobody", "a namesake", "it", "both", "it was rejected"],
)
def test_where_the_api_server_is_silent_the_kubelets_own_records_must_name_the_pod(
    recorded, held, right
) -> None:
    """The record is that of another container of the pod: it was answered at this admission."""
    text = f"{G1},NVIDIA,10,0:{G1},NVIDIA,10,0:;{G1},NVIDIA,3000,30:;"
    both = (a_container(name="other", count=2), a_container())
    pod = msgspec.structs.replace(
        RETURNING, containers=both, annotations=annotated(text), groups=decode_pod_devices(text)
    )
    row = a_row(pod_uid=pod.uid, pod=pod.name, container="other", epoch=OLD_KUBELET)
    said = holding(pod, other=f"{G1}-0") if held else holding(pod)
    scene = knowing(a_scene(pod, rows=(row,), lock=pod), said)
    scene = changed(scene, pod_uids_read={pod.key: UNREAD}, records_read=True, listed=True)
    scene = changed(scene, list_failed=True)

    keys = recorded and (ContainerKey(named_pod(n).uid, "other") for n in recorded)
    known = None if recorded is None else frozenset(keys)
    idle = KubeletStart(begun=frozenset())  # so it is being admitted
    read = changed(scene, kubelet=KubeletView(NOW_KUBELET, recorded=known, start=idle))
    if right:
        assert "main" == granted(read).candidate.container.name
    else:
        refused_by(read, RefusalReason.PODS_UNKNOWN)


@pytest.mark.parametrize("found", [NOT_HERE, named_pod(9).uid], ids=["gone", "another"])
def test_where_another_pod_has_the_name_all_are_listed_and_it_begins_again(found) -> None:
    scene = knowing(a_scene(RETURNING, lock=RETURNING), holding(RETURNING))
    scene = changed(scene, pod_uids_read={RETURNING.key: found})
    assert ask(scene) == ListPods()

    successor = msgspec.structs.replace(RETURNING, uid=named_pod(9).uid)
    shown = a_scene(successor, gone=(RETURNING,), lock=RETURNING)
    listed = changed(scene, table=shown.table, listed=True)
    assert granted(listed).candidate.pod == successor


def test_where_another_pod_has_the_name_and_the_pods_cannot_be_listed_nobody_is_served() -> None:
    scene = knowing(a_scene(RETURNING, lock=RETURNING), holding(RETURNING))
    known = changed(scene, pod_uids_read={RETURNING.key: named_pod(9).uid}, listed=True)

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
    kubelet = KubeletView(NOW_KUBELET, recorded=frozenset({row.key}))
    assert ask(changed(namesake, kubelet=kubelet)) == LookAtPod(*pod.key)


def test_behind_an_init_container_a_pod_whose_name_can_return_is_looked_at_again() -> None:
    """PodResources lists none, so it cannot tell the pod from one that took its name since."""
    both = (a_container(name="init", role=Role.INIT), a_container())
    text = f"{G1},NVIDIA,1000,10:;{G1},NVIDIA,2000,10:;"
    pod = a_pod(name="train-1", containers=both, annotations=annotated(text), reusable_name=True)
    row = a_row(pod_uid=pod.uid, pod=pod.name, container="init", epoch=NOW_KUBELET, role=Role.INIT)
    scene = knowing(a_scene(pod, rows=(row,), lock=pod), holding(pod))
    kubelet = KubeletView(NOW_KUBELET, recorded=frozenset({row.key}))
    scene = changed(scene, kubelet=kubelet, records_read=True)

    assert ask(scene) == LookAtPod(*pod.key)
    same = changed(scene, pod_uids_read={pod.key: pod.uid})
    assert "main" == granted(same).candidate.container.name


def test_a_replay_of_a_pod_whose_name_can_return_is_looked_at_too() -> None:
    row = a_row(pod_uid=RETURNING.uid, pod=RETURNING.name, epoch=OLD_KUBELET)
    scene = knowing(a_scene(RETURNING, rows=(row,)), holding(RETURNING))
    assert ask(scene) == ListPods()

    start = KubeletStart(begun=frozenset())
    admitted = msgspec.structs.replace(scene.kubelet, start=start)
    assert ask(changed(scene, kubelet=admitted)) == LookAtPod(*RETURNING.key)
