"""What a container uses: the sums over its live processes, and whose GPU a number is."""

import datetime as dt

import pytest

from agent.hami.region import MemoryUse, Region, RegionGpu, RegionProcess, RegionState
from agent.usage import use_of
from tests.builders import G1, G2, NOON, a_uuid
from tests.fakes.regions import RegionReading, a_process, a_region

NOW = dt.datetime(2026, 11, 26, 12, tzinfo=dt.UTC)
BEFORE = NOW - dt.timedelta(seconds=30)
GPUS = (RegionGpu("GPU-a", 100), RegionGpu("", 0))


def a_sum_process(pid, *totals, sm=0):
    memory = tuple(
        MemoryUse(context=1, module=2, buffer=total - 3, total=total) for total in totals
    )
    return RegionProcess(pid, memory, (sm,) * len(totals))


def reading(*processes, alive=None, last_kernel=BEFORE, gpus=GPUS):
    region = Region("v1.2", gpus, processes, True, 2, 1, last_kernel)
    return RegionReading(RegionState.READABLE, region, alive=alive).sums()


@pytest.mark.parametrize(
    ("alive", "total", "processes"),
    [(None, 40, 2), ({7, 9, 11}, 40, 2), ({9}, 30, 1), (set(), 0, 0)],
    ids=["not known", "all", "one", "none"],
)
def test_a_process_that_is_known_to_be_dead_uses_nothing(alive, total, processes):
    alive = None if alive is None else frozenset(alive)

    use = use_of(reading(a_sum_process(7, 10, 10), a_sum_process(9, 30, 30), alive=alive), NOW)

    assert (total, processes) == (use.gpus[0].memory.total, use.processes)
    assert dt.timedelta(seconds=30) == use.idle
    assert use_of(reading(last_kernel=None), NOW).idle is None
    assert use_of(reading(last_kernel=NOW + dt.timedelta(seconds=5)), NOW).idle == dt.timedelta(0)


# Whose GPU a number of a region is: the GPUs that the container was given decide.

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
