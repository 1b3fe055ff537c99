"""A ring keeps the newest rows, in order, in a piece of memory that never grows."""

import math

import pytest

from agent.kit.timing import Ring


def test_an_empty_ring_has_no_rows():
    ring = Ring(3, 2)

    assert (0, []) == (len(ring), list(ring.rows()))


def test_rows_come_back_the_oldest_first():
    ring = Ring(3, 2)
    ring.add(1, 2)
    ring.add(3, 4)

    assert (2, [(1, 2), (3, 4)]) == (len(ring), list(ring.rows()))


@pytest.mark.parametrize("count", [3, 4, 7, 1000])
def test_the_oldest_rows_go_and_the_memory_stays(count):
    ring = Ring(3, 1)
    before = ring.bytes
    for number in range(count):
        ring.add(number)

    assert [(number,) for number in range(count - 3, count)] == list(ring.rows())
    assert 3 * 8 == before == ring.bytes


def test_a_gap_stays_a_gap():
    ring = Ring(3, 2)
    ring.add(1, math.nan)

    assert [True] == [math.isnan(row[1]) for row in ring.rows()]


def test_a_row_of_another_width_is_refused():
    with pytest.raises(ValueError, match="a row has 2 numbers, not 1"):
        Ring(3, 2).add(1)
