"""The kubelet answers by name: of a pod that was deleted just now as of the one after it."""

import dataclasses
import datetime as dt

import pytest

from agent.core.allocation.evidence import Books, ListPods
from agent.core.cluster.pods import Phase, PodView, Role
from agent.core.errors import RefusalReason
from agent.core.state.holdings import Holding, KubeletEpoch
from agent.core.state.ledger import ContainerKey, Row
from tests.builders import NOON, a_container, a_row, a_share
from tests.unit.core.matching_scene import (
    G1,
    NOW_KUBELET,
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

YOUNG = KubeletEpoch(inode=7, ctime_ns=int(NOON.timestamp()) * 10**9)
TWO = (a_container(name="proxy", count=0), a_container())
OLD = named_pod(1)
NEW = named_pod(1, uid=named_pod(9).uid, containers=TWO)


def row_of(pod: PodView, **changes: object) -> Row:
    row = a_row(pod_uid=pod.uid, pod=pod.name, epoch=NOW_KUBELET, shares=(a_share(uuid=G1),))
    return dataclasses.replace(row, **changes)  # type: ignore[arg-type]


def test_an_answer_that_names_all_of_its_containers_is_about_the_pod() -> None:
    init = a_container(name="init", role=Role.INIT, count=0)
    whole = dataclasses.replace(NEW, containers=(init, *TWO))

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
    row = row_of(pod, key=ContainerKey(pod.uid, "first"), epoch=OLD_KUBELET)

    refused_by(changed(knowing(a_scene(pod), booked), listed=True), RefusalReason.NO_POD_ADMITTED)
    assert granted(knowing(a_scene(pod, rows=(row,)), booked)).replay == row


def test_a_namesake_that_had_ended_is_hidden_by_the_kubelet() -> None:
    ended = dataclasses.replace(OLD, phase=Phase.SUCCEEDED)
    scene = knowing(a_scene(NEW, gone=(ended,), lock=NEW), holding(NEW))

    assert granted(scene).candidate.pod == NEW


@pytest.mark.parametrize(
    ("started", "age", "refused"),
    [(1, 9, True), (-1, 9, False), (-1, 31, True)],
    ids=["it started since", "it is being admitted", "its status may be late"],
)
@pytest.mark.parametrize("role", [Role.INIT, Role.APP])
def test_of_two_dead_containers_of_one_count_the_first_is_served_at_their_admission_alone(
    role, started, age, refused
) -> None:
    since = YOUNG.since
    at = since + dt.timedelta(seconds=started)
    over = since - dt.timedelta(seconds=9)
    first = dataclasses.replace(a_container(name="first", role=role), ended_at=over)
    ran = dataclasses.replace(a_container(), has_run=True, started_at=at, stopped_at=at)
    pod = named_pod(1, containers=(first, ran))
    rows = tuple(
        row_of(pod, key=ContainerKey(pod.uid, one.name), role=one.role, epoch=OLD_KUBELET)
        for one in pod.containers
    )
    scene = changed(
        knowing(a_scene(pod, rows=rows), holding(pod)),
        books=Books(YOUNG),
        now=since + dt.timedelta(seconds=age),
        records_read=True,
        listed=True,
    )

    if not refused:
        assert "first" == granted(scene).candidate.container.name
        return
    sentence = refused_by(scene, RefusalReason.MANY_PODS_ADMITTED).sentence
    assert sentence.endswith("delete the pod, and its controller makes a new one.")
