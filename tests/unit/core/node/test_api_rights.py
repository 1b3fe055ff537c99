"""Rights that are not needed, and the clock of the API server."""

import datetime as dt

import pytest

from agent.node.preflight import UNNEEDED, judge_clock, judge_excess, right_to_get, rights, skew_of
from tests.builders import NODE, NOON


def at(seconds: float) -> dt.datetime:
    return NOON + dt.timedelta(seconds=seconds)


def test_no_right_of_the_agent_counts_as_unneeded():
    needed = {
        (right.verb, right.resource)
        for right in (*rights(NODE, node_condition=True), right_to_get(("a", "b")))
        if not right.selector and right.name != NODE
    }

    assert set() == needed & {(right.verb, right.resource) for right in UNNEEDED}


def test_rights_that_are_granted_and_not_needed_are_a_note():
    found = judge_excess("here", UNNEEDED[:2])

    assert ("note", "wider than needed: list nodes, delete nodes") == (
        found.verdict.value,
        found.said,
    )
    assert "ok" == judge_excess("here", ()).verdict.value


@pytest.mark.parametrize(
    ("server", "before", "after", "skew"),
    [
        (0, 0.0, 0.1, 0.0),
        (0, 0.9, 0.95, 0.0),
        (30, 0.2, 0.4, 29.6),
        (-30, 0.2, 0.4, -29.2),
        (1, 0.0, 5.0, 0.0),
    ],
)
def test_only_a_difference_that_is_certain_counts(server, before, after, skew):
    assert skew == pytest.approx(skew_of(at(server), at(before), at(after)))


@pytest.mark.parametrize(
    ("skew", "verdict", "said"),
    [
        (None, "unknown", "no time"),
        (0.0, "ok", "at most 2 s"),
        (-2.0, "ok", "at most 2 s"),
        (2.1, "note", "2 s ahead of"),
        (-30.0, "note", "30 s behind"),
    ],
)
def test_a_clock_that_differs_by_more_than_two_seconds_is_a_note(skew, verdict, said):
    found = judge_clock("here", skew)

    assert verdict == found.verdict.value
    assert said in found.said
