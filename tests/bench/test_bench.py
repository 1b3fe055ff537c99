"""Figures of the bench: what is kept and told of them."""

import asyncio
import json

import pytest

from tests.bench.__main__ import LONG, PARTS, asked
from tests.bench.figures import Figure, keep, percentile, table
from tests.bench.rest import at_rest


@pytest.mark.parametrize(
    ("samples", "more", "row", "ratio"),
    [
        (
            [3.0, 1.0, 2.0],
            {"budget": 1.5, "peers": "9 ms"},
            ["a thing", "3", "2 ms", "3 ms", "1.5 ms **over**", "9 ms"],
            1.3333,
        ),
        (
            [1234.5, 0.0123, 60.0],
            {"value": 981_234.0},
            ["a thing", "3", "981,000 ms", "1,230 ms", "-", "-"],
            None,
        ),
        ([], {"budget": 4}, ["a thing", "0", "not measured: here", "-", "4 ms", "-"], None),
    ],
)
def test_a_figure_is_its_median_beside_its_budget(tmp_path, samples, more, row, ratio):
    figure = Figure("x", "a thing", "ms", samples, "here", **more)
    head, line, told = table([figure])
    (found,) = keep([figure], tmp_path / "build" / "bench.json")["figures"]

    assert len({head.count("|"), line.count("|"), told.count("|")}) == 1
    assert row == [cell.strip() for cell in told[1:-1].split("|")]
    assert (ratio, samples) == (found["ratio"], found["samples"])
    hundred = [float(number) for number in range(100, 0, -1)]
    assert [1.0, 50.0, 99.0, 100.0] == [percentile(hundred, p) for p in (1, 50, 99, 100)]


def test_what_other_parts_measured_before_is_kept_where_that_is_asked_for(tmp_path):
    file = tmp_path / "bench.json"
    old, other, new = (
        Figure("x", "a thing", "ms", [value], "here", part=part)
        for value, part in ((1.0, "starts"), (2.0, "rest"), (3.0, "starts"))
    )
    keep([old, other], file)
    keep([new], file, add=True)
    assert [2.0, 3.0] == [one["value"] for one in json.loads(file.read_text())["figures"]]

    keep([new], file)
    assert [3.0] == [one["value"] for one in json.loads(file.read_text())["figures"]]


# Which parts of the bench are meant: all but the long ones, or those that a word begins.


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], [name for name in PARTS if name not in LONG]),
        (["regions", "restarts"], ["restarts", "regions"]),
        (["real"], [one for one in PARTS if one.startswith("real-") and one not in LONG]),
        ([*LONG], [*LONG]),
    ],
)
def test_a_word_is_a_part_or_the_beginning_of_several(words, parts):
    assert parts == asked(words)
    with pytest.raises(ValueError, match="no part naps; there are restarts, events"):
        asked([*words, "naps"])


# A figure of XIDs is of an agent at rest.


async def test_a_reader_that_has_ended_is_no_rest():
    lists = asyncio.StreamReader()
    lists.feed_eof()
    with pytest.raises(RuntimeError, match="has ended"):
        await at_rest(lists)
