"""The XID table, and the two variables of HAMi's and NVIDIA's plugin that change it."""

from pathlib import Path

import pytest

from agent.health.judge import HealthSettings, XidClass, xid_class, xid_name
from tests.hami_vectors import Vector, cases

APPLICATION = (13, 31, 43, 45, 68, 109)


def settings(disable: str, enable: str = "", **kinds: XidClass) -> HealthSettings:
    own = {int(name.removeprefix("x")): kind for name, kind in kinds.items()}
    return HealthSettings(disabled_xids=disable, enabled_xids=enable, xids=own)


UNASKED = "health_xids-187"
"""Neither variable is set: HAMi ignores 109, for which the catalog wants a reset."""


@pytest.mark.parametrize(
    "vector", cases("health_xids", without={UNASKED: "109 needs a reset"}), ids=str
)
def test_the_variables_mean_what_they_mean_to_hami(vector: Vector):
    disable, enable = vector.given.values()
    judged = HealthSettings(disabled_xids=disable, enabled_xids=enable)
    ignored = {
        number: XidClass.APPLICATION is xid_class(int(number), judged)
        for number in vector.expected["ignored"]
    }

    assert ["DP_DISABLE_HEALTHCHECKS", "DP_ENABLE_HEALTHCHECKS"] == list(vector.given)
    assert vector.expected["healthGoroutineEndsAtOnce"] is judged.off
    assert vector.expected["ignored"] == ignored


def test_the_odd_corners_are_those_of_nvidias_plugin():
    every = (*APPLICATION, 48, 79)
    for disable, enable, off, ignored in (
        ("all", "all", False, ()),
        ("0", "", True, every),
        ("48", "0", False, ()),
        ("18446744073709551616", "", False, APPLICATION),
        ("all", "garbage", True, every),
    ):
        judged = settings(disable, enable)
        assert off is judged.off
        assert ignored == tuple(
            one for one in every if xid_class(one, judged) is XidClass.APPLICATION
        )


def test_the_agents_own_setting_wins_over_both_variables():
    judged = settings("94,48", "13", x94=XidClass.FATAL, x13=XidClass.APPLICATION)
    assert XidClass.FATAL is xid_class(94, judged)
    assert XidClass.APPLICATION is xid_class(13, judged)
    assert XidClass.APPLICATION is xid_class(48, judged)


def test_the_table_is_the_catalog_with_the_class_and_the_name_of_each_number():
    lines = Path(__file__).with_name("xids.txt").read_text().splitlines()
    catalog = [line for line in lines if line and not line.startswith("#")]
    told = [(number, xid_class(number), xid_name(number)) for number in range(1, 173)]
    assert told == [
        (int(number), kind, name)
        for number, _, kind, name in (line.split(maxsplit=3) for line in catalog)
    ]
    assert ("a driver error", XidClass.FATAL) == (xid_name(54321), xid_class(54321))
