"""The object store: versions, preconditions, deletion, watches from a bounded history."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sandbox.api_errors import (
    BadRequestError,
    ConflictError,
    GoneError,
    InvalidError,
    Json,
)
from agent.sandbox.patching import json_patch, merge_patch, strategic_merge_patch
from agent.sandbox.store import ObjectStore
from tests.fakes.api_client import connected
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock
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


# The object store deletes as the API server does: marked first, gone when nobody stops it.


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


# The three kinds of patch.

VALUES = st.recursive(
    st.integers() | st.booleans() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4)


@pytest.mark.parametrize(
    ("target", "patch", "expected"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": ["c", "d"]}, {"a": ["c", "d"]}),
        ({"a": {"b": 1}}, {"a": {"b": None, "c": 2}}, {"a": {"c": 2}}),
        ({"a": "x"}, {"a": {"b": {"c": None}}}, {"a": {"b": {}}}),
    ],
)
def test_a_merge_patch_merges_maps_and_replaces_the_rest(
    target: Json, patch: Json, expected: Json
) -> None:
    assert expected == merge_patch(target, patch)


@given(OBJECTS, OBJECTS)
def test_a_merge_patch_applied_twice_is_the_same_as_once(target: Json, patch: Json) -> None:
    once = merge_patch(target, patch)

    assert once == merge_patch(once, patch)
    assert patch == merge_patch({}, patch)


def test_a_strategic_patch_merges_conditions_by_type() -> None:
    target = {"conditions": [{"type": "A", "status": "True"}, {"type": "B", "status": "True"}]}
    patch = {
        "$setElementOrder/conditions": [{"type": "A"}, {"type": "B"}],
        "conditions": [{"type": "B", "status": "False"}, {"type": "C", "status": "True"}],
    }

    merged = strategic_merge_patch(target, patch)

    states = [(entry["type"], entry["status"]) for entry in merged["conditions"]]
    assert [("A", "True"), ("B", "False"), ("C", "True")] == states


def test_a_strategic_patch_treats_annotations_as_a_merge_patch_does() -> None:
    target = {"metadata": {"annotations": {"a": "1", "b": "2"}}}

    merged = strategic_merge_patch(target, {"metadata": {"annotations": {"a": None, "c": "3"}}})

    assert {"metadata": {"annotations": {"b": "2", "c": "3"}}} == merged


def test_a_strategic_patch_obeys_delete() -> None:
    target = {"spec": {"x": 1, "containers": [{"name": "a"}, {"name": "b"}]}}
    deletion = {"spec": {"containers": [{"name": "a", "$patch": "delete"}]}}

    left = strategic_merge_patch(target, deletion)

    assert {"spec": {"x": 1, "containers": [{"name": "b"}]}} == left


def test_a_list_without_a_merge_key_is_replaced() -> None:
    assert {"args": [3]} == strategic_merge_patch({"args": [1, 2]}, {"args": [3]})


@pytest.mark.parametrize(
    "patch", [{"$patch": "replace"}, {"$retainKeys": ["a"]}, {"containers": [{"image": "x"}]}]
)
def test_a_strategic_patch_that_the_model_does_not_know_is_refused(patch: Json) -> None:
    with pytest.raises(BadRequestError):
        strategic_merge_patch({}, patch)


def test_a_json_patch_adds_replaces_removes_and_tests() -> None:
    target = {"a": {"x/y": "1", "m~n": "2"}, "list": [{"b": 1}]}
    operations: list[Json] = [
        {"op": "test", "path": "/a/x~1y", "value": "1"},
        {"op": "remove", "path": "/a/x~1y"},
        {"op": "replace", "path": "/a/m~0n", "value": "3"},
        {"op": "add", "path": "/a/new", "value": {"k": None}},
        {"op": "add", "path": "/list/0/c", "value": 4},
    ]

    result = json_patch(target, operations)

    assert {"a": {"m~n": "3", "new": {"k": None}}, "list": [{"b": 1, "c": 4}]} == result


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/a", "value": "2"},
        {"op": "test", "path": "/missing", "value": "2"},
        {"op": "remove", "path": "/missing"},
        {"op": "replace", "path": "/missing", "value": 1},
        {"op": "add", "path": "/missing/deeper", "value": 1},
        {"op": "add", "path": "/a/b", "value": 1},
        {"op": "add", "path": "/list/7/b", "value": 1},
        {"op": "remove", "path": "/list/0"},
        {"op": "remove", "path": ""},
        {"op": "move", "from": "/a", "path": "/b"},
        {"op": "add"},
        {},
    ],
)
def test_a_json_patch_that_does_not_apply_changes_nothing(operation: Json) -> None:
    target = {"a": "1", "list": [1]}
    before = {"a": "1", "list": [1]}

    with pytest.raises(InvalidError):
        json_patch(target, [{"op": "add", "path": "/new", "value": 1}, operation])

    assert before == target


# Bookmarks of a quiet watch, on virtual time: a minute of silence costs nothing.

WATCH = "/api/v1/pods?watch=true&fieldSelector=spec.nodeName%3Dnode-a"


def mark(stored: Json) -> Json:
    stored["metadata"]["labels"] = {"a": "b"}
    return stored


async def test_a_quiet_watch_gets_a_bookmark_of_what_passed_it_by() -> None:
    async with connected() as (server, client):
        path = f"{WATCH}&resourceVersion={server.store.version}&allowWatchBookmarks=1"
        async with client.watch(path) as frames:
            server.store.update("nodes", "", "node-b", mark)
            bookmark = await anext(frames)

        assert "BOOKMARK" == bookmark["type"]
        version = bookmark["object"]["metadata"]["resourceVersion"]
        assert str(server.store.version) == version


async def test_a_watch_gets_a_bookmark_two_seconds_before_its_end() -> None:
    async with connected() as (server, client):
        query = f"resourceVersion={server.store.version}&timeoutSeconds=45&allowWatchBookmarks=1"
        async with client.watch(f"{WATCH}&{query}") as frames:
            server.store.update("nodes", "", "node-b", mark)
            before = asyncio.get_running_loop().time()
            seen = [await anext(frames)]
            assert 40 <= asyncio.get_running_loop().time() - before < 44
            seen += [frame async for frame in frames]

        assert ["BOOKMARK"] == [frame["type"] for frame in seen]


async def test_the_time_of_a_watch_is_the_clients_to_choose() -> None:
    async with connected() as (server, client):
        path = f"{WATCH}&resourceVersion={server.store.version}&timeoutSeconds=45"
        before = asyncio.get_running_loop().time()
        async with client.watch(path) as frames:
            assert [] == [frame async for frame in frames]

        assert 45 <= asyncio.get_running_loop().time() - before < 60
