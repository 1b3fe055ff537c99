"""Of which release a scheduler is; what it is said not to show are tests that there are."""

import ast
from pathlib import Path

import pytest

from tests.peers.lab.releases import (
    BEFORE_2_8,
    BEFORE_2_10,
    MODEL,
    Release,
    chosen,
    impossible,
    release_of,
)

PEERS = Path(__file__).parents[1]
OLD = Release((2, 7, 1))


@pytest.mark.parametrize(
    "said",
    ["v2.7.1\n", "2.7.1\n", "version:          v2.7.1\nrevision:         unknown\n"],
)
def test_what_a_scheduler_says_of_itself_is_believed(said):
    assert OLD == chosen(said, None)
    assert OLD == chosen(said, "v2.7.1")


@pytest.mark.parametrize("said", ["\n", "", "version:          v0.0.0-master\n", "v0.0.0\n"])
def test_one_that_does_not_know_its_release_is_what_the_user_says(said):
    assert OLD == chosen(said, "2.7.1")
    with pytest.raises(ValueError, match="HAMI_PEERS_SCHEDULER_RELEASE"):
        chosen(said, None)


@pytest.mark.parametrize(
    ("said", "named", "words"),
    [
        ("v2.7.1\n", "2.10.0", "says that it is 2.7.1, and you say 2.10.0"),
        ("\n", "old", "write it as 2.7.1"),
        ("v2.7.1\n", "2.7", "write it as 2.7.1"),
        ("\n", "2.4.1", "the oldest that is tried is 2.5.0"),
    ],
)
def test_what_cannot_be_is_an_error_in_a_sentence(said, named, words):
    with pytest.raises(ValueError, match=words):
        chosen(said, named)


def test_the_scheduler_itself_is_asked(tmp_path):
    scheduler = tmp_path / "scheduler"
    scheduler.write_text('#!/bin/sh\n[ "$1" = version ] && echo v2.9.0\n')
    scheduler.chmod(0o755)
    assert Release((2, 9, 0)) == release_of(scheduler, None)


@pytest.mark.parametrize(
    ("number", "is_old", "serves_inits"),
    [
        ((2, 5, 0), True, False),
        ((2, 7, 1), True, False),
        ((2, 8, 0), False, False),
        ((2, 9, 0), False, True),
        ((2, 10, 0), False, True),
    ],
)
def test_what_changed_with_a_release(number, is_old, serves_inits):
    release = Release(number)
    assert (is_old, serves_inits) == (release.is_old, release.serves_inits)
    assert is_old == bool(release.flags)


def test_nothing_is_impossible_beside_the_model_and_what_is_has_its_test():
    found = {
        f"{path.name}::{node.name}"
        for path in PEERS.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert BEFORE_2_8.keys() | BEFORE_2_10.keys() <= found
    assert [] == [test for test in found if impossible(MODEL, test)]
    assert {*BEFORE_2_8, *BEFORE_2_10} == {test for test in found if impossible(OLD, test)}
    newer = Release((2, 9, 0))
    assert {*BEFORE_2_10} == {test for test in found if impossible(newer, test)}
