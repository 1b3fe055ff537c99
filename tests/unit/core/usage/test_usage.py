"""Limits engage while a neighbour on the same GPU is active, and release when it is not.

What a container uses: the sums over its live processes, and whose GPU a number is.
"""

import datetime as dt

import pytest
from msgspec.structs import replace

from agent.hami.region import MemoryUse, Region, RegionChange, RegionGpu, RegionProcess, RegionState
from agent.model import GpuUuid
from agent.usage import ACTIVE_FOR, HIGHEST_RECENT, RegionUser, feedback, use_of, uses_sm
from tests.builders import G1, G2, NOON, a_row, a_share, a_uuid
from tests.fakes.regions import RegionReading, a_process, a_region, changed
from tests.fakes.scheduler_vectors import load_cases
from tests.unit.rows import rows_of


def is_used(last: str, alive: str, sm: str) -> str:
    """Whether an SM is used, by the seconds since the last kernel and the processes that live."""
    last_kernel = None if last == "never" else NOON - ACTIVE_FOR * float(last)
    living = None if alive == "unknown" else frozenset(map(int, alive.strip("-").split()))
    region = a_region(G1, processes=(a_process(1, sm=int(sm)),), last_kernel=last_kernel)
    sums = RegionReading(RegionState.READABLE, region, alive=living).sums()
    return "used" if uses_sm(sums, NOON) else "not used"


@pytest.mark.parametrize(("words", "expected"), rows_of(__file__, "usage.txt"))
def test_whose_a_number_of_a_region_is_and_whether_it_counts(words: str, expected: str):
    kind, *parts = words.split(", ")
    assert expected == (is_used(*parts) if kind == "sm" else used(*parts))


def a_user(region, *, priority=1, gpus=(G1,), work=None):
    row = replace(a_row(shares=[a_share(uuid=gpu) for gpu in gpus]), priority=priority)
    return RegionUser(row, region, work)


def test_a_forged_uuid_couples_nobody():
    working = a_region(G1, priority=0, recent_kernel=5, is_limiting=False)
    forged = a_user(working, priority=0, gpus=(G2,))
    victim = a_user(a_region(G1, recent_kernel=0, is_limiting=False))
    assert ({"forged": RegionChange(recent_kernel=4)}, {}) == feedback(
        {"forged": forged, "victim": victim}, NOON
    )


@pytest.mark.parametrize(("own", "forged", "counts"), [(1, 0, 1), (1, -5, 1), (0, 3, 3), (0, 0, 0)])
def test_a_region_cannot_take_a_better_priority_than_its_pod_has(own, forged, counts):
    assert counts == a_user(a_region(G1, priority=forged), priority=own).priority


def test_a_forged_count_of_kernels_lets_go():
    regions = {
        name: a_region(G1, recent_kernel=2**31 - 1, last_kernel=None)
        for name in ("forger", "other")
    }
    for _ in range(HIGHEST_RECENT):
        changes, released = feedback({name: a_user(one) for name, one in regions.items()}, NOON)
        regions = {name: changed(one, changes[name]) for name, one in regions.items()}
    assert {} == released


def test_the_end_releases_whom_this_process_held_back_or_limited_and_nobody_else():
    high = a_user(a_region(G1, recent_kernel=2, priority=0), priority=0, work=NOON)
    low = a_user(a_region(G1))
    alone = a_user(a_region(G2), gpus=(G2,))
    twins = [a_user(a_region(a_uuid(3)), gpus=(a_uuid(3),)) for _ in range(2)]

    users = {"high": high, "low": low, "alone": alone, "x": twins[0], "y": twins[1]}
    _, release = feedback(users, NOON)

    assert {
        "low": RegionChange(is_limiting=False, recent_kernel=0),
        "x": RegionChange(is_limiting=False),
        "y": RegionChange(is_limiting=False),
    } == release


def test_a_new_process_limits_its_like_but_holds_nobody_back():
    """HAMi-core writes a kernel's time at its start, also in a probe with `nvidia-smi`."""
    probed = a_region(G1, recent_kernel=0, last_kernel=NOON)
    high = a_region(G1, priority=0, recent_kernel=0, last_kernel=NOON)
    users = {"high": a_user(high, priority=0), "low": a_user(probed), "other": a_user(probed)}
    _, release = feedback(users, NOON)
    assert dict.fromkeys(("low", "other"), RegionChange(is_limiting=False)) == release


# Feedback decides as HAMi's monitor did on the same regions.

CASES = load_cases("feedback")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_each_round_leaves_the_regions_as_hami_leaves_them(case):
    rows, regions = {}, {}
    for before in case["before"]:
        uuids = [GpuUuid(uuid) for uuid in before["uuids"]]
        row = a_row(shares=[a_share(uuid=uuid) for uuid in uuids])
        rows[before["name"]] = replace(row, priority=before["priority"])
        regions[before["name"]] = a_region(
            *uuids,
            priority=before["priority"],
            recent_kernel=before["recent_kernel"],
            is_limiting=bool(before["utilization_switch"]),
        )
    for expected in case["after_each_tick"]:
        users = {name: RegionUser(rows[name], regions[name]) for name in rows}
        for name, change in feedback(users, NOON)[0].items():
            regions[name] = changed(regions[name], change)

        assert expected == {
            name: {
                "recent_kernel": region.recent_kernel,
                "utilization_switch": int(region.is_limiting),
            }
            for name, region in regions.items()
        }


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


def test_what_all_processes_together_use_is_never_less_than_nothing():
    """HAMi-core 2.8.1 and later can take from a slot what another process had added."""
    use = use_of(reading(a_sum_process(7, 10, 10), a_sum_process(9, -30, 40)), NOW)
    assert [0, 50] == [gpu.memory.total for gpu in use.gpus]


# Whose GPU a number of a region is: the GPUs that the container was given decide.

G3 = a_uuid(3)


def used(uuids: str, given: str) -> str:
    """The MiB of each GPU, by the UUIDs in the region and those that the container was given."""
    region_uuids = [NAMES.get(name, "") for name in uuids.split()]
    region = a_region(*region_uuids, processes=(a_process(*range(1, len(region_uuids) + 1)),))
    granted = [NAMES[name] for name in given.split() if name != "none"]
    use = use_of(RegionReading(RegionState.READABLE, region).sums(), NOON, granted)
    return " ".join(f"{TITLES[gpu.uuid]}:{gpu.memory.total}" for gpu in use.gpus) or "nothing"


NAMES = {"G1": G1, "G2": G2, "G3": a_uuid(3)}
TITLES = {uuid: name for name, uuid in NAMES.items()}
