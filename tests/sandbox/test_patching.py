"""The three kinds of patch."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sandbox.api_errors import BadRequestError, InvalidError, Json, UnclassifiedError
from agent.sandbox.patching import difference, json_patch, merge_patch, strategic_merge_patch

VALUES = st.recursive(
    st.integers() | st.booleans() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)
WITH_LISTS = st.recursive(
    st.none() | st.integers(0, 1) | st.booleans() | st.just("~/"),
    lambda inner: (
        st.dictionaries(st.sampled_from(["a", "b", "a/b", "~1"]), inner, max_size=3)
        | st.lists(inner, max_size=3)
    ),
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


def test_a_strategic_patch_obeys_delete_and_replace() -> None:
    target = {"spec": {"x": 1, "containers": [{"name": "a"}, {"name": "b"}]}}
    deletion = {"spec": {"containers": [{"name": "a", "$patch": "delete"}]}}

    left = strategic_merge_patch(target, deletion)

    assert {"spec": {"x": 1, "containers": [{"name": "b"}]}} == left
    assert {"spec": {"y": 2}} == strategic_merge_patch(
        target, {"spec": {"y": 2, "$patch": "replace"}}
    )


def test_a_list_without_a_merge_key_is_replaced() -> None:
    assert {"args": [3]} == strategic_merge_patch({"args": [1, 2]}, {"args": [3]})


@pytest.mark.parametrize(
    ("patch", "text"),
    [
        ({"$patch": "sideways"}, "unknown patch type: sideways in map: map[$patch:sideways]"),
        (
            {"containers": [{"image": "x", "a": "b"}]},
            "map: map[a:b image:x] does not contain declared merge key: name",
        ),
    ],
)
def test_a_strategic_patch_that_is_wrong_is_refused_in_the_words_of_the_server(
    patch: Json, text: str
) -> None:
    with pytest.raises(UnclassifiedError) as refused:
        strategic_merge_patch({}, patch)

    assert text == refused.value.message


def test_a_directive_that_the_model_does_not_know_is_refused() -> None:
    with pytest.raises(BadRequestError, match="not supported"):
        strategic_merge_patch({}, {"$retainKeys": ["a"]})


def test_a_json_patch_adds_replaces_removes_and_tests() -> None:
    target = {"a": {"x/y": "1", "m~n": "2"}, "list": [1, 2, 3]}
    operations: list[Json] = [
        {"op": "test", "path": "/a/x~1y", "value": "1"},
        {"op": "remove", "path": "/a/x~1y"},
        {"op": "replace", "path": "/a/m~0n", "value": "3"},
        {"op": "add", "path": "/a/new", "value": {"k": None}},
        {"op": "add", "path": "/list/-", "value": 4},
        {"op": "add", "path": "/list/0", "value": 0},
        {"op": "test", "path": "/list/1", "value": 1},
        {"op": "remove", "path": "/list/1"},
        {"op": "replace", "path": "/list/0", "value": 9},
    ]

    result = json_patch(target, operations)

    assert {"a": {"m~n": "3", "new": {"k": None}}, "list": [9, 2, 3, 4]} == result


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/a", "value": "2"},
        {"op": "test", "path": "/missing", "value": "2"},
        {"op": "test", "path": "/list/0", "value": 5},
        {"op": "remove", "path": "/missing"},
        {"op": "move", "from": "/missing", "path": "/b"},
        {"op": "copy", "from": "/list/7", "path": "/b"},
        {"op": "add", "path": "/missing/deeper", "value": 1},
        {"op": "add", "path": "/a/b", "value": 1},
        {"op": "remove", "path": "/list/7"},
        {"op": "remove", "path": "/list/x"},
        {"op": "remove", "path": ""},
        {"op": "test", "path": "/list/3/x", "value": 1},
    ],
)
def test_a_json_patch_that_does_not_apply_changes_nothing(operation: Json) -> None:
    target = {"a": "1", "list": [1]}
    before = {"a": "1", "list": [1]}

    with pytest.raises(InvalidError):
        json_patch(target, [{"op": "add", "path": "/new", "value": 1}, operation])

    assert before == target


def test_a_json_patch_moves_and_copies() -> None:
    target = {"a": {"x/y": {"k": 1}}, "b": {}}
    operations: list[Json] = [
        {"op": "copy", "from": "/a/x~1y", "path": "/b/copied"},
        {"op": "move", "from": "/a/x~1y", "path": "/b/moved"},
        {"op": "replace", "path": "/b/copied/k", "value": 2},
    ]

    assert {"a": {}, "b": {"copied": {"k": 2}, "moved": {"k": 1}}} == json_patch(target, operations)


def test_a_json_patch_replaces_what_is_not_there_as_the_server_does() -> None:
    operation = {"op": "replace", "path": "/b", "value": 1}

    assert {"a": 0, "b": 1} == json_patch({"a": 0}, [operation])


@pytest.mark.parametrize(
    "operation", [{"op": "steal", "path": "/a"}, {"op": "add"}, {"op": "move", "path": "/a"}, {}]
)
def test_an_unknown_json_patch_operation_is_refused(operation: Json) -> None:
    with pytest.raises(InvalidError):
        json_patch({}, [operation])


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c/~"]), WITH_LISTS, max_size=3),
    st.dictionaries(st.sampled_from(["a", "b", "c/~"]), WITH_LISTS, max_size=3),
)
def test_the_difference_of_two_objects_makes_the_second_of_the_first(
    before: Json, after: Json
) -> None:
    made = json_patch(before, difference(before, after))

    assert json.dumps(after, sort_keys=True) == json.dumps(made, sort_keys=True)
    assert [] == difference(after, made)


def test_a_difference_names_only_what_differs() -> None:
    before = {"a": {"b/c": 1, "d": 2}, "e": [{"f": 1, "g": 1}], "h": [1]}
    after = {"a": {"b/c": 3, "d": 2}, "e": [{"f": 1}], "h": [1, 2], "i": None}

    assert [
        {"op": "replace", "path": "/a/b~1c", "value": 3},
        {"op": "remove", "path": "/e/0/g"},
        {"op": "replace", "path": "/h", "value": [1, 2]},
        {"op": "add", "path": "/i", "value": None},
    ] == difference(before, after)
