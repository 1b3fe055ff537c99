"""`unlockedPods: legacy`: between pods without a lock is guessed; who asks last gets what is left.

A share is given twice only where none is left that could be given instead.
"""

import dataclasses
import itertools
from collections.abc import Iterable

import pytest

from agent.core.candidates import Books, Candidate
from agent.core.errors import Gate, Refusal
from agent.core.evidence import (
    AskKubelet,
    AwaitLock,
    Evidence,
    Grant,
    ListPods,
    Question,
    ReadRecords,
)
from agent.core.guess import guess
from agent.core.ledger import ContainerKey, Row
from agent.core.match_settings import MatchSettings, UnlockedPods
from agent.core.pods import Phase, PodTable, PodUid, PodView, Role
from tests.builders import NODE, NOON, a_container, a_lock, a_row, a_share
from tests.unit.core.matching_scene import (
    G1,
    NOW_KUBELET,
    OLD_KUBELET,
    SETTINGS,
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
    without_witness,
)

LEGACY = MatchSettings(node=NODE, unlocked_pods=UnlockedPods.LEGACY)
BOUND = int(NOON.timestamp())
A, B, C = named_pod(1), named_pod(2), named_pod(3)


def bound(number: int, seconds: str, phase: str = "allocating") -> PodView:
    """The pod team-a/train-N, bound so many seconds after noon."""
    when = str(BOUND + int(seconds)) if len(seconds) == 1 else seconds
    marks = {"hami.io/bind-time": when, "hami.io/bind-phase": phase}
    return named_pod(number, annotations=annotated() | marks)


def without_mark(pod: PodView, key: str) -> PodView:
    left = {name: text for name, text in pod.annotations.items() if name != key}
    return dataclasses.replace(pod, annotations=left)


def looked(scene: Evidence) -> Evidence:
    """The scene after all that could be asked was asked."""
    return changed(scene, waited=True, node_read=True, listed=True, records_read=True)


def admitted(*pods: PodView, rows: Iterable[Row] = (), **options: object) -> Evidence:
    """The kubelet admits all of these, and nobody holds the lock."""
    scene = a_scene(*pods, rows=tuple(rows), **options)  # type: ignore[arg-type]
    return looked(knowing(scene, *map(holding, pods)))


def answered(pod: PodView, **changes: object) -> Row:
    """What was answered for the pod's container to this kubelet."""
    shares = (a_share(uuid=G1),)
    facts = {"pod_uid": pod.uid, "pod": pod.name, "epoch": NOW_KUBELET, "shares": shares} | changes
    return a_row(**facts)  # type: ignore[arg-type]


def refused(scene: Evidence, gate: Gate, settings: MatchSettings = LEGACY) -> Refusal:
    return refused_by(scene, gate, settings=settings)


def served(scene: Evidence) -> PodView:
    return granted(scene, settings=LEGACY).candidate.pod


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ((bound(1, "5"), bound(2, "3")), "train-2"),
        ((bound(1, "3"), bound(2, "3")), "train-1"),
        ((bound(1, "yesterday"), bound(2, "9")), "train-2"),
        ((bound(1, "9" * 5000), bound(2, "9")), "train-2"),
        ((bound(1, "9"), bound(2, "3", phase="success")), "train-2"),
        ((bound(1, "3", phase="failed"), bound(2, "9")), "train-2"),
        ((without_mark(A, "hami.io/bind-phase"), B), "train-2"),
        ((without_mark(A, "hami.io/bind-time"), B), "train-2"),
        ((named_pod(1, annotations=annotated(node="node-b")), B), "train-2"),
        ((named_pod(1, phase=Phase.RUNNING), B), "train-2"),
        ((named_pod(1, static=True), B), "train-2"),
        ((named_pod(1, groups=None), B), "train-2"),
        ((named_pod(1, groups=((), ())), B), "train-2"),
    ],
)
@pytest.mark.parametrize("witnessed", [True, False])
def test_the_pod_that_was_bound_first_is_guessed(pods, expected: str, witnessed):
    """HAMi takes the first of those that it finds so in the order of names."""
    scene = admitted(*pods)

    assert expected == served(scene if witnessed else without_witness(scene)).name


@pytest.mark.parametrize("settings", [SETTINGS, UNIQUE], ids=["strict", "unique"])
def test_without_the_setting_nothing_is_guessed(settings: MatchSettings):
    refused(admitted(A, B), Gate.MANY_PODS_ADMITTED, settings)
    refused(without_witness(admitted(A, B)), Gate.WITNESS_SILENT, settings)


def test_whom_the_kubelet_does_not_admit_is_not_guessed():
    scene = looked(knowing(a_scene(A, B), holding(B), absent=(A,)))

    assert B == served(scene)


def test_whom_nobody_admits_is_not_served_by_its_annotations():
    """HAMi would give the share of the first in its list."""
    scene = looked(knowing(a_scene(A, B), absent=(A, B)))

    refused(scene, Gate.NO_POD_ADMITTED)


@pytest.mark.parametrize("lock", [None, a_lock(name="")], ids=["none", "nobody's"])
def test_a_lock_that_names_nobody_is_none(lock):
    assert A == served(changed(admitted(A, B), lock=lock))


def test_beside_a_lock_that_names_a_pod_nothing_is_guessed():
    """HAMi would give the share of the lock's owner to whoever asks."""
    refused(without_witness(admitted(A, B, lock=A)), Gate.WITNESS_SILENT)
    refused(admitted(B, lock=A), Gate.NO_RIGHT)


def test_before_a_guess_the_lock_is_waited_for_and_the_pods_are_listed():
    scene = changed(admitted(A, B), waited=False, listed=False)

    assert AwaitLock() == ask(scene, settings=LEGACY)
    assert ListPods() == ask(changed(scene, waited=True, node_read=True), settings=LEGACY)
    assert isinstance(ask(looked(scene), settings=LEGACY), Grant)


def test_without_the_api_server_nothing_is_guessed():
    scene = changed(admitted(A, B), list_failed=True)

    refused(scene, Gate.MANY_PODS_ADMITTED)


def test_one_pod_that_the_kubelet_confirms_is_no_guess():
    scene = changed(admitted(A), waited=False, listed=False)

    assert AwaitLock(*A.key) == ask(scene, settings=LEGACY)
    assert A == served(changed(scene, waited=True, node_read=True))


@pytest.mark.parametrize("witnessed", [True, False])
def test_one_pod_that_hami_would_not_take_is_refused_with_what_is_missing(witnessed):
    scene = admitted(without_mark(A, "hami.io/bind-phase"))

    refusal = refused(scene if witnessed else without_witness(scene), Gate.NO_LOCK)

    assert "hami.io/bind-phase" in refusal.sentence
    assert "create it again" in refusal.sentence


def test_a_pod_without_a_lock_can_be_served_under_an_old_kubelet():
    assert A == served(without_witness(admitted(A)))


def test_what_an_earlier_kubelet_was_answered_is_not_guessed_between():
    """Two containers would write into one directory."""
    scene = admitted(A, B, rows=[answered(B, epoch=OLD_KUBELET)])

    refused(scene, Gate.MANY_PODS_ADMITTED)
    refused(without_witness(scene), Gate.WITNESS_SILENT)


def test_one_replay_is_no_guess():
    scene = admitted(A, rows=[answered(A, epoch=OLD_KUBELET)])

    assert scene.ledger.rows[0] == granted(scene, settings=LEGACY).replay
    assert scene.ledger.rows[0] == granted(without_witness(scene), settings=LEGACY).replay


def test_a_deleted_pod_is_not_guessed():
    scene = looked(knowing(a_scene(B, gone=(A,)), holding(A), holding(B)))

    assert B == served(scene)


def test_where_none_of_several_is_bound_by_hami_none_is_guessed():
    pods = [without_mark(pod, "hami.io/bind-time") for pod in (A, B)]

    refused(admitted(*pods), Gate.MANY_PODS_ADMITTED)


def test_whoever_asks_after_its_share_went_astray_gets_the_one_that_is_left():
    """A asked first and was given B's share: now B asks, and A holds slices without a row."""
    scene = a_scene(A, B, rows=(answered(B),))
    scene = looked(knowing(scene, holding(A, main="GPU-1-0"), holding(B)))

    step = granted(scene, settings=LEGACY)

    assert (A, None) == (step.candidate.pod, step.replay)


def test_a_pod_in_flight_or_done_has_no_share_left():
    scene = a_scene(A, B, rows=(answered(B),))
    scene = looked(knowing(scene, holding(A, main="GPU-1-0"), holding(B)))

    replay = granted(changed(scene, claimed=frozenset({A.uid})), settings=LEGACY)
    assert B == replay.candidate.pod
    done = bound(1, "0", phase="success")
    assert B == served(changed(scene, table=PodTable({B.uid: B, done.uid: done}, synced=True)))


RUNS = dataclasses.replace(A, phase=Phase.RUNNING)


@pytest.mark.parametrize(
    ("others", "shown"),
    [((RUNS,), (holding(RUNS, main="GPU-1-0"),)), ((), ()), ((A,), ())],
    ids=["runs", "gone", "holds nothing as far as is known"],
)
def test_a_share_that_went_astray_is_given_again_where_no_other_is_left(others, shown):
    """A has B's share and waits no more, or nobody knows: B gets its own, too."""
    scene = a_scene(*others, B, rows=(answered(B),))
    absent = () if shown else others
    scene = looked(knowing(scene, *shown, holding(B), absent=absent))

    assert scene.ledger.rows[0] == granted(scene, settings=LEGACY).replay


def test_between_several_whose_answers_went_astray_none_is_guessed():
    scene = admitted(B, C, rows=[answered(B), answered(C)])

    refused(scene, Gate.MANY_PODS_ADMITTED)


def test_another_count_is_no_share_that_is_left():
    other = named_pod(1, containers=(a_container(count=2),))
    scene = a_scene(other, B, rows=(answered(B),))
    scene = looked(knowing(scene, holding(other, main="GPU-1-0"), holding(B)))

    assert B == served(scene)


def test_a_pod_that_was_answered_here_is_asked_again_where_nothing_else_is_left():
    scene = admitted(B, rows=[answered(B)])

    assert B == served(scene)
    assert B == served(without_witness(scene, recorded=frozenset()))


def test_a_decision_of_nobody_is_none():
    assert guess(1, (), a_scene(), LEGACY) is None
    found = (Candidate(A, A.containers[0]),)
    assert guess(1, found, a_scene(A), SETTINGS) is None


def names(pods: tuple[PodView, ...]) -> str:
    return " ".join(pod.name for pod in pods)


class Kubelet:
    """A kubelet that admits pods in its own order and says of them what its version can."""

    def __init__(self, pods: tuple[PodView, ...], *, witnessed: bool, ahead: int) -> None:
        self._pods = pods
        self._witnessed = witnessed
        self._ahead = ahead
        self._held: set[PodUid] = set()

    def admit(self, asking: PodView, rows: tuple[Row, ...]) -> Grant:
        """It asks for this pod; up to `ahead` others are on its books already."""
        place = self._pods.index(asking)
        known = self._pods[: place + 1 + self._ahead]
        scene = looked(changed(a_scene(*self._pods, rows=rows), waited=False, listed=False))
        recorded = frozenset(ContainerKey(uid, "main") for uid in self._held)
        books = Books(NOW_KUBELET, recorded, witnessed=self._witnessed)
        step: Question | Grant = AwaitLock()
        scene = changed(scene, books=books)
        while not isinstance(step, Grant):
            step = ask(scene, settings=LEGACY)
            if isinstance(step, AskKubelet):
                pod = next(one for one in self._pods if one.name == step.name)
                ids = {"main": "GPU-1-0"} if pod.uid in self._held else {}
                scene = (
                    knowing(scene, holding(pod, **ids))
                    if pod in known
                    else knowing(scene, absent=(pod,))
                )
            assert not isinstance(step, ReadRecords | ListPods)
        self._held.add(asking.uid)
        return step


@pytest.mark.parametrize("order", list(itertools.permutations((A, B, C))), ids=names)
@pytest.mark.parametrize("role", [Role.INIT, Role.APP])
@pytest.mark.parametrize(("witnessed", "ahead"), [(True, 2), (True, 0), (False, 2)])
def test_in_whatever_order_pods_ask_each_share_is_given_once(order, role, witnessed, ahead):
    """All wait at once: with a wrong guess they swap, and none shares a directory with another."""
    asking = tuple(
        dataclasses.replace(
            pod, containers=(a_container(role=role), a_container(name="b", count=0))
        )
        for pod in order
    )
    kubelet = Kubelet(asking, witnessed=witnessed, ahead=ahead)
    rows: tuple[Row, ...] = ()
    for pod in asking:
        step = kubelet.admit(pod, rows)
        assert step.replay is None
        rows = (*rows, answered(step.candidate.pod, role=role, shares=step.shares))

    assert {pod.uid for pod in asking} == {row.key.pod_uid for row in rows}
    if witnessed and not ahead:
        assert [pod.uid for pod in asking] == [row.key.pod_uid for row in rows]
