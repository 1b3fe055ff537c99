"""What is owed: for pods that we refused, and for locks that nobody needs any more."""

import datetime as dt

import msgspec
import pytest

from agent.cluster import Phase, PodTable, PodView, Role, Tombstone
from agent.ledger import Ledger
from agent.settle import (
    REFUSED_AT_ONCE,
    REFUSED_EVENT,
    UNCLAIMED,
    EffectKind,
    SettlementFacts,
    owed,
    refusal_text,
)
from tests.builders import NOON, a_container, a_lock, a_pod, a_pod_uid, a_row

SENTENCE = "GPU 0 is bad: XID 79; create the pod again. [HA-4002]"
MESSAGE = (
    "Pod was rejected: Allocate failed due to rpc error: code = FailedPrecondition desc = "
    f"{SENTENCE}, which is unexpected"
)
BOUND = {
    "hami.io/vgpu-node": "node-1",
    "hami.io/bind-phase": "allocating",
    "hami.io/bind-time": str(int(NOON.timestamp())),
}
LATER = NOON + dt.timedelta(seconds=10)


def rejected(**changes: object) -> PodView:
    pod = a_pod(
        annotations=BOUND,
        phase=Phase.FAILED,
        reason="UnexpectedAdmissionError",
        message=MESSAGE,
    )
    return msgspec.structs.replace(pod, **changes)


def a_scene(
    *pods: PodView,
    gone: tuple[PodView, ...] = (),
    ledger: Ledger | None = None,
    lock_stamp: dt.datetime | None = None,
    now: dt.datetime = LATER,
    synced: bool = True,
    standing: dt.timedelta = dt.timedelta(0),
) -> SettlementFacts:
    table = PodTable(
        {pod.uid: pod for pod in pods}, tuple(Tombstone(p, NOON) for p in gone), synced=synced
    )
    lock = a_lock(stamp=lock_stamp) if lock_stamp is not None else None
    return SettlementFacts(table, ledger or Ledger(), lock, now, standing)


def kinds(scene: SettlementFacts) -> list[EffectKind]:
    return [effect.kind for effect in owed(scene)]


RELEASED = [EffectKind.RELEASE_LOCK]
PROVED = [EffectKind.SETTLE_POD]
"""A patch with the pod's UID, and the lock behind it."""


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (MESSAGE, SENTENCE),
        (SENTENCE, SENTENCE),
        (f"{SENTENCE} and more [x]", SENTENCE),
        ("Pod was rejected: no healthy devices present", ""),
    ],
)
def test_our_sentence_is_found_in_the_words_of_the_kubelet(message, text):
    assert text == refusal_text(rejected(message=message))


@pytest.mark.parametrize("changes", [{"phase": Phase.PENDING}, {"reason": "OutOfcpu"}])
def test_a_pod_that_was_not_rejected_by_us_has_no_sentence(changes):
    assert "" == refusal_text(rejected(**changes))


def test_a_refused_pod_is_settled_as_failed_and_told_why():
    settle, event = owed(a_scene(rejected()))

    assert (EffectKind.SETTLE_POD, "failed", ()) == (settle.kind, settle.phase, settle.groups)
    assert (EffectKind.POST_EVENT, REFUSED_EVENT, SENTENCE) == (
        event.kind,
        event.reason,
        event.value,
    )


def test_only_the_refused_pod_is_settled():
    running = a_pod(uid=a_pod_uid(7), name="other", annotations=BOUND, phase=Phase.RUNNING)
    ended = a_pod(uid=a_pod_uid(8), name="done", annotations=BOUND, phase=Phase.FAILED)

    assert {rejected().uid} == {
        effect.pod_uid for effect in owed(a_scene(running, rejected(), ended))
    }


def test_a_pod_that_is_settled_already_is_left_alone():
    settled = {**BOUND, "hami.io/bind-phase": "failed"}

    assert () == owed(a_scene(rejected(annotations=settled)))


def test_a_pod_that_was_never_placed_is_told_as_well():
    settle, event = owed(a_scene(rejected(annotations={})))

    assert ("failed", "AllocationRefused") == (settle.phase, event.reason)


STAMPS = [NOON, NOON - dt.timedelta(days=9000), NOON + dt.timedelta(days=9000)]
BIND_TIMES = ["", "soon", "0", "99999999999", str(int(NOON.timestamp()))]
"""A tenant can write bind-time, and the scheduler's clock is not ours."""


def lock_of(scene: SettlementFacts) -> str:
    assert scene.lock is not None
    return scene.lock.value


@pytest.mark.parametrize("stamp", STAMPS)
@pytest.mark.parametrize("bind_time", BIND_TIMES)
@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.SUCCEEDED])
def test_the_lock_of_a_terminal_owner_goes_behind_a_patch_with_its_uid(phase, bind_time, stamp):
    ended = a_pod(phase=phase, annotations={**BOUND, "hami.io/bind-time": bind_time})
    scene = a_scene(ended, lock_stamp=stamp)

    (effect,) = owed(scene)

    assert (EffectKind.SETTLE_POD, ended.uid) == (effect.kind, effect.pod_uid)
    assert ("", lock_of(scene)) == (effect.phase, effect.value)


def test_a_refused_owner_is_settled_told_and_its_lock_goes():
    settle, event, release = owed(a_scene(rejected(), lock_stamp=NOON))

    assert ("failed", "") == (settle.phase, settle.value)
    assert EffectKind.POST_EVENT is event.kind
    assert ("failed", a_lock().value) == (release.phase, release.value)


@pytest.mark.parametrize("stamp", STAMPS)
@pytest.mark.parametrize("noted", [a_lock(stamp=NOON).value, "another", ""])
def test_the_lock_of_a_pod_that_was_answered_in_full_goes_by_its_text_or_behind_a_patch(
    noted, stamp
):
    """Whatever its answer noted: a late watch shows a lock that its scheduler gave up since."""
    ledger = Ledger((a_row(answered_at=NOON, lock=noted),))
    namesake = a_pod(uid=a_pod_uid(9), annotations={})
    text = a_lock(stamp=stamp).value

    scene = a_scene(a_pod(annotations=BOUND), ledger=ledger, lock_stamp=stamp)
    (effect,) = (one for one in owed(scene) if one.frees_lock)
    kind = EffectKind.RELEASE_LOCK if noted == text else EffectKind.SETTLE_POD
    assert (kind, "", text) == (effect.kind, effect.phase, effect.value)

    # Its name may be another pod's by now, which took over the lock as it is.
    for pods in ((), (namesake,)):
        assert () == owed(a_scene(*pods, ledger=ledger, lock_stamp=stamp))


def test_the_lock_of_a_namesake_that_took_it_in_the_same_second_stays():
    lock = a_lock(stamp=NOON)
    ledger = Ledger((a_row(answered_at=NOON, lock=lock.value),))
    waiting = a_pod(uid=a_pod_uid(9), annotations=BOUND)
    scene = a_scene(waiting, gone=(a_pod(annotations=BOUND),), ledger=ledger, lock_stamp=NOON)

    assert [] == kinds(scene)


def test_a_later_lock_of_an_answered_pods_name_stays():
    earlier = a_lock(stamp=NOON - dt.timedelta(seconds=5)).value
    ledger = Ledger((a_row(answered_at=NOON, lock=earlier),))
    waiting = a_pod(uid=a_pod_uid(9), annotations=BOUND)

    assert () == owed(a_scene(ledger=ledger, lock_stamp=NOON))
    assert () == owed(a_scene(waiting, ledger=ledger, lock_stamp=NOON, standing=9 * UNCLAIMED))


@pytest.mark.parametrize("stamp", STAMPS)
@pytest.mark.parametrize(
    "pods",
    [
        (),
        (a_pod(uid=a_pod_uid(9), name="other", annotations=BOUND),),
    ],
    ids=["nobody", "another pod"],
)
def test_a_lock_that_nobody_waits_for_goes_when_it_stood_before_our_eyes(pods, stamp):
    young = a_scene(*pods, lock_stamp=stamp, standing=UNCLAIMED - dt.timedelta(seconds=1))
    scene = msgspec.structs.replace(young, standing=UNCLAIMED)

    (effect,) = owed(scene)

    assert () == owed(young)
    assert (EffectKind.RELEASE_LOCK, lock_of(scene)) == (effect.kind, effect.value)
    stale = msgspec.structs.replace(scene.table, stale=True)
    assert () == owed(msgspec.structs.replace(scene, table=stale))


def test_a_pod_that_asks_us_for_nothing_is_let_alone_until_its_lock_stood_for_long():
    """Another vendor's plugin may be about to answer it: HAMi has one lock for several."""
    pod = a_pod(annotations=BOUND, containers=(a_container(count=0),))
    scene = a_scene(pod, lock_stamp=NOON)

    assert () == owed(scene)
    assert RELEASED == kinds(msgspec.structs.replace(scene, standing=UNCLAIMED))
    over = msgspec.structs.replace(pod, phase=Phase.FAILED)
    assert PROVED == kinds(a_scene(over, lock_stamp=NOON))


def test_an_owner_that_waits_keeps_its_lock_however_long():
    waiting = a_pod(annotations={})

    assert () == owed(a_scene(waiting, lock_stamp=STAMPS[1], standing=99 * UNCLAIMED))


def test_an_owner_that_was_started_without_being_asked_for_needs_no_lock():
    init = a_container(name="init", role=Role.INIT)
    first, second = (a_container(name=name, running_id=name) for name in ("a", "b"))
    started = a_pod(annotations=BOUND, phase=Phase.RUNNING, containers=(init, first, second))
    crashing = msgspec.structs.replace(a_container(name="b"), has_run=True)
    looping = msgspec.structs.replace(started, containers=(init, first, crashing))
    half = msgspec.structs.replace(started, containers=(init, first, a_container(name="b")))
    held = Ledger(rows=(a_row(container="b", answered_at=LATER),))

    def released(pod: PodView, ledger: Ledger | None = None) -> bool:
        """After a while; at once the status may be that of before a reboot."""
        young = a_scene(pod, lock_stamp=NOON, ledger=ledger)
        assert [] == kinds(young)
        return PROVED == kinds(msgspec.structs.replace(young, standing=UNCLAIMED))

    assert released(started)
    assert released(looping)
    assert not released(half)
    assert not released(half, held)


def test_no_lock_is_released_before_the_pods_are_known():
    ended = a_pod(annotations=BOUND, phase=Phase.FAILED)

    assert () == owed(a_scene(ended, lock_stamp=NOON, synced=False))


def test_a_legacy_lock_is_nobodys():
    scene = a_scene(a_pod(annotations=BOUND, phase=Phase.FAILED))

    assert () == owed(msgspec.structs.replace(scene, lock=a_lock(name="")))


def answered(*containers: str, lock: str = a_lock().value) -> Ledger:
    return Ledger(tuple(a_row(container=name, answered_at=NOON, lock=lock) for name in containers))


SUCCESS = {**BOUND, "hami.io/bind-phase": "success"}
TWO = a_pod(annotations=SUCCESS, containers=(a_container(name="a"), a_container(name="b")))


@pytest.mark.parametrize(
    ("containers", "after", "kinds_expected"),
    [
        (("a", "b"), 2.0, PROVED),
        (("a", "b"), 1.9, []),
        (("a", "b"), -3600.0, PROVED),
        (("a",), 3600.0, []),
        ((), 3600.0, []),
    ],
    ids=["long ago", "just now", "the clock was set back", "one is missing", "none"],
)
def test_the_lock_of_a_pod_answered_in_full_goes_at_once_if_a_row_notes_it_else_after_two_seconds(
    containers, after, kinds_expected
):
    now = NOON + dt.timedelta(seconds=after)
    noted, other = answered(*containers), answered(*containers, lock="another")

    assert kinds_expected == kinds(a_scene(TWO, ledger=other, lock_stamp=NOON, now=now))
    at_once = RELEASED if len(containers) == len(TWO.containers) else []
    assert at_once == kinds(a_scene(TWO, ledger=noted, lock_stamp=NOON, now=now))


def test_the_lock_of_a_half_answered_pod_that_is_over_goes_behind_a_patch_with_its_uid():
    over = msgspec.structs.replace(TWO, phase=Phase.FAILED)

    (effect,) = owed(a_scene(over, ledger=answered("a"), lock_stamp=NOON))

    assert (EffectKind.SETTLE_POD, a_lock().value) == (effect.kind, effect.value)


def test_the_lock_of_a_half_answered_pod_that_is_gone_may_be_its_successors():
    young = a_scene(ledger=answered("a"), lock_stamp=NOON)

    assert [] == kinds(young)
    assert RELEASED == kinds(msgspec.structs.replace(young, standing=UNCLAIMED))


def test_thousands_of_refused_pods_of_a_namespace_are_settled_bit_by_bit_and_hide_no_others():
    many = [
        rejected(uid=a_pod_uid(number), name=f"many-{number}", namespace="tenant")
        for number in range(2, 2000)
    ]
    settled = msgspec.structs.replace(many[0], annotations={"hami.io/bind-phase": "failed"})
    other = rejected()

    first = {effect.pod_uid for effect in owed(a_scene(*many, other))}
    then = {effect.pod_uid for effect in owed(a_scene(settled, *many[1:], other))}

    assert {*(pod.uid for pod in many[:REFUSED_AT_ONCE]), other.uid} == first
    assert {*(pod.uid for pod in many[1 : REFUSED_AT_ONCE + 1]), other.uid} == then
