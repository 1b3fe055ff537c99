"""The object store deletes as the API server does: marked first, gone when nobody stops it."""

import pytest

from agent.sandbox.api_errors import ConflictError
from agent.sandbox.store import ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock
from tests.sandbox.stored import a_pod, a_store, taken


def test_a_pod_on_a_node_is_deleted_when_the_kubelet_says_so() -> None:
    store = a_store()
    store.create("pods", a_pod("p", "n1", grace=20))

    marked = store.delete("pods", "default", "p")

    assert "2026-08-21T06:20:59Z" == marked["metadata"]["deletionTimestamp"]
    assert 20 == marked["metadata"]["deletionGracePeriodSeconds"]
    store.finalize("default", "p", uid=marked["metadata"]["uid"])
    assert [] == store.select("pods")


def test_a_second_deletion_does_not_move_the_deadline() -> None:
    store, clock = a_store(), ManualClock()
    store = ObjectStore(clock, Seeded())
    store.create("pods", a_pod("p", "n1"))
    first = store.delete("pods", "default", "p")
    clock.advance(10)

    assert first == store.delete("pods", "default", "p")


def test_the_wrong_pod_of_a_name_is_neither_deleted_nor_finalized() -> None:
    store = a_store()
    store.create("pods", a_pod("p", "n1"))

    with pytest.raises(ConflictError, match="not old"):
        store.delete("pods", "default", "p", uid="old")
    with pytest.raises(ConflictError, match="the object has been modified"):
        store.delete("pods", "default", "p", version="1")
    with pytest.raises(ConflictError):
        store.finalize("default", "p", uid="old")


async def test_a_pod_that_goes_is_told_as_being_deleted_and_then_as_deleted() -> None:
    store = a_store()
    store.create("pods", a_pod("a", "n1"))
    since = store.version

    gone = store.delete("pods", "default", "a", grace=0)

    changes = await taken(store, 2, since)
    assert ["MODIFIED", "DELETED"] == [change.type for change in changes]
    assert {0} == {change.object["metadata"]["deletionGracePeriodSeconds"] for change in changes}
    assert gone == changes[1].object
