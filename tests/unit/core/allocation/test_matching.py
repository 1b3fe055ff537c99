"""Which pod an Allocate is for: the kubelet is the witness, the lock is the right.

Who may be asking, which container of it is next, and what that gets.
"""

import datetime as dt

import msgspec
import pytest

from agent.allocate.match import UNREAD, Ask, Evidence, KubeletStart, Question, decide, rejected_pod
from agent.cluster import Phase, PodTable, PodView, Role
from agent.errors import Refusal, RefusalReason
from agent.ledger import ContainerKey, Holding, KubeletEpoch, Ledger, Row
from agent.model import Condition
from tests.builders import (
    NOON,
    a_container,
    a_gpu,
    a_health,
    a_lock,
    a_pod,
    a_row,
    a_share,
    a_shared_gpu,
    an_inventory,
)
from tests.unit.core.allocation.matching_scene import (
    G1,
    G2,
    NOW_KUBELET,
    OLD_KUBELET,
    RAN,
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


def test_a_pod_that_was_started_without_being_asked_for_is_asked_about_beside_the_owner() -> None:
    started = dead_pod(3, annotations={})
    scene = knowing(a_scene(started, POD, lock=POD), holding(POD))

    assert ask(scene) == Question(Ask.KUBELET, (started.key,))
    both = knowing(scene, holding(POD), holding(started))
    assert ask(both) == Question(Ask.PODS)
    assert granted(changed(both, listed=True, alone=True)).candidate.pod == POD
    unlocked = changed(both, listed=True, lock=None)
    assert ask(unlocked) == Question(Ask.LOCK, (POD.key,))
    assert ask(changed(unlocked, waited=True)) == Question(Ask.NODE)
    refused_by(changed(unlocked, waited=True, node_read=True), RefusalReason.MANY_PODS_ADMITTED)


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

    assert ask(scene) == Question(Ask.RUNNING, ids=frozenset({"r"}))
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


def test_a_stray_pod_is_refused_and_not_given_the_owners_share() -> None:
    scene = knowing(a_scene(STRAY, POD, lock=POD), holding(STRAY), absent=(POD,))
    assert ask(scene) == Question(Ask.LOCK, (STRAY.key,))
    assert ask(changed(scene, waited=True)) == Question(Ask.NODE)

    error = refused_by(changed(scene, waited=True, node_read=True), RefusalReason.NO_RIGHT)

    assert "team-a/train-1" in error.sentence


@pytest.mark.parametrize("dead", [1, 2, 9])
def test_dead_containers_that_nothing_tells_apart_do_not_cost_a_new_pod_its_start(dead) -> None:
    others = [dead_pod(10 + n) for n in range(dead)]
    rows = tuple(row_of(one, shares=(a_share(uuid=G2),)) for one in others)
    scene = changed(a_scene(POD, *others, rows=rows, lock=POD), records_read=True, listed=True)
    asked = knowing(scene, holding(POD), *map(holding, others))
    assert ask(asked) == Question(Ask.OTHERS)
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


# The lock is the right, whatever the times say, and a name is looked at before it is served.


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
    assert ask(changed(went, ledger=Ledger((spent,)))) == Question(Ask.LOCK, (POD.key,))
    ended = {scene.lock.value: named_pod(9).uid}  # its row is closed already
    assert ask(changed(went, used_locks=ended)) == Question(Ask.LOCK, (POD.key,))
    stray = knowing(changed(went, known={}), holding(STRAY), absent=(POD,))
    assert ask(stray) == Question(Ask.LOCK, (STRAY.key,))


def test_where_the_name_may_be_another_pods_and_the_pods_cannot_be_listed_nobody_is_served() -> (
    None
):
    returning = named_pod(1, reusable_name=True)
    scene = changed(knowing(a_scene(returning, lock=returning), holding(returning)), listed=True)
    other = changed(scene, pod_uids={returning.key: named_pod(9).uid})

    assert granted(other).candidate.pod == returning  # a LIST is newer than the GET
    for one in (other, changed(scene, pod_uids={returning.key: UNREAD})):
        assert refused_by(changed(one, list_failed=True), RefusalReason.PODS_UNKNOWN).transient


def test_behind_the_first_answer_of_its_admission_a_pod_is_not_looked_at_again() -> None:
    both = (a_container(name="a"), a_container(name="b"))
    text = f"{G1},NVIDIA,1000,10:;{G1},NVIDIA,2000,10:;"
    pod = a_pod(name="train-1", containers=both, annotations=annotated(text), reusable_name=True)
    row = a_row(pod_uid=pod.uid, pod=pod.name, container="a", epoch=NOW_KUBELET)
    scene = knowing(a_scene(pod, rows=(row,), lock=pod), holding(pod, a=f"{G1}-0"))
    scene = changed(scene, records_read=True)

    assert "b" == granted(scene).candidate.container.name
    again = changed(scene, ledger=Ledger((msgspec.structs.replace(row, epoch=OLD_KUBELET),)))
    assert ask(again) == Question(Ask.PODS)
    namesake = knowing(scene, holding(pod))  # the kubelet has no ids for what was answered
    assert ask(changed(namesake, recorded=frozenset({row.key}))) == Question(Ask.POD, (pod.key,))


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
