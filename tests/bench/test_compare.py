"""Two runs of the bench: only what no scatter explains is a change."""

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.compare import FEWEST, changes, load, report, verdict
from tests.bench.figures import Figure, keep

MIRRORED = {"more": "less", "less": "more", "same": "same", "unsure": "unsure"}
NUMBERS = st.lists(st.integers(1, 10_000), min_size=1, max_size=30)
ENOUGH = st.lists(st.integers(1, 10_000), min_size=FEWEST, max_size=30)


@given(NUMBERS, NUMBERS)
def test_who_compares_the_other_way_round_is_told_the_opposite(old, new):
    assert MIRRORED[verdict(old, new)] == verdict(new, old)


@given(ENOUGH, st.permutations(range(30)))
def test_the_same_samples_in_any_order_are_no_change(samples, order):
    shuffled = [samples[place] for place in order if place < len(samples)]

    assert "same" == verdict(samples, shuffled)


@given(ENOUGH)
def test_what_lies_beyond_all_that_was_seen_is_a_change(samples):
    beyond = [one + max(samples) for one in samples]

    assert "more" == verdict(samples, beyond)


@given(ENOUGH, ENOUGH, st.sampled_from([0.25, 4, 1024]))
def test_the_unit_does_not_matter(old, new, unit):
    assert verdict(old, new) == verdict([one * unit for one in old], [one * unit for one in new])


@given(ENOUGH, st.integers(1, 10_000))
def test_one_wild_sample_is_no_change(samples, wild):
    assert "same" == verdict(samples, [*sorted(samples)[1:], wild + max(samples)])


def test_chance_alone_is_no_change():
    chance = random.Random(1)  # noqa: S311 -- no secret
    runs = [[chance.gauss(0, 1) for _ in range(FEWEST)] for _ in range(2000)]
    alarms = [verdict(old, new) for old, new in itertools.pairwise(runs)]

    assert alarms.count("same") > 0.98 * len(alarms)


def test_of_few_samples_nobody_can_tell_unless_all_are_equal():
    assert "unsure" == verdict([1.0] * 4, [2.0] * 40)
    assert "same" == verdict([2.0], [2.0, 2.0])
    assert "unsure" == verdict([2.0, 3.0], [3.0, 2.0])


def kept(path, *figures: Figure):
    keep(figures, path)
    return load(path)


def figure(name: str, samples: list[float], part: str = "starts") -> Figure:
    return Figure(name, name.title(), "ms", samples, "here", part=part)


def test_rows_that_are_new_or_gone_are_told_and_those_of_parts_that_did_not_run_are_not(tmp_path):
    five = [1.0, 1.1, 1.2, 1.3, 1.4]
    old = kept(
        tmp_path / "old.json",
        figure("quick", five),
        figure("calm", five),
        figure("gone", five),
        figure("elsewhere", five, "rest"),
    )
    new = kept(
        tmp_path / "new.json",
        figure("quick", [one / 2 for one in five]),
        figure("calm", [*five, 1.2]),
        figure("fresh", [2.0]),
        figure("unmeasured", []),
    )

    assert {
        ("less", "Quick: 1.2 ms → 0.6 ms (-50 %)"),
        ("same", "Calm: 1.2 ms → 1.2 ms (+0 %)"),
        ("new", "Fresh: 2 ms"),
        ("new", "Unmeasured: not measured"),
        ("gone", "Gone: 1.2 ms"),
    } == {*changes(old, new)}
    assert ["less than before (1):", "new (2):", "gone (1):", "no change beyond noise (1):"] == [
        line for line in report(old, new) if not line.startswith(" ")
    ]


def test_a_row_in_another_unit_is_another_row(tmp_path):
    old = kept(tmp_path / "old.json", Figure("x", "A thing", "s", [1.0], "here", part="starts"))
    new = kept(tmp_path / "new.json", Figure("x", "A thing", "ms", [1000.0], "here", part="starts"))

    assert [("new", "A thing: 1000 ms"), ("gone", "A thing: 1 s")] == [*changes(old, new)]


def test_what_another_machine_measured_is_told_as_such(tmp_path):
    run = kept(tmp_path / "run.json", figure("calm", [1.0]))
    other = run | {"machine": {"cores": 96}}

    assert next(report(other, run)).startswith("another machine: {'cores': 96} → ")


def test_a_run_without_samples_cannot_be_compared_with(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"figures": [{"id": "x", "samples": 5}]}))
    with pytest.raises(ValueError, match="has no samples"):
        load(path)
