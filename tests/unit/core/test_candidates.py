"""Who may be asking: containers without a record at the kubelet, in its order."""

import dataclasses
import datetime as dt

import pytest

from agent.core.candidates import (
    Books,
    candidates,
    is_live,
    waiting,
)
from agent.core.holdings import Holding, KubeletEpoch
from agent.core.ledger import ContainerKey, Ledger, Row
from agent.core.pods import Phase, PodTable, PodView, Role, Tombstone
from tests.builders import G1, NOON, a_container, a_pod, a_row
from tests.unit.core.matching_scene import (
    NOW_KUBELET,
    OLD_KUBELET,
    RESOURCE,
    holding,
    named_pod,
)

BOOKS = Books(NOW_KUBELET)
POD = named_pod(1)
ROW = a_row(pod_uid=POD.uid, pod=POD.name, epoch=NOW_KUBELET)


def a_table(*pods: PodView, **changes: object) -> PodTable:
    table = PodTable({pod.uid: pod for pod in pods}, synced=True)
    return dataclasses.replace(table, **changes)  # type: ignore[arg-type]


def names(pod: PodView, *rows: Row, books: Books = BOOKS, held: Holding | None = None) -> list[str]:
    """The waiting containers of the pod."""
    by_key = {row.key: row for row in rows}
    return [one.container.name for one in waiting(pod, by_key, books, RESOURCE, held)]


@pytest.mark.parametrize(
    ("pods", "known", "books", "live"),
    [
        ((POD,), {}, BOOKS, True),
        ((), {}, BOOKS, False),
        ((dataclasses.replace(POD, phase=Phase.FAILED),), {}, BOOKS, False),
        ((POD,), {POD.key: None}, BOOKS, False),
        ((POD,), {POD.key: None}, Books(OLD_KUBELET), True),
        ((POD,), {POD.key: holding(POD)}, BOOKS, True),
    ],
    ids=["present", "gone", "terminal", "forgotten", "another kubelet", "known"],
)
def test_a_row_counts_while_its_pod_is_there_and_the_kubelet_knows_it(pods, known, books, live):
    assert live is is_live(ROW, a_table(*pods), known, books)


@pytest.mark.parametrize(
    ("confirmed", "epoch", "expected"),
    [
        (True, NOW_KUBELET, []),
        (False, NOW_KUBELET, ["main"]),
        (True, OLD_KUBELET, ["main"]),
    ],
)
def test_a_container_waits_unless_this_kubelet_confirmed_it(confirmed, epoch, expected):
    row = dataclasses.replace(ROW, confirmed=confirmed, epoch=epoch)

    assert expected == names(POD, row)


def test_where_the_kubelet_was_asked_and_names_ids_the_container_is_held():
    assert [] == names(POD, ROW, held=holding(POD, main=f"{G1}-0"))
    assert ["main"] == names(POD, ROW, held=holding(POD))


def test_where_it_names_no_ids_and_its_file_has_the_container_it_speaks_of_a_namesake():
    row = dataclasses.replace(ROW, confirmed=True)

    assert ["main"] == names(POD, row, held=holding(POD))
    assert ["main"] == names(POD, row, held=holding(POD), books=Books(NOW_KUBELET, frozenset()))
    assert [] == names(POD, row, held=holding(POD), books=Books(NOW_KUBELET, frozenset({ROW.key})))


def test_a_container_that_runs_does_not_wait_even_without_a_row():
    pod = named_pod(1, containers=(a_container(running_id="x"), a_container(name="b")))

    assert ["b"] == names(pod, books=Books(NOW_KUBELET, alive=frozenset({"x"})))
    assert ["main", "b"] == names(pod, books=Books(NOW_KUBELET, alive=frozenset({"y"})))


def test_a_container_that_ended_for_good_is_asked_for_by_later_kubelets_alone():
    met = KubeletEpoch(7, int(NOON.timestamp()) * 10**9)
    later = NOON + dt.timedelta(seconds=1)
    after, before = (
        dataclasses.replace(a_container(name=name), ended_at=at)
        for name, at in (("a", later), ("b", NOON))
    )
    pod = named_pod(1, containers=(after, before))

    assert ["b"] == names(pod, books=Books(met))


@pytest.mark.parametrize(
    ("row_epoch", "recorded", "expected"),
    [
        (None, None, ["init"]),
        (None, frozenset(), ["init"]),
        (None, "key", []),
        (NOW_KUBELET, None, []),
        (OLD_KUBELET, None, ["init"]),
        (OLD_KUBELET, "key", []),
        (NOW_KUBELET, frozenset(), ["init"]),
    ],
)
@pytest.mark.parametrize("role", [Role.INIT, Role.APP])
def test_an_init_container_goes_by_the_kubelets_file_and_so_do_all_without_get(
    role, row_epoch, recorded, expected
):
    pod = named_pod(1, containers=(a_container(name="init", role=role),))
    key = ContainerKey(pod.uid, "init")
    rows = [] if row_epoch is None else [dataclasses.replace(ROW, key=key, epoch=row_epoch)]
    known = frozenset({key}) if recorded == "key" else recorded
    books = Books(NOW_KUBELET, known, witnessed=role is Role.INIT)

    assert expected == names(pod, *rows, books=books)


def test_an_ended_init_container_waits_while_the_kubelet_has_no_record_of_it():
    containers = (
        a_container(name="init", role=Role.INIT),
        a_container(name="side", role=Role.SIDECAR, running_id="s"),
        a_container(name="app", running_id="a"),
    )
    pod = named_pod(1, containers=containers)

    alive = frozenset({"s", "a"})
    recorded = frozenset({ContainerKey(pod.uid, "init")})
    assert ["init"] == names(pod, books=Books(NOW_KUBELET, alive=alive))
    assert [] == names(pod, books=Books(NOW_KUBELET, recorded, alive))
    assert ["app"] == names(pod, books=Books(NOW_KUBELET, recorded, frozenset({"s"})))


def found(count: int, *pods: PodView, known=None, books=BOOKS, rows=(), gone=()) -> list[str]:
    """Pod/container of each candidate."""
    table = a_table(*pods, tombstones=tuple(Tombstone(pod, NOON) for pod in gone))
    return [
        f"{one.pod.name}/{one.container.name}{'!' if one.deleted else ''}"
        for one in candidates(count, table, Ledger(tuple(rows)), books, RESOURCE, known or {})
    ]


MIXED = named_pod(1, containers=(a_container(name="two", count=2), a_container(name="one")))


def test_before_the_kubelet_is_asked_any_container_of_that_count_may_be_next():
    assert ["train-1/one"] == found(1, MIXED)
    assert ["train-1/two"] == found(2, MIXED)


def test_once_the_kubelet_was_asked_only_the_first_without_ids_is_next():
    asked = {MIXED.key: holding(MIXED)}

    assert [] == found(1, MIXED, known=asked)
    assert ["train-1/two"] == found(2, MIXED, known=asked)
    assert ["train-1/one"] == found(1, MIXED, known={MIXED.key: holding(MIXED, two=f"{G1}-0")})


def test_a_kubelet_without_get_is_taken_by_its_file_as_if_it_had_been_asked():
    books = Books(NOW_KUBELET, frozenset({ContainerKey(MIXED.uid, "two")}), witnessed=False)

    assert ["train-1/one"] == found(1, MIXED, books=books)
    assert [] == found(1, MIXED, books=Books(NOW_KUBELET, frozenset(), witnessed=False))


def test_in_a_pod_that_has_started_any_container_may_be_started_again():
    containers = (*MIXED.containers, a_container(name="log", count=0, running_id="log"))
    pod = dataclasses.replace(MIXED, containers=containers)
    books = Books(NOW_KUBELET, alive=frozenset({"log"}))

    assert ["train-1/one"] == found(1, pod, known={pod.key: holding(pod)}, books=books)


def test_present_pods_come_before_deleted_ones_and_older_ones_first():
    young = named_pod(2, created=NOON.replace(hour=13))
    grave = named_pod(3, created=NOON.replace(hour=1))

    assert ["train-1/main", "train-2/main", "train-3/main!"] == found(1, young, POD, gone=(grave,))


def test_deleted_pods_that_ended_or_were_answered_ask_for_nothing():
    ended = named_pod(2, phase=Phase.FAILED)
    settled = a_pod(name="settled", annotations={"hami.io/bind-phase": "success"})

    assert [] == found(1, gone=(ended, settled, POD), rows=(ROW,))


def test_a_pod_that_asks_for_no_gpu_is_nobody():
    assert [] == found(1, named_pod(1, containers=(a_container(count=0),)))


@pytest.mark.parametrize(("epoch", "graves"), [(NOW_KUBELET, []), (OLD_KUBELET, ["train-1/main!"])])
def test_a_kubelet_that_asked_for_the_successor_is_past_the_deleted_one(epoch, graves):
    grave = dataclasses.replace(named_pod(2), name=POD.name)
    row = a_row(pod_uid=POD.uid, pod=POD.name, epoch=epoch, confirmed=True)

    assert graves == [one for one in found(1, POD, gone=(grave,), rows=(row,)) if one[-1] == "!"]
