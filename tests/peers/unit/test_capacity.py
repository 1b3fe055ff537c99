"""Gaps in what the kubelet offers are found, and their length."""

from tests.peers.lab.capacity import Capacity


def seen(*looks: tuple[float, int]) -> Capacity:
    capacity = Capacity()
    for at, count in looks:
        capacity.look(at, count)
    return capacity


def test_a_gap_lasts_from_the_first_slice_that_is_missing_to_the_last_that_comes_back():
    assert [3.0] == seen((0, 80), (1, 80), (2, 0), (3, 0), (4, 70), (5, 80), (6, 80)).gaps()


def test_two_gaps_are_two():
    assert [1.0, 2.0] == seen((0, 80), (1, 0), (2, 80), (3, 0), (5, 80)).gaps()


def test_one_that_has_not_ended_has_no_length():
    assert [] == seen((0, 80), (1, 0)).gaps()
