"""What is owed: for pods that we refused, and for locks that nobody needs any more."""

import dataclasses
import datetime as dt

import pytest

from agent.core.ledger import EffectKind, Ledger
from agent.core.pods import Phase, PodTable, PodView, Role, Tombstone
from agent.core.settlement import (
    GRAVE_PATIENCE,
    REFUSED_EVENT,
    STARTED_PATIENCE,
    Scene,
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
    return dataclasses.replace(pod, **changes)  # type: ignore[arg-type]


def a_scene(
    *pods: PodView,
    gone: tuple[PodView, ...] = (),
    ledger: Ledger | None = None,
    lock_stamp: dt.datetime | None = None,
    now: dt.datetime = LATER,
    synced: bool = True,
    standing: dt.timedelta = GRAVE_PATIENCE,
) -> Scene:
    table = PodTable(
        {pod.uid: pod for pod in pods}, tuple(Tombstone(p, NOON) for p in gone), synced=synced
    )
    lock = a_lock(stamp=lock_stamp) if lock_stamp else None
    return Scene(table, ledger or Ledger(), lock, now, standing)


def kinds(scene: Scene) -> list[EffectKind]:
    return [effect.kind for effect in owed(scene)]


RELEASED = [EffectKind.RELEASE_LOCK]


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


def test_what_is_in_the_outbox_is_not_owed_again():
    scene = a_scene(rejected(), lock_stamp=NOON)
    ledger = Ledger()
    for effect in owed(scene):
        ledger = ledger.owe(effect)

    assert 3 == len(ledger.outbox)
    assert () == owed(dataclasses.replace(scene, ledger=ledger))


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.SUCCEEDED])
def test_the_lock_of_a_terminal_owner_is_released_whatever_its_stamp(phase):
    (effect,) = owed(a_scene(a_pod(phase=phase, annotations=BOUND), lock_stamp=NOON))

    assert (EffectKind.RELEASE_LOCK, a_lock().value) == (effect.kind, effect.value)


def test_the_lock_of_a_deleted_owner_is_released():
    assert kinds(a_scene(gone=(a_pod(annotations=BOUND),), lock_stamp=NOON)) == RELEASED


def test_a_lock_that_was_just_seen_may_be_that_of_the_successor_of_a_deleted_pod():
    young = GRAVE_PATIENCE - dt.timedelta(milliseconds=1)
    grave = a_pod(annotations={**BOUND, "hami.io/bind-time": "9999999999"})

    assert () == owed(a_scene(gone=(grave,), lock_stamp=NOON, standing=young))
    assert RELEASED == kinds(a_scene(gone=(grave,), lock_stamp=NOON))


def test_an_owner_that_was_started_without_being_asked_for_needs_no_lock():
    init = a_container(name="init", role=Role.INIT)
    first, second = (a_container(name=name, running_id=name) for name in ("a", "b"))
    started = a_pod(annotations=BOUND, phase=Phase.RUNNING, containers=(init, first, second))
    crashing = dataclasses.replace(a_container(name="b"), has_run=True)
    looping = dataclasses.replace(started, containers=(init, first, crashing))
    half = dataclasses.replace(started, containers=(init, first, a_container(name="b")))
    held = Ledger(rows=(a_row(container="b", answered_at=LATER),))

    def released(pod: PodView, ledger: Ledger | None = None) -> bool:
        """After a while; at once the status may be that of before a reboot."""
        young = a_scene(pod, lock_stamp=NOON, ledger=ledger)
        assert [] == kinds(young)
        return RELEASED == kinds(dataclasses.replace(young, standing=STARTED_PATIENCE))

    assert released(started)
    assert released(looping)
    assert not released(half)
    assert not released(half, held)


@pytest.mark.parametrize("stamp", [LATER, NOON + dt.timedelta(seconds=1)])
def test_the_lock_of_a_later_pod_of_that_name_stays(stamp):
    ended = a_pod(annotations=BOUND, phase=Phase.FAILED)

    assert () == owed(a_scene(ended, lock_stamp=stamp))
    assert () == owed(a_scene(gone=(ended,), lock_stamp=stamp))


def test_a_lock_of_a_deleted_pod_is_released_beside_a_younger_stray_of_its_name():
    stray = a_pod(uid=a_pod_uid(9), annotations={})

    assert kinds(a_scene(stray, gone=(a_pod(annotations=BOUND),), lock_stamp=NOON)) == RELEASED


@pytest.mark.parametrize("bind_time", ["", "soon"])
def test_an_owner_that_does_not_say_when_it_was_bound_keeps_its_lock(bind_time):
    ended = a_pod(annotations={**BOUND, "hami.io/bind-time": bind_time}, phase=Phase.FAILED)

    assert () == owed(a_scene(ended, lock_stamp=NOON))


def test_the_lock_of_a_pod_nobody_has_seen_stays():
    other = a_pod(uid=a_pod_uid(9), name="other", annotations=BOUND)

    assert () == owed(a_scene(gone=(other,), lock_stamp=NOON))


def test_no_lock_is_released_before_the_pods_are_known():
    ended = a_pod(annotations=BOUND, phase=Phase.FAILED)

    assert () == owed(a_scene(ended, lock_stamp=NOON, synced=False))


def test_a_legacy_lock_is_nobodys():
    scene = a_scene(a_pod(annotations=BOUND, phase=Phase.FAILED))

    assert () == owed(dataclasses.replace(scene, lock=a_lock(name="")))


def answered(*containers: str, at: dt.datetime = NOON) -> Ledger:
    return Ledger(tuple(a_row(container=name, answered_at=at) for name in containers))


TWO = a_pod(annotations=BOUND, containers=(a_container(name="a"), a_container(name="b")))


@pytest.mark.parametrize(
    ("containers", "after", "kinds_expected"),
    [
        (("a", "b"), 2.0, RELEASED),
        (("a", "b"), 1.9, []),
        (("a", "b"), -3600.0, RELEASED),
        (("a",), 3600.0, []),
        ((), 3600.0, []),
    ],
    ids=["long ago", "just now", "the clock was set back", "one is missing", "none"],
)
def test_the_lock_of_a_pod_answered_in_full_is_released_after_two_seconds(
    containers, after, kinds_expected
):
    now = NOON + dt.timedelta(seconds=after)

    assert kinds_expected == kinds(
        a_scene(TWO, ledger=answered(*containers), lock_stamp=NOON, now=now)
    )


def test_a_pod_without_gpu_containers_is_never_answered_in_full():
    pod = a_pod(annotations=BOUND, containers=(a_container(count=0),))

    assert () == owed(a_scene(pod, lock_stamp=NOON))
