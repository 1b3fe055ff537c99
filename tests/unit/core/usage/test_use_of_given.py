"""Whose GPU a number of a region is: the GPUs that the container was given decide."""

import pytest

from agent.hami.region import RegionReading, RegionState
from agent.usage import numbers_of, past_use, use_of
from tests.builders import G1, G2, NOON, a_uuid
from tests.fakes.regions import a_process, a_region

G3 = a_uuid(3)


def used(uuids, given):
    region = a_region(*uuids, processes=(a_process(*range(1, len(uuids) + 1)),))
    use = use_of(RegionReading(RegionState.READABLE, region).sums(), NOON, given)
    return [(gpu.uuid, gpu.memory.total) for gpu in use.gpus]


@pytest.mark.parametrize(
    ("uuids", "given", "expected"),
    [
        ((G1, G2), (G1, G2), [(G1, 1), (G2, 2)]),
        ((G2, G1), (G1, G2), [(G2, 1), (G1, 2)]),
        ((G2,), (G1, G2), [(G2, 1)]),
        (("", ""), (G1, G2), [(G1, 1), (G2, 2)]),
        ((G3, G2), (G1, G2), [(G1, 1), (G2, 2)]),
        ((G2, G2), (G1, G2), [(G1, 1), (G2, 2)]),
        ((G1, G3), (G1,), [(G1, 1)]),
        ((G1,), (G1, G1), [(G1, 1)]),
        ((G3,), (), [(G3, 1)]),
        ((), (G1,), []),
    ],
)
def test_a_region_that_names_other_gpus_counts_by_position(uuids, given, expected):
    assert expected == used(uuids, given)


def test_the_numbers_of_a_use_are_read_back():
    region = a_region(G1, G2, processes=(a_process(5, 7, sm=3),))
    use = use_of(RegionReading(RegionState.READABLE, region).sums(), NOON)

    past = past_use(NOON, (G1, G2), tuple(map(float, numbers_of(use))))

    assert [(G1, 5, 3), (G2, 7, 3)] == [(gpu.uuid, gpu.memory, gpu.sm_percent) for gpu in past.gpus]
