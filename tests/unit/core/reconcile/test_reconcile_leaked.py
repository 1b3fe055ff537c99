"""Which container directories no live container can hold."""

import datetime as dt

import msgspec
import pytest

from agent.cluster import PodTable, Tombstone
from agent.ledger import Ledger, Row
from agent.reconcile.rules import LEAKED_AFTER, ReconcileFacts, leaked
from tests.builders import NOON, a_pod_uid, a_row
from tests.unit.core.allocation.matching_scene import NOW_KUBELET
from tests.unit.core.allocation.plain_scene import a_plain_row
from tests.unit.core.reconcile.test_reconcile import IDS, POD, held

STRANGER = f"{a_pod_uid(7)}_main"
OWN = f"{POD.uid}_main"
A_VIEW = ReconcileFacts(PodTable({POD.uid: POD}, synced=True), (), NOW_KUBELET, NOON, complete=True)


def leftover(
    view: ReconcileFacts = A_VIEW, *rows: Row, age: dt.timedelta = LEAKED_AFTER
) -> tuple[str, ...]:
    return leaked({OWN: age, STRANGER: age}, Ledger(rows), view)


def test_a_directory_of_no_pod_and_no_row_is_leaked_after_a_grace():
    assert (STRANGER,) == leftover()
    assert () == leftover(age=LEAKED_AFTER - dt.timedelta(seconds=1))
    assert () == leftover(age=-LEAKED_AFTER)


def test_a_directory_of_any_container_of_a_pod_with_a_row_is_not_leaked():
    assert () == leftover(A_VIEW, a_row(pod_uid=a_pod_uid(7), container="other"))


def test_a_directory_of_plain_mode_is_left_to_plain_mode():
    answer = a_plain_row()
    names = {STRANGER: LEAKED_AFTER, f"{answer.key.pod_uid}_plain": LEAKED_AFTER}

    assert (STRANGER,) == leaked(names, Ledger(), A_VIEW)
    assert (STRANGER,) == leaked(names, Ledger((answer,)), A_VIEW)


def test_a_container_that_is_called_plain_leaks_as_any_other():
    name = f"{a_pod_uid(7)}_plain"

    assert (name,) == leaked({name: LEAKED_AFTER}, Ledger(), A_VIEW)


def test_a_directory_of_a_deleted_pod_is_not_leaked_while_it_is_remembered():
    stone = Tombstone(msgspec.structs.replace(POD, uid=a_pod_uid(7)), NOON)
    view = msgspec.structs.replace(A_VIEW, table=PodTable({POD.uid: POD}, (stone,), synced=True))

    assert () == leftover(view)


@pytest.mark.parametrize(
    "changes",
    [
        {"complete": False},
        {"table": PodTable()},
        {"table": PodTable(synced=True, stale=True)},
        {"holdings": (held(msgspec.structs.replace(POD, name="forgotten")),)},
    ],
    ids=["a partial look", "no list yet", "the watch is down", "the kubelet knows more pods"],
)
def test_nothing_is_leaked_on_half_a_view(changes):
    assert () == leftover(msgspec.structs.replace(A_VIEW, **changes))


def test_pods_that_both_know_hinder_no_search():
    assert (STRANGER,) == leftover(msgspec.structs.replace(A_VIEW, holdings=(held(POD, *IDS),)))
