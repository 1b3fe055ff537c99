"""What is owed: to pods that were answered or refused, and for locks that nobody needs any more."""

import datetime as dt
from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from agent.cluster import Phase, PodTable, PodView, Role, Tombstone
from agent.ledger import KubeletEpoch, Ledger
from agent.settle import (
    REFUSED_AT_ONCE,
    UNCLAIMED,
    Effect,
    SettlementFacts,
    pending_effects,
    refusal_text,
)
from tests.builders import NOON, a_container, a_lock, a_pod, a_pod_uid, a_row

SENTENCE = "GPU 0 is bad: XID 79; create the pod again. [HA-4002]"
MESSAGE = (
    "Pod was rejected: Allocate failed due to rpc error: code = FailedPrecondition desc = "
    f"{SENTENCE}, which is unexpected"
)
PHASE = "hami.io/bind-phase"
BOUND = {
    "hami.io/vgpu-node": "node-1",
    PHASE: "allocating",
    "hami.io/bind-time": str(int(NOON.timestamp())),
}
SUCCESS = {**BOUND, PHASE: "success"}
LATER = NOON + dt.timedelta(seconds=10)
LONG = 9 * UNCLAIMED
POD = a_pod(annotations=BOUND)


def changed(pod: PodView, **changes: object) -> PodView:
    return replace(pod, **changes)


def rejected(**changes: object) -> PodView:
    """A pod that we refused."""
    status = {"phase": Phase.FAILED, "reason": "UnexpectedAdmissionError", "message": MESSAGE}
    return changed(POD, **{**status, **changes})


def a_scene(
    *pods: PodView,
    gone: tuple[PodView, ...] = (),
    ledger: Ledger | None = None,
    lock_stamp: dt.datetime | None = NOON,
    standing: dt.timedelta = dt.timedelta(0),
    **table: object,
) -> SettlementFacts:
    """A scene in which train-0 has the lock since NOON, unless told otherwise."""
    seen = PodTable(
        {pod.uid: pod for pod in pods}, tuple(Tombstone(p, NOON) for p in gone), synced=True
    )
    lock = None if lock_stamp is None else a_lock(stamp=lock_stamp)
    seen = replace(seen, **table)
    return SettlementFacts(seen, ledger or Ledger(), lock, LATER, standing)


def told(effects: Iterable[Effect]) -> list[str]:
    """Each effect in words: its kind, its phase, and whether it removes a lock."""
    return [
        " ".join(filter(None, (one.kind.value, one.phase, "+ lock" * bool(one.lock))))
        for one in effects
    ]


RELEASED = ["release-lock + lock"]
PROVED = ["settle-pod + lock"]
"""A patch with the pod's UID, and the lock behind it."""


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, SENTENCE),
        ({"message": SENTENCE}, SENTENCE),
        ({"message": f"{SENTENCE} and more [x]"}, SENTENCE),
        ({"message": "Pod was rejected: no healthy devices present"}, ""),
        ({"phase": Phase.PENDING}, ""),
        ({"reason": "OutOfcpu"}, ""),
    ],
)
def test_our_sentence_is_found_in_the_words_of_the_kubelet(changes, text):
    assert text == refusal_text(rejected(**changes))


STAMPS = [NOON, NOON - dt.timedelta(days=9000), NOON + dt.timedelta(days=9000)]


def answered(*containers: str, lock: str = a_lock().value) -> Ledger:
    return Ledger(tuple(a_row(container=name, answered_at=NOON, lock=lock) for name in containers))


TWO = a_pod(annotations=SUCCESS, containers=(a_container(name="a"), a_container(name="b")))


@pytest.mark.parametrize(
    ("containers", "after", "expected"),
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
    containers, after, expected
):
    def at_last(ledger: Ledger) -> list[str]:
        now = NOON + dt.timedelta(seconds=after)
        return told(pending_effects(replace(a_scene(TWO, ledger=ledger), now=now)))

    assert expected == at_last(answered(*containers, lock="another"))
    at_once = RELEASED if len(containers) == len(TWO.containers) else []
    assert at_once == at_last(answered(*containers))


NAMESAKE = a_pod(uid=a_pod_uid(9), annotations=BOUND)
EARLIER = answered("main", lock=a_lock(stamp=NOON - dt.timedelta(seconds=5)).value)
BARE = a_pod(annotations=BOUND, containers=(a_container(count=0),))
OVER = changed(TWO, phase=Phase.FAILED)
OTHER = a_pod(uid=a_pod_uid(9), name="other", annotations=BOUND)


@pytest.mark.parametrize(
    ("pods", "seen", "at_once", "after_long"),
    [
        # A namesake that took the lock in the same second, or a later one.
        ([NAMESAKE], {"gone": (POD,), "ledger": answered("main")}, [], []),
        ([NAMESAKE], {"ledger": EARLIER}, [], []),
        ([], {"ledger": EARLIER}, [], RELEASED),
        # Nobody waits for it.
        *(([], {"lock_stamp": stamp}, [], RELEASED) for stamp in STAMPS),
        *(([OTHER], {"lock_stamp": stamp}, [], RELEASED) for stamp in STAMPS),
        ([], {"stale": True}, [], []),
        # Another vendor's plugin may be about to answer it: HAMi has one lock for several.
        ([BARE], {}, [], RELEASED),
        ([changed(BARE, phase=Phase.FAILED)], {}, PROVED, PROVED),
        # An owner that waits, however long.
        ([changed(POD, annotations={})], {"lock_stamp": STAMPS[1]}, [], []),
        # A half-answered pod that is over, or gone: the lock may be its successor's.
        ([OVER], {"ledger": answered("a")}, PROVED, PROVED),
        ([], {"ledger": answered("a")}, PROVED, RELEASED),
        ([], {"ledger": answered("a"), "stale": True}, [], []),
    ],
)
def test_a_lock_goes_when_nobody_can_need_it_at_once_or_when_it_stood_before_our_eyes(
    pods, seen, at_once, after_long
):
    scene = a_scene(*pods, **seen)
    young = replace(scene, standing=UNCLAIMED - dt.timedelta(seconds=1))
    assert at_once == told(pending_effects(young))
    assert after_long == told(pending_effects(replace(scene, standing=LONG)))


def test_an_owner_that_was_started_without_being_asked_for_needs_no_lock():
    init = a_container(name="init", role=Role.INIT)
    first, second = (a_container(name=name, running_id=name) for name in ("a", "b"))
    started = a_pod(annotations=BOUND, phase=Phase.RUNNING, containers=(init, first, second))
    crashing = replace(a_container(name="b"), has_run=True)
    looping = changed(started, containers=(init, first, crashing))
    half = changed(started, containers=(init, first, a_container(name="b")))
    held = Ledger(rows=(a_row(container="b", answered_at=LATER),))

    for pod, ledger, goes in (
        (started, None, True),
        (looping, None, True),
        (half, None, False),
        (half, held, False),
    ):
        # At once the status may be that of before a reboot.
        assert [] == told(pending_effects(a_scene(pod, ledger=ledger)))
        after = told(pending_effects(a_scene(pod, ledger=ledger, standing=UNCLAIMED)))
        assert (PROVED if goes else []) == after


def test_thousands_of_refused_pods_of_a_namespace_are_settled_bit_by_bit_and_hide_no_others():
    many = [
        rejected(uid=a_pod_uid(number), name=f"many-{number}", namespace="tenant")
        for number in range(2, 2000)
    ]
    settled = changed(many[0], annotations={PHASE: "failed"})
    other = rejected()

    first = {one.pod_uid for one in pending_effects(a_scene(*many, other, lock_stamp=None))}
    then = {
        one.pod_uid for one in pending_effects(a_scene(settled, *many[1:], other, lock_stamp=None))
    }

    assert {*(pod.uid for pod in many[:REFUSED_AT_ONCE]), other.uid} == first
    assert {*(pod.uid for pod in many[1 : REFUSED_AT_ONCE + 1]), other.uid} == then


def test_a_container_that_ended_under_the_kubelet_that_was_answered_needs_no_answer():
    epoch = KubeletEpoch(7, int(NOON.timestamp() * 1e9))
    init = replace(a_container(name="a", role=Role.INIT), ended_at=LATER)
    pod = changed(POD, containers=(init, a_container(name="b")))

    def owed(answered: KubeletEpoch) -> list[str]:
        ledger = Ledger((a_row(container="b", epoch=answered),))
        return told(pending_effects(a_scene(pod, ledger=ledger, lock_stamp=None)))

    assert ["settle-pod success"] == owed(epoch)
    assert [] == owed(KubeletEpoch(7, epoch.ctime_ns + 60 * 10**9))
