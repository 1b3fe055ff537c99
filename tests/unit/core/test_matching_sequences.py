"""The sequences that matching guards against, each as the one decision on which it turns."""

import dataclasses
import datetime as dt
import itertools

import pytest

from agent.core.errors import Gate, Refusal
from agent.core.evidence import AwaitLock, Books, Evidence, ListPods
from agent.core.ledger import Row
from agent.core.pods import Phase, PodView, Role
from tests.builders import (
    NOON,
    a_container,
    a_gpu,
    a_lock,
    a_pod,
    a_row,
    a_share,
    a_shared_gpu,
    an_inventory,
)
from tests.unit.core.matching_scene import (
    G1,
    G2,
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
)

POD = named_pod(1)
OTHER = named_pod(2)
LONG = dt.timedelta(minutes=6)


def refused(scene: Evidence, count: int = 1) -> Refusal:
    with pytest.raises(Refusal) as caught:
        ask(changed(scene, waited=True, node_read=True, listed=True), count)
    return caught.value


def row_of(pod: PodView, **changes: object) -> Row:
    """What the pod's container was answered by, under the kubelet before this one."""
    base = a_row(pod_uid=pod.uid, pod=pod.name, epoch=OLD_KUBELET, shares=(a_share(uuid=G1),))
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [None, f"{G1},NVIDIA,1,1:{G1},NVIDIA,1,1:;"])
def test_a_stray_pod_of_another_count_beside_the_lock_owner_is_refused_alone(text) -> None:
    two = (a_container(count=2),)
    stray = named_pod(2, containers=two, annotations=annotated(text) if text else {}, groups=None)
    scene = knowing(a_scene(stray, POD, lock=POD), holding(stray), absent=(POD,))
    assert ask(scene, 2) == AwaitLock(*stray.key)

    refusal = refused(scene, 2)

    assert refusal.gate is Gate.NO_RIGHT
    assert "Pod team-a/train-2 asks" in refusal.sentence
    assert granted(knowing(scene, holding(POD), absent=(stray,))).candidate.pod == POD


@pytest.mark.parametrize("confirmed", [True, False])
def test_an_answer_that_the_kubelet_died_over_is_given_again(confirmed) -> None:
    row = row_of(POD, confirmed=confirmed)

    grant = granted(knowing(a_scene(POD, rows=(row,), lock=POD), holding(POD)))

    assert (grant.replay, grant.shares) == (row, row.shares)


def test_a_restart_after_a_lost_checkpoint_is_served_while_another_pod_holds_the_lock() -> None:
    row = row_of(POD, confirmed=True)
    dead = named_pod(1, phase=Phase.RUNNING, containers=(a_container(running_id="c1"),))
    scene = changed(
        knowing(a_scene(dead, OTHER, rows=(row,), lock=OTHER), holding(dead), absent=(OTHER,)),
        checked=frozenset({"c1"}),
    )

    assert ask(scene) == ListPods()  # of the dead one the kubelet says for good what it says now
    assert granted(changed(scene, listed=True)).replay == row


def test_a_restart_beside_the_admission_of_the_lock_owner_is_not_guessed_between() -> None:
    row = row_of(POD, confirmed=True)
    scene = knowing(a_scene(POD, OTHER, rows=(row,), lock=OTHER), holding(POD), holding(OTHER))

    assert refused(scene).gate is Gate.MANY_PODS_ADMITTED


def test_after_a_reboot_each_pod_gets_its_own_answer_although_the_api_says_running() -> None:
    pods = tuple(
        named_pod(n, phase=Phase.RUNNING, containers=(a_container(running_id=f"c{n}"),))
        for n in (1, 2, 3)
    )
    rows = tuple(row_of(pod, group=n, confirmed=True) for n, pod in enumerate(pods))
    scene = changed(
        a_scene(*pods, rows=rows),
        checked=frozenset({"c1", "c2", "c3"}),
        records_read=True,
        now=NOW_KUBELET.since + dt.timedelta(seconds=3),
    )

    for turn, pod in enumerate(pods):
        known = knowing(
            scene,
            *(holding(done, main=f"{G1}-{n}") for n, done in enumerate(pods[:turn])),
            holding(pod),
            absent=pods[turn + 1 :],
        )
        assert granted(known).replay == rows[turn]


def test_of_two_pods_of_an_expired_lock_the_first_is_refused_and_the_second_gets_its_own() -> None:
    second = named_pod(2, groups=((a_share(uuid=G2, memory_mib=7),),))
    scene = a_scene(POD, second, lock=second)

    assert refused(knowing(scene, holding(POD), absent=(second,))).gate is Gate.NO_RIGHT
    grant = granted(knowing(scene, holding(second), absent=(POD,)))
    assert (grant.candidate.pod, grant.shares) == (second, second.groups[0] if second.groups else 0)


FORGED = {
    "as placed": annotated(),
    "as answered": annotated() | {"hami.io/bind-phase": "success"},
    "as bound later": annotated() | {"hami.io/bind-time": "9999999999"},
    "for more": annotated(f"{G1},NVIDIA,81559,100:;"),
}


@pytest.mark.parametrize("notes", FORGED.values(), ids=FORGED)
def test_annotations_that_a_tenant_wrote_give_no_right(notes) -> None:
    forger = a_pod(name="train-1", annotations=notes)
    scene = knowing(a_scene(forger, OTHER), holding(forger), absent=(OTHER,))
    locked = changed(scene, lock=a_lock(name="train-2"))

    assert refused(scene).gate is Gate.NO_LOCK
    assert refused(locked).gate is Gate.NO_RIGHT
    assert refused(changed(scene, lock=a_lock(name=""))).gate is Gate.NO_LOCK
    assert refused(changed(scene, lock=a_lock(namespace="team-b"))).gate is Gate.NO_RIGHT


def test_annotations_that_shrink_a_running_pods_share_free_nothing() -> None:
    liar = named_pod(2, phase=Phase.RUNNING, annotations=annotated(f"{G1},NVIDIA,1,0:;"))
    row = row_of(liar, shares=(a_share(uuid=G1, memory_mib=80000),), epoch=NOW_KUBELET)
    scene = knowing(a_scene(POD, liar, rows=(row,), lock=POD), holding(POD))

    assert refused(knowing(scene, holding(liar, main=f"{G1}-0"))).gate is Gate.MEMORY_EXCEEDED


def test_a_pod_with_gpus_in_its_init_container_only_is_served_as_the_setting_says() -> None:
    pod = a_pod(
        name="train-1",
        annotations=annotated(f"{G1},NVIDIA,3000,30:;;"),
        containers=(a_container(name="fetch", role=Role.INIT), a_container(count=0)),
    )
    scene = changed(
        knowing(a_scene(pod), holding(pod)),
        books=Books(NOW_KUBELET, frozenset()),
        records_read=True,
        waited=True,
        node_read=True,
    )

    refusal = refused(scene)

    assert (refusal.gate, "unlockedPods" in refusal.sentence) == (Gate.NO_LOCK, True)
    assert granted(scene, settings=UNIQUE).candidate.container.name == "fetch"


def test_a_static_pod_is_refused_before_and_after_the_api_server_knows_it() -> None:
    mirror = named_pod(3, static=True, annotations={}, groups=None)
    unseen = knowing(a_scene(POD, lock=POD), absent=(POD,))
    assert ask(unseen) == ListPods()

    assert refused(unseen).gate is Gate.NO_POD_ADMITTED
    seen = knowing(a_scene(POD, mirror, lock=POD), holding(mirror), absent=(POD,))
    assert refused(seen).gate is Gate.STATIC_POD


KINDS = tuple((role, count) for role in (Role.INIT, Role.SIDECAR, Role.APP) for count in (0, 1, 2))
LAYOUTS = tuple(
    layout
    for layout in itertools.product(KINDS, repeat=3)
    if any(count for role, count in layout if role is Role.APP)
    and [role is Role.APP for role, _ in layout] == sorted(role is Role.APP for role, _ in layout)
)


def test_each_container_gets_its_own_group_wherever_those_without_gpus_stand() -> None:
    assert len(LAYOUTS) == 146
    for layout in LAYOUTS:
        containers = tuple(
            a_container(name=f"c{place}", role=role, count=count)
            for place, (role, count) in enumerate(layout)
        )
        text = "".join(
            "".join(f"{G1},NVIDIA,{100 + place},1:" for _ in range(one.count)) + ";"
            for place, one in enumerate(containers)
        )
        pod = a_pod(name="train-1", annotations=annotated(text), containers=containers)
        rows: tuple[Row, ...] = ()
        held: dict[str, str] = {}
        for one in pod.gpu_containers:
            recorded = frozenset(row.key for row in rows)
            scene = changed(
                knowing(a_scene(pod, rows=rows, lock=pod), holding(pod, **held)),
                books=Books(NOW_KUBELET, recorded),
                records_read=True,
            )
            grant = granted(scene, one.count)
            assert (one.name, 100 + int(one.name[1:])) == (
                grant.candidate.container.name,
                grant.shares[0].memory_mib,
            ), layout
            row = row_of(pod, epoch=NOW_KUBELET, role=one.role, shares=grant.shares)
            key = dataclasses.replace(row.key, container=one.name)
            rows = (*rows, dataclasses.replace(row, key=key))
            if one.role is not Role.INIT:
                held[one.name] = f"{G1}-{len(rows)}"


def test_an_owner_that_ended_before_its_allocate_is_nobody() -> None:
    evicted = named_pod(1, phase=Phase.FAILED, reason="Evicted")

    assert ask(a_scene(evicted, lock=evicted)) == ListPods()
    assert refused(a_scene(evicted, lock=evicted)).gate is Gate.NO_POD_ADMITTED


@pytest.mark.parametrize("off", [-LONG, dt.timedelta(0), LONG], ids=["slow", "right", "fast"])
def test_the_nodes_own_clock_decides_nothing(off) -> None:
    scene = knowing(a_scene(POD, lock=POD), holding(POD))

    assert granted(changed(scene, now=NOON + off)) == granted(scene)


def test_a_lock_that_is_six_minutes_old_still_proves_its_owners_right() -> None:
    scene = knowing(a_scene(POD, lock=POD), holding(POD))

    assert granted(changed(scene, now=NOON + LONG)).candidate.pod == POD


@pytest.mark.parametrize("split", [0, 1])
def test_a_lowered_split_count_takes_nothing_from_a_container_that_starts_again(split) -> None:
    row = row_of(POD, slice_ids=(f"{G1}-9",), confirmed=True)
    shared = a_shared_gpu(gpu=a_gpu(index=0), split_count=split, registered_mib=1)
    scene = changed(
        knowing(a_scene(POD, rows=(row,)), holding(POD)), inventory=an_inventory(gpus=(shared,))
    )

    assert granted(scene).replay == row


def test_a_finished_job_that_the_api_still_shows_running_does_not_fill_its_gpu() -> None:
    job = named_pod(2, phase=Phase.RUNNING)
    row = row_of(job, shares=(a_share(uuid=G1, memory_mib=81559),), epoch=NOW_KUBELET)
    scene = knowing(a_scene(POD, job, rows=(row,), lock=POD), holding(POD))

    assert granted(knowing(scene, absent=(job,))).candidate.pod == POD


def test_an_init_container_that_took_more_than_the_app_leaves_room_for_the_app_alone() -> None:
    text = f"{G1},NVIDIA,80000,10:;{G1},NVIDIA,2000,10:;"
    containers = (a_container(name="init", role=Role.INIT), a_container())
    pod = a_pod(name="train-1", annotations=annotated(text), containers=containers)
    init = a_row(
        pod_uid=pod.uid,
        pod=pod.name,
        container="init",
        role=Role.INIT,
        epoch=NOW_KUBELET,
        shares=(a_share(uuid=G1, memory_mib=80000),),
    )
    books = Books(NOW_KUBELET, frozenset({init.key}))
    scene = changed(a_scene(pod, OTHER, rows=(init,)), books=books, records_read=True)
    own = changed(knowing(scene, holding(pod), absent=(OTHER,)), lock=a_lock(name="train-1"))
    others = changed(knowing(scene, holding(OTHER), holding(pod)), lock=a_lock(name="train-2"))
    app = a_row(pod_uid=pod.uid, pod=pod.name, epoch=NOW_KUBELET, confirmed=True)
    held = changed(
        others,
        ledger=others.ledger.put(app),
        known={OTHER.key: holding(OTHER), pod.key: holding(pod, main=f"{G1}-0")},
    )

    assert granted(own).candidate.container.name == "main"
    assert refused(held).gate is Gate.MEMORY_EXCEEDED
