"""Feedback decides as HAMi's monitor did on the same regions."""

import msgspec
import pytest

from agent.model import GpuUuid
from agent.usage import feedback, region_user
from tests.builders import NOON, a_row, a_share
from tests.fakes.regions import a_region, changed
from tests.fakes.scheduler_vectors import load_cases

CASES = load_cases("feedback")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_each_round_leaves_the_regions_as_hami_leaves_them(case):
    rows, regions = {}, {}
    for given in case["before"]:
        uuids = [GpuUuid(uuid) for uuid in given["uuids"]]
        row = a_row(shares=[a_share(uuid=uuid) for uuid in uuids])
        rows[given["name"]] = msgspec.structs.replace(row, priority=given["priority"])
        regions[given["name"]] = a_region(
            *uuids,
            priority=given["priority"],
            recent_kernel=given["recent_kernel"],
            is_limiting=bool(given["utilization_switch"]),
        )
    for expected in case["after_each_tick"]:
        users = {name: region_user(rows[name], regions[name], NOON, None) for name in rows}
        for name, change in feedback(users).changes.items():
            regions[name] = changed(regions[name], change)

        assert expected == {
            name: {
                "recent_kernel": region.recent_kernel,
                "utilization_switch": int(region.is_limiting),
            }
            for name, region in regions.items()
        }


def test_all_of_hamis_rounds_are_there():
    assert 11 == len(CASES)
