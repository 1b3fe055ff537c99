"""The object store: versions, preconditions, deletion, watches from a bounded history."""

import asyncio

import pytest

from agent.sandbox.api_errors import (
    BadRequestError,
    GoneError,
    Json,
)
from tests.sandbox.stored import a_pod, a_store, taken


def label(pod: Json) -> Json:
    pod["metadata"]["labels"] = {"a": "b"}
    return pod


def assign(pod: Json) -> Json:
    pod["spec"]["nodeName"] = "n1"
    return pod


def test_a_created_object_gets_what_the_server_gives() -> None:
    store = a_store()

    first, second = store.create("pods", a_pod("p")), store.create("pods", a_pod("q"))

    assert ("Pod", "v1", "default") == (
        first["kind"],
        first["apiVersion"],
        first["metadata"]["namespace"],
    )
    assert "2026-08-21T06:20:39Z" == first["metadata"]["creationTimestamp"]
    assert first["metadata"]["uid"] != second["metadata"]["uid"]
    assert int(first["metadata"]["resourceVersion"]) < int(second["metadata"]["resourceVersion"])


def test_a_generated_name_is_drawn() -> None:
    store = a_store()

    names = {
        store.create("events", {"metadata": {"generateName": "e-"}})["metadata"]["name"]
        for _ in range(5)
    }

    assert 5 == len(names)
    assert {"e-"} == {name[:2] for name in names}


def test_what_the_server_gave_cannot_be_changed() -> None:
    store = a_store()
    created = store.create("pods", a_pod())

    updated = store.update("pods", "default", "p", lambda pod: pod | {"metadata": {"uid": "x"}})

    for key in ("name", "namespace", "uid", "creationTimestamp"):
        assert created["metadata"][key] == updated["metadata"][key]


def test_an_update_without_a_difference_writes_nothing() -> None:
    store = a_store()
    created = store.create("pods", a_pod())

    assert created == store.update("pods", "default", "p", lambda pod: pod)
    assert int(created["metadata"]["resourceVersion"]) == store.version


def test_an_object_that_was_read_does_not_change_by_a_later_write() -> None:
    store = a_store()
    before = store.create("pods", a_pod())

    store.update("pods", "default", "p", label)

    assert "labels" not in before["metadata"]


def test_a_failed_change_leaves_the_object_as_it_was() -> None:
    store = a_store()
    store.create("pods", a_pod())

    def fail(pod: Json) -> Json:
        pod["spec"]["half"] = True
        raise BadRequestError("no")

    with pytest.raises(BadRequestError):
        store.update("pods", "default", "p", fail)

    assert {} == store.get("pods", "default", "p")["spec"]


def test_selection_is_by_field_and_namespace() -> None:
    store = a_store()
    store.create("pods", a_pod("a", "n1"))
    store.create("pods", a_pod("b", "n2"))
    store.create("pods", a_pod("c"))

    def names(**fields: str) -> list[str]:
        selector = {key.replace("_", "."): value for key, value in fields.items()}
        return [pod["metadata"]["name"] for pod in store.select("pods", fields=selector)]

    assert ["a"] == names(spec_nodeName="n1")
    assert ["c"] == names(spec_nodeName="")
    assert ["b"] == names(metadata_name="b")
    assert ["a", "b", "c"] == names(status_phase="Pending")
    assert [] == store.select("pods", namespace="other")
    with pytest.raises(BadRequestError, match=r"field label not supported: spec\.x"):
        names(spec_x="y")
    with pytest.raises(BadRequestError, match=r"field label not supported: spec\.nodeName"):
        store.select("nodes", fields={"spec.nodeName": "n1"})


async def test_a_subscription_continues_after_a_version() -> None:
    store = a_store()
    store.create("pods", a_pod("a"))
    since = store.version
    store.create("nodes", {"metadata": {"name": "n"}})
    store.update("pods", "default", "a", label)
    store.delete("pods", "default", "a")

    changes = await taken(store, 3, since)

    assert ["MODIFIED", "MODIFIED", "DELETED"] == [change.type for change in changes]
    assert [since + 2, since + 3, since + 4] == [change.resource_version for change in changes]
    assert str(since + 4) == changes[2].object["metadata"]["resourceVersion"]


async def test_what_leaves_a_selection_is_told_as_it_last_passed() -> None:
    store = a_store()
    since = store.version
    store.create("pods", a_pod("p"))
    store.update("pods", "default", "p", label)
    store.bind("default", "p", "n1")
    store.update("pods", "default", "p", lambda pod: pod | {"spec": {"nodeName": "n2"}})

    changes = await taken(store, 2, since, spec_nodeName="n1")

    assert ["ADDED", "DELETED"] == [change.type for change in changes]
    assert "n1" == changes[1].object["spec"]["nodeName"]
    assert str(store.version) == changes[1].object["metadata"]["resourceVersion"]


async def test_a_waiting_subscriber_is_woken_and_a_cancelled_one_loses_nothing() -> None:
    store = a_store()
    subscription = store.subscribe("pods", store.version)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await anext(subscription)

    asyncio.get_running_loop().call_later(5, store.create, "pods", a_pod("late"))

    assert "late" == (await anext(subscription)).object["metadata"]["name"]


def test_a_version_older_than_the_history_is_gone() -> None:
    store = a_store(history=2)
    since = store.version
    for name in "abc":
        store.create("pods", a_pod(name))

    with pytest.raises(GoneError, match="too old resource version: 1"):
        store.subscribe("pods", since)
    store.subscribe("pods", since + 1)


async def test_forgotten_history_spares_those_who_are_up_to_date() -> None:
    store = a_store()
    current = store.subscribe("pods", store.version)
    since = store.version
    store.forget_history()

    with pytest.raises(GoneError):
        store.subscribe("pods", since)
    store.create("pods", a_pod("p"))
    assert "ADDED" == (await anext(current)).type
