"""Limits engage while a neighbour on the same GPU is active, and release when it is not."""

import msgspec
import pytest

from agent.hami.region import RegionChange, RegionState
from agent.model import GpuUuid
from agent.usage import ACTIVE_FOR, HIGHEST_RECENT, RegionUser, feedback, uses_sm
from tests.builders import G1, G2, NOON, a_row, a_share, a_uuid
from tests.fakes.regions import RegionReading, a_process, a_region, changed
from tests.fakes.scheduler_vectors import load_cases


@pytest.mark.parametrize(
    ("last_kernel", "alive", "sm", "expected"),
    [
        (NOON, None, 9, True),
        (NOON - ACTIVE_FOR, None, 9, True),
        (NOON - 2 * ACTIVE_FOR, None, 9, False),
        (NOON + 2 * ACTIVE_FOR, None, 9, False),
        (None, None, 9, False),
        (None, frozenset({1}), 9, True),
        (NOON, frozenset({1}), 0, False),
        (NOON, frozenset({2}), 9, False),
        (NOON, frozenset(), 9, False),
    ],
)
def test_the_number_of_a_dead_process_is_no_use_of_an_sm(last_kernel, alive, sm, expected):
    region = a_region(G1, processes=(a_process(1, sm=sm),), last_kernel=last_kernel)
    assert expected == uses_sm(
        RegionReading(RegionState.READABLE, region, alive=alive).sums(), NOON
    )


def a_user(region, *, priority=1, gpus=(G1,), work=None):
    row = msgspec.structs.replace(
        a_row(shares=[a_share(uuid=gpu) for gpu in gpus]), priority=priority
    )
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
        rows[before["name"]] = msgspec.structs.replace(row, priority=before["priority"])
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
