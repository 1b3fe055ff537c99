"""Which pod an Allocate is for: the kubelet is the witness, the lock is the right."""

import datetime as dt

import pytest

from agent.allocate.match import Ask, Evidence, Question, rejected_pod
from agent.cluster import PodTable
from agent.errors import Refusal, RefusalReason
from agent.ledger import Ledger, Row
from tests.builders import a_lock, a_row
from tests.unit.core.allocation.matching_scene import (
    SETTINGS,
    UNIQUE,
    a_scene,
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


def test_a_stray_pod_is_refused_and_not_given_the_owners_share() -> None:
    scene = knowing(a_scene(STRAY, POD, lock=POD), holding(STRAY), absent=(POD,))
    assert ask(scene) == Question(Ask.LOCK, (STRAY.key,))
    assert ask(changed(scene, waited=True)) == Question(Ask.NODE)

    error = refused_by(changed(scene, waited=True, node_read=True), RefusalReason.NO_RIGHT)

    assert "team-a/train-1" in error.sentence


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


def test_an_old_kubelet_serves_only_a_lock_owner_without_company_after_a_list() -> None:
    alone = without_witness(a_scene(POD, lock=POD))
    unlocked = changed(alone, lock=None, listed=True)
    row = row_of(POD)
    again = without_witness(a_scene(POD, rows=(row,), lock=POD))
    assert ask(alone) == Question(Ask.PODS)
    for scene in (alone, again):
        refused_by(changed(scene, list_failed=True), RefusalReason.PODS_UNKNOWN)
    assert granted(changed(alone, listed=True)).candidate.pod == POD
    assert granted(changed(again, listed=True)).candidate.row == row
    # A first answer waits for the lock.
    assert ask(unlocked) == Question(Ask.LOCK, (POD.key,))
    assert ask(changed(unlocked, waited=True)) == Question(Ask.NODE)
    read = changed(unlocked, waited=True, node_read=True)
    refused_by(read, RefusalReason.NO_LOCK)
    refused_by(changed(read, lock=a_lock(name="other")), RefusalReason.NO_RIGHT)

    for settings in (SETTINGS, UNIQUE):
        beside = changed(without_witness(a_scene(POD, named_pod(3), lock=POD)), listed=True)
        sentence = refused_by(beside, RefusalReason.WITNESS_SILENT, settings=settings).sentence
        assert sentence.endswith("upgrade the kubelet to 1.34.")


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
