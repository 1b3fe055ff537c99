"""Which pod an Allocate is for: the kubelet is the witness, the lock is the right."""

import datetime as dt

import msgspec
import pytest

from agent.allocate.match import UNREAD, Ask, Evidence, KubeletStart, Question, rejected_pod
from agent.cluster import Phase, PodTable
from agent.errors import Refusal, RefusalReason
from agent.ledger import Ledger, Row
from tests.builders import a_container, a_lock, a_pod, a_row, a_share
from tests.unit.core.allocation.matching_scene import (
    G1,
    G2,
    NOW_KUBELET,
    OLD_KUBELET,
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
