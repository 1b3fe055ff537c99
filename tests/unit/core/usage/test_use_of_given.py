"""Whose GPU a number of a region is: the GPUs that the container was given decide."""

import pytest

from agent.hami.region import RegionReading, RegionState
from agent.usage import use_of
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
