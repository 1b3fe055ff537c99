"""The XID table, and the two variables of HAMi's and NVIDIA's plugin that change it."""

import pytest

from agent.core.health import HealthSettings, xid_class
from agent.core.xids import XIDS, XidClass, XidSource, malformed, read_switches, xid_name
from tests.hami_vectors import Vector, cases

APPLICATION = (13, 31, 43, 45, 68, 109)


def settings(disable: str, enable: str = "", **kinds: XidClass) -> HealthSettings:
    own = {int(name.removeprefix("x")): kind for name, kind in kinds.items()}
    return HealthSettings(switches=read_switches(disable, enable), xids=own)


@pytest.mark.parametrize("vector", cases("health_xids"), ids=str)
def test_the_variables_mean_what_they_mean_to_hami(vector: Vector):
    switches = read_switches(*vector.given.values())
    judged = HealthSettings(switches=switches)
    ignored = {
        number: XidClass.APPLICATION is xid_class(int(number), judged)
        for number in vector.expected["ignored"]
    }

    assert ["DP_DISABLE_HEALTHCHECKS", "DP_ENABLE_HEALTHCHECKS"] == list(vector.given)
    assert vector.expected["healthGoroutineEndsAtOnce"] is switches.off
    assert vector.expected["ignored"] == ignored


@pytest.mark.parametrize(
    ("disable", "enable", "off", "ignored"),
    [
        ("all", "all", False, ()),
        ("0", "", True, (*APPLICATION, 48, 79)),
        ("48", "0", False, ()),
        ("18446744073709551616", "", False, APPLICATION),
        ("all", "garbage", True, (*APPLICATION, 48, 79)),
    ],
)
def test_the_odd_corners_are_those_of_nvidias_plugin(disable, enable, off, ignored):
    switches = read_switches(disable, enable)

    assert off is switches.off
    assert ignored == tuple(one for one in (*APPLICATION, 48, 79) if switches.ignores(one))


def test_an_application_xid_that_is_enabled_is_fatal_and_others_keep_their_class():
    judged = settings("", "all")

    assert XidClass.FATAL is xid_class(13, judged)
    assert XidClass.CONTAINED is xid_class(94, judged)
    assert XidClass.NEEDS_RESET is xid_class(79, judged)


def test_the_agents_own_setting_wins_over_both_variables():
    judged = settings("94,48", "13", x94=XidClass.FATAL, x13=XidClass.APPLICATION)

    assert XidClass.FATAL is xid_class(94, judged)
    assert XidClass.APPLICATION is xid_class(13, judged)
    assert XidClass.APPLICATION is xid_class(48, judged)


def test_items_that_say_nothing_are_named():
    assert ("x", "my-xids", "-1") == malformed(" 63 , x,74,,my-xids,ALL,-1")
    assert () == malformed("")


def test_what_the_plugins_skip_is_the_applications_and_nothing_else():
    skipped = {row.number for row in XIDS.values() if row.source is XidSource.PLUGIN}

    assert set(APPLICATION) == skipped
    assert skipped == {n for n, row in XIDS.items() if row.kind is XidClass.APPLICATION}


def test_every_class_has_a_row_and_every_row_a_name():
    assert set(XidClass) == {row.kind for row in XIDS.values()}
    assert all(row.name == xid_name(number) for number, row in XIDS.items())
    assert "a driver error" == xid_name(54321)
