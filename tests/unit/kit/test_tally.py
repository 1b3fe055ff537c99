"""Counts and durations add up, stay sorted and refuse what the metrics page could not show."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.kit.timing import DurationRow, Durations, Tally


def test_a_tally_counts_per_label_values_and_sorts_them():
    tally = Tally("answers_total", "Answers.", ("result", "reason"))
    tally.add("refused", "no-lock")
    tally.add("ok", "")
    tally.add("ok", "", amount=2)

    assert ((("ok", ""), 3), (("refused", "no-lock"), 1)) == tally.items()


def test_a_tally_without_labels_has_one_count():
    tally = Tally("errors_total", "Errors.")
    tally.add()

    assert (((), 1),) == tally.items()


def test_a_tally_refuses_label_values_that_do_not_match():
    with pytest.raises(ValueError, match="result"):
        Tally("answers_total", "Answers.", ("result",)).add("ok", "no")


def test_expected_label_values_are_no_count_and_must_match():
    tally = Tally("answers_total", "Answers.", ("result",), expected=[("refused",)])

    assert ((("refused",),), ()) == (tally.expected, tally.items())
    with pytest.raises(ValueError, match="result"):
        Tally("answers_total", "Answers.", ("result",), expected=[("refused", "no-lock")])


def test_a_tally_never_counts_down():
    with pytest.raises(ValueError, match="upwards"):
        Tally("errors_total", "Errors.").add(amount=-1)


def test_a_duration_on_a_bound_belongs_to_its_bucket():
    durations = Durations("call_seconds", "Calls.", ("method",), (0.5, 1.0))
    for seconds in (0.25, 0.5, 0.75, 4.0):
        durations.observe(seconds, "Allocate")

    assert (DurationRow(("Allocate",), (2, 3, 4), 5.5),) == durations.rows()


def test_rows_are_sorted_by_their_label_values():
    durations = Durations("call_seconds", "Calls.", ("method",), (1.0,))
    durations.observe(2.0, "b")
    durations.observe(0.0, "a")

    assert (DurationRow(("a",), (1, 1), 0.0), DurationRow(("b",), (0, 1), 2.0)) == durations.rows()


def test_durations_refuse_label_values_that_do_not_match():
    with pytest.raises(ValueError, match="method"):
        Durations("call_seconds", "Calls.", ("method",), (1.0,)).observe(1.0)


@pytest.mark.parametrize("buckets", [(1.0, 0.5), (1.0, 1.0)])
def test_buckets_must_ascend(buckets):
    with pytest.raises(ValueError, match="ascend"):
        Durations("call_seconds", "Calls.", (), buckets)


@given(st.lists(st.floats(0, 100)))
def test_every_observation_is_in_the_last_cumulative_count(observations):
    durations = Durations("call_seconds", "Calls.", (), (0.1, 1.0, 10.0))
    for seconds in observations:
        durations.observe(seconds)

    assert len(observations) == sum(row.cumulative[-1] for row in durations.rows())
    assert all(list(row.cumulative) == sorted(row.cumulative) for row in durations.rows())
