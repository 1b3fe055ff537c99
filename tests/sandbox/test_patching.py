"""The three kinds of patch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sandbox.api_errors import BadRequestError, InvalidError, Json
from agent.sandbox.patching import json_patch, merge_patch, strategic_merge_patch

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
