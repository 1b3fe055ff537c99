"""What the kubelet's word is worth: it takes up many pods at once, and answers by name."""

import datetime as dt

import msgspec
import pytest

from agent.allocate.candidates import AskKubelet, KubeletStart, KubeletView, ListPods, ReadRecords
from agent.cluster import Phase, PodView, Role
from agent.errors import RefusalReason
from agent.ledger import ContainerKey, Holding, KubeletEpoch, Row
from tests.builders import NOON, a_container, a_row, a_share
from tests.unit.core.allocation.matching_scene import (
    G1,
    OLD_KUBELET,
    a_scene,
    ask,
    changed,
    granted,
    holding,
    knowing,
    named_pod,
    refused_by,
)


def row_of(pod: PodView, **changes: object) -> Row:
    row = a_row(pod_uid=pod.uid, pod=pod.name, epoch=OLD_KUBELET, shares=(a_share(uuid=G1),))
    return msgspec.structs.replace(row, **changes)


YOUNG = KubeletEpoch(inode=7, ctime_ns=int(NOON.timestamp()) * 10**9)
"""A kubelet that is taking up its pods."""


def many(number: int) -> tuple[PodView, ...]:
    """So many pods that a kubelet with an empty checkpoint takes up again after a reboot."""
    made = (NOON + place * dt.timedelta(seconds=1) for place in range(number))
    return tuple(named_pod(place, created=at) for place, at in enumerate(made, start=1))


def test_of_many_pods_taken_up_again_the_first_that_the_kubelet_knows_is_the_one() -> None:
    pods = many(30)
    rows = tuple(map(row_of, pods))
    scene = a_scene(*pods, rows=rows)
    start = KubeletStart(begun=frozenset())
    young = msgspec.structs.replace(scene.kubelet, epoch=YOUNG, start=start)
    scene = changed(scene, kubelet=young)
    assert ask(scene) == ReadRecords()

    recorded = frozenset(row.key for row in rows[:12])
    kubelet = msgspec.structs.replace(scene.kubelet, recorded=recorded)
    scene = changed(scene, kubelet=kubelet, records_read=True)
    assert ask(scene) == AskKubelet(*pods[12].key)
    scene = knowing(scene, absent=pods[12:14])

    assert granted(knowing(scene, holding(pods[14]))).replay == rows[14]


def test_dead_containers_of_many_pods_that_were_taken_up_are_not_guessed_between() -> None:
    at = NOON + dt.timedelta(seconds=5)
    ran = msgspec.structs.replace(a_container(), has_run=True, started_at=at)
    pods = tuple(msgspec.structs.replace(pod, containers=(ran,)) for pod in many(10))
    scene = a_scene(*pods, rows=tuple(map(row_of, pods)))
    scene = changed(scene, kubelet=KubeletView(YOUNG), records_read=True)
    assert ask(scene) == AskKubelet(*pods[0].key)

    refused_by(
        changed(knowing(scene, *map(holding, pods)), listed=True), RefusalReason.MANY_PODS_ADMITTED
    )


def test_a_pod_with_a_running_container_is_asked_about_however_many_there_are() -> None:
    runs = msgspec.structs.replace(a_container(name="b"), running_id="r")
    pods = (
        *many(29),
        named_pod(30, containers=(a_container(), runs), created=NOON.replace(hour=13)),
    )
    rows = (*map(row_of, pods[:29]), row_of(pods[29], epoch=KubeletEpoch(7, 3)))
    scene = a_scene(*pods, rows=rows)
    start = KubeletStart(begun=frozenset({pods[29].uid}))
    kubelet = KubeletView(YOUNG, frozenset(), frozenset({"r"}), start=start)
    scene = changed(scene, kubelet=kubelet, records_read=True, checked=frozenset({"r"}))

    first = knowing(scene, holding(pods[0]))
    assert ask(first) == AskKubelet(*pods[29].key)
    assert granted(knowing(first, absent=pods[29:])).replay == rows[0]


def test_beside_many_pods_that_wait_only_those_that_started_are_asked_about() -> None:
    """A pod that never ran is asked for at its admission alone, and that is one at a time."""
    owner, before = named_pod(50), named_pod(51, name="train-50")
    strays = tuple(msgspec.structs.replace(pod, annotations={}) for pod in many(30))
    scene = a_scene(owner, *strays, lock=owner, gone=(before,))
    assert ask(changed(scene, records_read=True)) == AskKubelet(*owner.key)
    scene = changed(knowing(scene, holding(owner)), records_read=True)
    assert granted(scene).candidate.pod == owner

    dead = msgspec.structs.replace(a_container(), has_run=True)
    started, answered = named_pod(60, containers=(dead,)), named_pod(61)
    old = a_scene(owner, *strays, started, answered, rows=(row_of(answered),), lock=owner)
    old = changed(knowing(old, holding(owner)), records_read=True)
    assert ask(old) == AskKubelet(*started.key)
    assert ask(knowing(old, absent=(started,))) == AskKubelet(*answered.key)
    assert granted(knowing(old, absent=(started, answered))).candidate.pod == owner


def test_long_after_the_kubelet_began_many_that_ran_are_asked_about_one_by_one() -> None:
    """What died just now may look as if it were taken up again: its status is late."""
    ran = (a_container(running_id="gone"),)
    pods = tuple(msgspec.structs.replace(pod, containers=ran) for pod in many(10))
    scene = a_scene(*pods, rows=tuple(map(row_of, pods)))
    scene = changed(scene, records_read=True, checked=frozenset({"gone"}))

    assert ask(knowing(scene, holding(pods[0]))) == AskKubelet(*pods[1].key)


def test_pods_that_nobody_admits_keep_no_one_waiting_for_the_questions_about_them() -> None:
    """Anybody can make pods that pass for static ones; those stay while something holds them."""
    forged = tuple(msgspec.structs.replace(pod, static=True) for pod in many(60))
    stray = named_pod(61, created=NOON.replace(hour=13))
    scene = changed(a_scene(*forged, stray), records_read=True)

    assert ask(scene) == AskKubelet(*stray.key)
    refused_by(
        changed(knowing(scene, holding(stray)), waited=True, node_read=True), RefusalReason.NO_LOCK
    )


TWO = (a_container(name="proxy", count=0), a_container())
OLD = named_pod(1)
NEW = named_pod(1, uid=named_pod(9).uid, containers=TWO)


def test_an_answer_that_names_all_of_its_containers_is_about_the_pod() -> None:
    init = a_container(name="init", role=Role.INIT, count=0)
    whole = msgspec.structs.replace(NEW, containers=(init, *TWO))

    for pod in (NEW, whole):
        scene = changed(a_scene(pod, lock=pod), records_read=True)
        assert granted(knowing(scene, holding(NEW))).candidate.pod == pod


@pytest.mark.parametrize(
    ("pod", "answer"),
    [
        (NEW, holding(OLD)),
        (NEW, Holding("team-a", "train-1")),
        (OLD, holding(NEW)),
    ],
    ids=["one less", "none", "one more"],
)
def test_a_stray_pod_is_not_served_for_the_owner_whose_deleted_namesake_the_kubelet_knows(
    pod, answer
) -> None:
    scene = knowing(a_scene(pod, lock=pod), answer)

    assert ask(scene) == ListPods()
    refused_by(changed(scene, listed=True), RefusalReason.NO_POD_ADMITTED)


def test_an_answer_with_ids_for_a_later_container_is_about_another_pod_than_one_that_begins() -> (
    None
):
    pod = named_pod(1, containers=(a_container(name="first"), a_container()))
    booked = holding(pod, main=f"{G1}-0")
    row = row_of(pod, key=ContainerKey(pod.uid, "first"))

    refused_by(changed(knowing(a_scene(pod), booked), listed=True), RefusalReason.NO_POD_ADMITTED)
    again = changed(knowing(a_scene(pod, rows=(row,)), booked), listed=True)
    assert granted(again).replay == row


def test_a_namesake_that_had_ended_is_hidden_by_the_kubelet() -> None:
    ended = msgspec.structs.replace(OLD, phase=Phase.SUCCEEDED)
    scene = knowing(a_scene(NEW, gone=(ended,), lock=NEW), holding(NEW))

    assert granted(scene).candidate.pod == NEW


SINCE = YOUNG.since
RAN_BEFORE = {"has_run": True, "started_at": SINCE - dt.timedelta(hours=1)}
SINCE_OVER = {"has_run": True, "started_at": SINCE}
STILL_SAID = RAN_BEFORE | {"running_id": "gone"}
IDLE = KubeletStart(begun=frozenset())
"""Nothing of the pod ran when the kubelet started."""
BUSY = KubeletStart(begun=frozenset({named_pod(1).uid}))
"""Something of it did."""


@pytest.mark.parametrize(
    ("first", "second", "start", "asked"),
    [
        pytest.param({}, {}, IDLE, "a", id="never started: in order"),
        pytest.param({}, {}, BUSY, "", id="they may have been started"),
        pytest.param({}, {}, KubeletStart(), "", id="the agent came late"),
        pytest.param(RAN_BEFORE, RAN_BEFORE, IDLE, "a", id="both dead: in order"),
        pytest.param(STILL_SAID, RAN_BEFORE, IDLE, "a", id="the status is out of date"),
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
        kubelet=KubeletView(YOUNG, frozenset(), start=start),
        records_read=True,
        checked=frozenset({"gone"}),
        listed=True,
    )

    if asked:
        assert asked == granted(scene).candidate.container.name
        return
    sentence = refused_by(scene, RefusalReason.MANY_PODS_ADMITTED).sentence
    assert sentence.endswith("delete the pod, and its controller makes a new one.")


def test_after_a_reboot_they_are_asked_for_in_order_unless_they_were_started_since() -> None:
    def scene(**status: object):
        ran = tuple(
            msgspec.structs.replace(a_container(name=name), **status) for name in ("a", "b")
        )
        pod = named_pod(1, containers=ran)
        rows = tuple(row_of(pod, key=ContainerKey(pod.uid, one.name)) for one in ran)
        kubelet = KubeletView(YOUNG, frozenset(), start=IDLE)
        base = knowing(a_scene(pod, rows=rows), holding(pod))
        return changed(
            base, kubelet=kubelet, records_read=True, checked=frozenset({"gone"}), listed=True
        )

    assert "a" == granted(scene(**STILL_SAID)).candidate.container.name
    refused_by(scene(**SINCE_OVER), RefusalReason.MANY_PODS_ADMITTED)
