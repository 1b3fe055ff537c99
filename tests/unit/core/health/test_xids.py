"""The XID table, and the two variables of HAMi's and NVIDIA's plugin that change it."""

import pytest

from agent.health.judge import judge
from agent.health.xids import (
    PLUGINS_SKIP,
    XIDS,
    HealthSettings,
    XidClass,
    malformed,
    read_switches,
    xid_class,
    xid_name,
)
from agent.model import Condition, DriverEvent, EventKind, Health
from tests.builders import G1, NOON
from tests.hami_vectors import Vector, cases

APPLICATION = (13, 31, 43, 45, 68, 109)


def settings(disable: str, enable: str = "", **kinds: XidClass) -> HealthSettings:
    own = {int(name.removeprefix("x")): kind for name, kind in kinds.items()}
    return HealthSettings(switches=read_switches(disable, enable), xids=own)


UNASKED = "health_xids-187"
"""Neither variable is set: HAMi ignores 109, for which the catalog wants a reset."""


@pytest.mark.parametrize(
    "vector", cases("health_xids", without={UNASKED: "109 needs a reset"}), ids=str
)
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


CATALOG = {
    "IGNORE": "14 37 38 43 44 63 66 67 92 93 106-108 121 137 141 152 153 157 160 161",
    "RESTART_APP": "8 11 13 25 31 32 39-41 60 68-72 75-77 80 82-86 88 89 94 96-105 126-135 139",
    "RESET_GPU": "46 62 64 95 109 110 119 120 136 140 143 155 156 158",
    "RESTART_BM": "79",
    "RESTART_VM": "151",
    "CHECK_MECHANICALS": "54",
    "CHECK_UVM": "159",
    "UPDATE_SWFW": "78",
    "WORKFLOW_XID_45": "45",
    "WORKFLOW_XID_48": "48",
    "WORKFLOW_NVLINK_ERR": "74",
    "WORKFLOW_NVLINK5_ERR": "144-150",
    "XID_154": "154",
    "": "162-172",
    "CONTACT_SUPPORT": "1-7 9 10 12 15-24 26-30 33-36 42 47 49-53 55-59 61 65 73 81 87 90 91 "
    "111-118 122-125 138 142",
}
"""NVIDIA's XID catalog (docs.nvidia.com/deploy/xid-errors, R590): numbers by immediate action."""

CLASSES: dict[XidClass, tuple[tuple[Condition, bool, bool], str]] = {
    XidClass.APPLICATION: (
        (Condition.OK, False, False),
        (
            "8 11 13 14 25 31 32 37-41 43-45 60 66-72 75-77 80 82-86 88 89 93 96-108 "
            "121 126-135 137 139 141 147 148 152 153 157 160-165"
        ),
    ),
    XidClass.CONTAINED: ((Condition.WATCH, False, False), "63 92 94 144-146 149 154"),
    XidClass.FATAL: ((Condition.BAD, False, False), ""),
    XidClass.NEEDS_RESET: (
        (Condition.BAD, True, False),
        "46 48 62 64 74 79 95 109 110 119 120 136 140 143 150 155 156 158 169",
    ),
    XidClass.NEEDS_REBOOT: ((Condition.BAD, True, True), "151"),
}
"""The condition after an XID of that class, whether a reset and a reboot are needed, and its
numbers in the catalog. Numbers of no other class are fatal."""


def numbers(text: str) -> set[int]:
    """`1-3 7` is 1, 2, 3 and 7."""
    ends = [[int(end) for end in item.split("-")] for item in text.split()]
    return {number for pair in ends for number in range(pair[0], pair[-1] + 1)}


def test_no_number_of_the_catalog_is_missing_and_each_has_the_catalogs_action():
    known = {action: numbers(text) for action, text in CATALOG.items()}

    assert set(range(1, 173)) == set().union(*known.values()) == XIDS.keys()
    assert known == {
        action: {row.number for row in XIDS.values() if row.action == action} for action in known
    }


@pytest.mark.parametrize("kind", XidClass)
def test_each_class_of_xids_has_its_own_meaning(kind):
    report = DriverEvent(EventKind.XID, G1, 54321)

    health = judge(
        Health(Condition.OK, since=NOON), report, NOON, HealthSettings(xids={54321: kind})
    )

    assert CLASSES[kind][0] == (health.condition, health.needs_reset, health.needs_reboot)


def test_what_leaves_the_hardware_as_it_was_costs_no_gpu():
    known = {kind: numbers(text) for kind, (_, text) in CLASSES.items()}
    others = XIDS.keys() - set().union(*known.values())

    assert known | {XidClass.FATAL: others} == {
        kind: {row.number for row in XIDS.values() if row.kind is kind} for kind in XidClass
    }


def test_what_the_plugins_skip_counts_here_where_the_catalog_wants_a_reset():
    assert APPLICATION == PLUGINS_SKIP
    assert [109] == [n for n in PLUGINS_SKIP if xid_class(n) is not XidClass.APPLICATION]
    assert XidClass.NEEDS_RESET is xid_class(109)
    assert XidClass.APPLICATION is xid_class(109, settings("94"))  # as both plugins read it


def test_every_row_has_a_name():
    assert all(row.name and row.name == xid_name(number) for number, row in XIDS.items())
    assert "a driver error" == xid_name(54321)
