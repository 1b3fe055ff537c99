"""A lock whose owner was deleted unseen is released; one whose owner is about to come is not."""

import dataclasses
import datetime as dt

import pytest

from agent.core.ledger import EffectKind, Ledger
from agent.core.pods import NodeLock, Phase, PodTable, PodView
from agent.core.settlement import (
    BIND_PATIENCE,
    LOCK_TIMEOUT,
    OVERDUE_PATIENCE,
    Scene,
    owed,
)
from tests.builders import NOON, a_container, a_lock, a_pod, a_pod_uid, a_row

SECOND = dt.timedelta(seconds=1)
LOCK = a_lock()


def a_scene(
    *pods: PodView,
    standing: dt.timedelta,
    age: dt.timedelta = SECOND,
    lock: NodeLock = LOCK,
) -> Scene:
    table = PodTable({pod.uid: pod for pod in pods}, synced=True)
    return Scene(table, Ledger(), lock, NOON + age, standing)


LONG = a_scene(standing=BIND_PATIENCE)


def test_a_lock_that_stood_long_without_an_owner_is_released_by_its_text():
    (effect,) = owed(LONG)

    assert EffectKind.RELEASE_LOCK is effect.kind
    assert (LOCK.value, LOCK.owner) == (effect.value, (effect.namespace, effect.pod))


@pytest.mark.parametrize(
    ("standing", "age", "released"),
    [
        (BIND_PATIENCE - SECOND, BIND_PATIENCE, False),
        (BIND_PATIENCE, -BIND_PATIENCE, True),
        (OVERDUE_PATIENCE, LOCK_TIMEOUT, True),
        (OVERDUE_PATIENCE, LOCK_TIMEOUT - SECOND, False),
        (OVERDUE_PATIENCE - SECOND, LOCK_TIMEOUT * 9, False),
    ],
    ids=["young", "stamped ahead of us", "overdue", "almost overdue", "overdue by a wrong clock"],
)
def test_an_old_stamp_shortens_the_wait_and_never_replaces_it(standing, age, released):
    assert released == bool(owed(a_scene(standing=standing, age=age)))


def test_a_bind_that_takes_as_long_as_the_scheduler_allows_is_never_robbed():
    bind, silent_watch = dt.timedelta(seconds=30), dt.timedelta(seconds=150)

    assert BIND_PATIENCE >= bind + silent_watch
    assert dt.timedelta(seconds=2) < OVERDUE_PATIENCE


@pytest.mark.parametrize("change", [{"stale": True}, {"synced": False}])
def test_no_owner_is_missed_where_the_pods_are_not_followed(change):
    table = dataclasses.replace(LONG.table, **change)

    assert () == owed(dataclasses.replace(LONG, table=table))


def test_an_owner_that_is_there_keeps_its_lock_however_long():
    waiting = a_pod(annotations={})

    assert () == owed(a_scene(waiting, standing=BIND_PATIENCE * 9, age=LOCK_TIMEOUT))


@pytest.mark.parametrize(
    "namesake",
    [a_pod(phase=Phase.FAILED), a_pod(containers=[a_container(count=0)], phase=Phase.RUNNING)],
    ids=["refused", "without a GPU"],
)
def test_a_namesake_that_waits_for_no_answer_keeps_no_lock(namesake: PodView):
    (effect,) = owed(a_scene(namesake, standing=BIND_PATIENCE))

    assert (EffectKind.RELEASE_LOCK, LOCK.value) == (effect.kind, effect.value)
    assert () == owed(a_scene(namesake, standing=BIND_PATIENCE - SECOND))


def test_the_rows_of_a_predecessor_take_no_lock_from_a_pod_of_its_name():
    ledger = Ledger((a_row(pod_uid=a_pod_uid(5)),))

    assert () == owed(dataclasses.replace(a_scene(standing=SECOND), ledger=ledger))


def test_a_legacy_lock_has_no_owner_to_be_missed():
    assert () == owed(a_scene(standing=BIND_PATIENCE, lock=a_lock(name="")))
