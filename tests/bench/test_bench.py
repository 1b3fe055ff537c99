"""Figures of the bench: what is kept and told of them."""

import json

import pytest

from tests.bench.figures import Figure, keep, percentile, table


@pytest.mark.parametrize(
    ("samples", "more", "row", "ratio"),
    [
        ([3, 1, 2], {"budget": 1.5}, ["a thing", "3", "2 ms", "3 ms", "1.5 ms **over**"], 1.3333),
        ([1234.5, 0.01], {"percent": 99}, ["a thing", "2", "1,230 ms", "1,230 ms", "-"], None),
        ([], {"budget": 4}, ["a thing", "0", "not measured: here", "-", "4 ms"], None),
    ],
)
def test_a_figure_is_its_median_beside_its_budget(tmp_path, samples, more, row, ratio):
    figure = Figure("x", "a thing", "ms", samples, "here", **more)
    head, line, told = table([figure])
    keep([figure], tmp_path / "build" / "bench.json")
    (found,) = json.loads((tmp_path / "build" / "bench.json").read_text())["figures"]

    assert len({head.count("|"), line.count("|"), told.count("|")}) == 1
    assert row == [cell.strip() for cell in told[1:-1].split("|")]
    assert (pytest.approx(ratio, abs=1e-4), samples) == (found["ratio"], found["samples"])


def test_a_percentile_is_of_the_nearest_rank():
    hundred = [float(number) for number in range(100, 0, -1)]

    assert [1.0, 50.0, 99.0, 100.0] == [percentile(hundred, p) for p in (1, 50, 99, 100)]
