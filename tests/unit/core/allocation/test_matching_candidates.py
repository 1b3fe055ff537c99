"""Who may be asking, which container of it is next, and what that gets."""

import datetime as dt

import msgspec
import pytest

from agent.allocate.match import Ask, Evidence, KubeletStart, Question, decide
from agent.cluster import Phase, PodView, Role
from agent.errors import RefusalReason
from agent.ledger import ContainerKey, Holding, KubeletEpoch, Row
from agent.model import Condition
from tests.builders import (
    NOON,
    a_container,
    a_gpu,
    a_health,
    a_pod,
    a_share,
    a_shared_gpu,
    an_inventory,
)
from tests.unit.core.allocation.matching_scene import (
    G1,
    NOW_KUBELET,
    OLD_KUBELET,
    RAN,
    a_scene,
    annotated,
    ask,
    changed,
    granted,
    holding,
    knowing,
    named_pod,
    refused_by,
    row_of,
)

POD = named_pod(1)
ROW = row_of(POD, epoch=NOW_KUBELET)


def scene_of(*pods: PodView, rows: tuple[Row, ...] = (), **options: object) -> Evidence:
    """A scene in which the kubelet's file was read, in vain unless `kubelet` says otherwise."""
    gone = options.pop("gone", ())
    scene = a_scene(*pods, rows=rows, gone=gone)  # type: ignore[arg-type]
    return changed(scene, records_read=True, **options)


def asked(scene: Evidence, count: int = 1) -> list[str]:
    """The pods that the kubelet is asked about, in that order; none: the view must be behind."""
    step = decide(changed(scene, node_read=True, count=count))
    if isinstance(step, Question) and step.ask is Ask.KUBELET:
        return [name for _, name in step.pods]
    assert step == Question(Ask.PODS)
    return []


@pytest.mark.parametrize(
    ("row_epoch", "recorded", "waits"),
    [
        (None, None, True),
        (None, frozenset(), True),
        (None, "key", False),
        (NOW_KUBELET, None, False),
        (OLD_KUBELET, None, True),
        (OLD_KUBELET, "key", False),
        (NOW_KUBELET, frozenset(), True),
    ],
)
@pytest.mark.parametrize("witnessed", [True, False])
def test_an_init_container_goes_by_the_kubelets_file_and_so_do_all_without_get(
    witnessed, row_epoch, recorded, waits
) -> None:
    role = Role.INIT if witnessed else Role.APP
    pod = named_pod(1, containers=(a_container(name="first", role=role),))
    key = ContainerKey(pod.uid, "first")
    rows = () if row_epoch is None else (msgspec.structs.replace(ROW, key=key, epoch=row_epoch),)
    known = frozenset({key}) if recorded == "key" else recorded
    scene = changed(a_scene(pod, rows=rows, lock=pod), records_read=True, listed=True)
    scene = changed(scene, recorded=known, witnessed=witnessed)

    if waits:
        assert granted(knowing(scene, holding(pod))).candidate.container.name == "first"
    else:
        refused_by(scene, RefusalReason.NO_POD_ADMITTED)


MIXED = named_pod(
    1,
    containers=(a_container(name="two", count=2), a_container(name="one")),
    groups=((a_share(uuid=G1, memory_mib=1),) * 2, (a_share(uuid=G1, memory_mib=2),)),
)


def test_once_the_kubelet_was_asked_only_the_first_without_ids_is_next() -> None:
    scene = a_scene(MIXED, lock=MIXED)
    begun = knowing(scene, holding(MIXED))
    half = knowing(scene, holding(MIXED, two=f"{G1}-0"))

    assert [] == asked(begun)
    assert "two" == granted(begun, 2).candidate.container.name
    assert "one" == granted(half).candidate.container.name
    assert [] == asked(half, 2)


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [(NOW_KUBELET, RefusalReason.NO_POD_ADMITTED), (OLD_KUBELET, RefusalReason.POD_DELETED)],
)
def test_a_kubelet_that_asked_for_the_successor_is_past_the_deleted_one(epoch, expected) -> None:
    """It has served the successor, and asks once more: for whom, if not for the one before?"""
    grave = named_pod(1, uid=named_pod(9).uid, containers=(a_container(), a_container(name="b")))
    row = msgspec.structs.replace(ROW, epoch=epoch, confirmed=True)
    scene = scene_of(POD, gone=(grave,), rows=(row,), listed=True)

    refused_by(knowing(scene, holding(grave)), expected)


def pod_with(text: str, **changes: object) -> PodView:
    """A pod annotated with that devices text."""
    return a_pod(name="train-1", annotations=annotated(text), **changes)  # type: ignore[arg-type]


def test_before_a_refusal_for_room_the_kubelet_is_asked_for_the_pod_in_the_way() -> None:
    holder = named_pod(2, phase=Phase.RUNNING)
    row = row_of(
        holder, shares=(a_share(uuid=G1, memory_mib=80000),), epoch=NOW_KUBELET, confirmed=True
    )
    pod = pod_with(f"{G1},NVIDIA,3000,30:;")
    scene = knowing(a_scene(pod, holder, rows=(row,), lock=pod), holding(pod))
    assert ask(scene) == Question(Ask.KUBELET, (holder.key,))

    granted(knowing(scene, absent=(holder,)))
    held = knowing(scene, holding(holder, main=f"{G1}-0"))
    assert ask(held) == Question(Ask.PODS)
    refused_by(changed(held, listed=True), RefusalReason.MEMORY_EXCEEDED)


WHOLE = a_gpu(index=0)


@pytest.mark.parametrize(
    ("gpu", "is_given_again"),
    [
        (a_shared_gpu(gpu=WHOLE, health=a_health(condition=Condition.BAD)), True),
        (a_shared_gpu(gpu=WHOLE, present=False), True),
        (a_shared_gpu(gpu=WHOLE, health=a_health(condition=Condition.LOST)), False),
        (a_shared_gpu(gpu=WHOLE, present=False, there=False), False),
        (a_shared_gpu(gpu=a_gpu(index=0, mig_enabled=True), present=False), False),
    ],
    ids=["bad", "filtered out since", "lost", "vanished", "in MIG mode"],
)
def test_a_replay_passes_every_gate_but_a_gpu_that_is_gone(gpu, is_given_again) -> None:
    pod = a_pod(name="train-1", annotations={}, phase=Phase.RUNNING)
    row = row_of(pod)
    scene = changed(knowing(a_scene(pod, rows=(row,)), holding(pod)), listed=True)
    scene = changed(scene, inventory=an_inventory(gpus=(gpu,)))

    if is_given_again:
        assert granted(scene).candidate.row == row
    else:
        assert Question(Ask.PODS) == ask(changed(scene, listed=False))  # another pod may be asking
        refused_by(scene, RefusalReason.BAD_GPU)


# What the kubelet's word is worth: it takes up many pods at once, and answers by name.


YOUNG = KubeletEpoch(inode=7, ctime_ns=int(NOON.timestamp()) * 10**9)
"""A kubelet that is taking up its pods."""


def many(number: int) -> tuple[PodView, ...]:
    """So many pods that a kubelet with an empty checkpoint takes up again after a reboot."""
    made = (NOON + place * dt.timedelta(seconds=1) for place in range(number))
    return tuple(named_pod(place, created=at) for place, at in enumerate(made, start=1))


def test_beside_many_pods_that_wait_only_those_that_started_are_asked_about() -> None:
    """A pod that never ran is asked for at its admission alone, and that is one at a time."""
    owner, before = named_pod(50), named_pod(51, name="train-50")
    strays = tuple(msgspec.structs.replace(pod, annotations={}) for pod in many(30))
    scene = a_scene(owner, *strays, lock=owner, gone=(before,))
    assert ask(changed(scene, records_read=True)) == Question(Ask.KUBELET, (owner.key,))
    scene = changed(knowing(scene, holding(owner)), records_read=True)
    assert granted(scene).candidate.pod == owner

    started, answered = named_pod(60, containers=(RAN,)), named_pod(61)
    old = a_scene(owner, *strays, started, answered, rows=(row_of(answered),), lock=owner)
    old = changed(knowing(old, holding(owner)), records_read=True)
    assert ask(old) == Question(Ask.KUBELET, (started.key,))
    assert ask(knowing(old, absent=(started,))) == Question(Ask.KUBELET, (answered.key,))
    assert granted(knowing(old, absent=(started, answered))).candidate.pod == owner


PROXIED = (a_container(name="proxy", count=0), a_container())
OLD = named_pod(1)
NEW = named_pod(1, uid=named_pod(9).uid, containers=PROXIED)


@pytest.mark.parametrize(
    ("pod", "answer"),
    [(NEW, holding(OLD)), (NEW, Holding("team-a", "train-1")), (OLD, holding(NEW))],
    ids=["one less", "none", "one more"],
)
def test_a_stray_pod_is_not_served_for_the_owner_whose_deleted_namesake_the_kubelet_knows(
    pod, answer
) -> None:
    scene = knowing(a_scene(pod, lock=pod), answer)

    assert ask(scene) == Question(Ask.PODS)
    refused_by(changed(scene, listed=True), RefusalReason.NO_POD_ADMITTED)


SINCE = YOUNG.since
RAN_BEFORE = {"has_run": True, "started_at": SINCE - dt.timedelta(hours=1)}
SINCE_OVER = {"has_run": True, "started_at": SINCE}
STILL_SAID = RAN_BEFORE | {"running_id": "gone"}
IDLE = KubeletStart(YOUNG, begun=frozenset())
"""Nothing of the pod ran when the kubelet started."""
BUSY = KubeletStart(YOUNG, begun=frozenset({named_pod(1).uid}))
"""Something of it did."""


@pytest.mark.parametrize(
    ("first", "second", "start", "asked"),
    [
        pytest.param({}, {}, IDLE, "a", id="never started: in order"),
        pytest.param({}, {}, BUSY, "", id="they may have been started"),
        pytest.param({}, {}, KubeletStart(YOUNG), "", id="the agent came late"),
        pytest.param(RAN_BEFORE, RAN_BEFORE, IDLE, "a", id="both dead: in order"),
        pytest.param(STILL_SAID, RAN_BEFORE, IDLE, "a", id="the status is out of date"),
        pytest.param(STILL_SAID, STILL_SAID, IDLE, "a", id="after a reboot, out of date both"),
        pytest.param(RAN_BEFORE, RAN_BEFORE, BUSY, "", id="one may have been started untold"),
        pytest.param(STILL_SAID, RAN_BEFORE, BUSY, "", id="neither is said to run"),
        pytest.param(SINCE_OVER, RAN_BEFORE, IDLE, "", id="it started and ended since"),
        pytest.param(RAN_BEFORE, SINCE_OVER, IDLE, "a", id="before one that started since"),
        pytest.param(SINCE_OVER, SINCE_OVER, IDLE, "", id="both started since"),
    ],
)
@pytest.mark.parametrize("role", [Role.SIDECAR, Role.APP])
def test_of_two_dead_containers_the_kubelet_is_asking_for_one_or_it_is_not_known(
    role: Role, first: dict, second: dict, start: KubeletStart, asked: str
) -> None:
    pod = named_pod(
        1,
        containers=(
            msgspec.structs.replace(a_container(name="a", role=role), **first),
            msgspec.structs.replace(a_container(name="b"), **second),
        ),
    )
    rows = tuple(
        row_of(pod, key=ContainerKey(pod.uid, one.name), role=one.role) for one in pod.containers
    )
    scene = changed(
        knowing(a_scene(pod, rows=rows), holding(pod)),
        kubelet=start,
        recorded=frozenset(),
        records_read=True,
        checked=frozenset({"gone"}),
        listed=True,
    )

    if asked:
        assert asked == granted(scene).candidate.container.name
        return
    sentence = refused_by(scene, RefusalReason.MANY_PODS_ADMITTED).sentence
    assert sentence.endswith("delete the pod, and its controller makes a new one.")


def test_a_container_that_ended_for_good_is_asked_for_by_later_kubelets_alone() -> None:
    kubelet = KubeletStart(KubeletEpoch(7, int(NOON.timestamp()) * 10**9))
    after, before = (
        named_pod(
            number, containers=(msgspec.structs.replace(a_container(), has_run=True, ended_at=at),)
        )
        for number, at in ((1, NOON + dt.timedelta(seconds=1)), (2, NOON))
    )

    assert [before.name] == asked(scene_of(after, before, kubelet=kubelet))


def test_a_deleted_pod_whose_successor_has_run_asks_for_nothing() -> None:
    """The kubelet admits pods in their order. PodResources would answer for the successor."""
    plain = a_container(count=0)
    ran = msgspec.structs.replace(plain, has_run=True)
    grave = named_pod(1, uid=named_pod(9).uid)

    assert [] == asked(scene_of(named_pod(1, containers=(ran,)), gone=(grave,)))
    assert asked(scene_of(named_pod(1, containers=(plain,)), gone=(grave,)))


def test_of_many_pods_taken_up_again_the_first_that_the_kubelet_knows_is_the_one() -> None:
    pods = many(30)
    rows = tuple(map(row_of, pods))
    scene = a_scene(*pods, rows=rows)
    scene = changed(scene, kubelet=KubeletStart(YOUNG, begun=frozenset()))
    assert ask(scene) == Question(Ask.RECORDS)

    recorded = frozenset(row.key for row in rows[:12])
    scene = changed(scene, recorded=recorded, records_read=True)
    assert ask(scene) == Question(Ask.KUBELET, (pods[12].key,))
    scene = knowing(scene, absent=pods[12:14])

    assert granted(knowing(scene, holding(pods[14]))).candidate.row == rows[14]


def test_pods_that_nobody_admits_keep_no_one_waiting_for_the_questions_about_them() -> None:
    """Anybody can make pods that pass for static ones; those stay while something holds them."""
    forged = tuple(msgspec.structs.replace(pod, static=True) for pod in many(60))
    stray = named_pod(61, created=NOON.replace(hour=13))
    scene = changed(a_scene(*forged, stray), records_read=True)

    assert ask(scene) == Question(Ask.KUBELET, (stray.key,))
    refused_by(
        changed(knowing(scene, holding(stray)), waited=True, node_read=True), RefusalReason.NO_LOCK
    )


def test_an_answer_with_ids_for_a_later_container_is_not_about_a_pod_that_begins() -> None:
    pod = named_pod(1, containers=(a_container(name="first"), a_container()))
    booked = holding(pod, main=f"{G1}-0")
    row = row_of(pod, key=ContainerKey(pod.uid, "first"))

    refused_by(changed(knowing(a_scene(pod), booked), listed=True), RefusalReason.NO_POD_ADMITTED)
    again = changed(knowing(a_scene(pod, rows=(row,)), booked), listed=True)
    assert granted(again).candidate.row == row
