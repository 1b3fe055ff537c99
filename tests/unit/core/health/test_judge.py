"""Histories of one GPU, and what the agent knows after each: XIDs, probes, signs, resets, rest.

The XID table, and the two variables of HAMi's and NVIDIA's plugin that change it.
"""

import datetime as dt
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.health import judge
from agent.health.judge import HealthSettings, XidClass, missing, past, xid_class, xid_name
from agent.model import (
    Condition,
    DriverEvent,
    EventKind,
    FabricState,
    GpuSigns,
    Health,
    Probe,
    ProbeOutcome,
    RecoveryAction,
)
from tests.builders import G1, NOON
from tests.hami_vectors import Vector, cases
from tests.unit.rows import rows_of

SETTINGS = HealthSettings()
PASSED = Probe(G1, ProbeOutcome.PASSED)
ROWS = GpuSigns(rows_failed=True)
REPORTS: dict[str, DriverEvent | Probe] = {
    "ecc": DriverEvent(EventKind.ECC_DOUBLE, G1),
    "ecc?": DriverEvent(EventKind.ECC_DOUBLE, None),
    "changed": DriverEvent(EventKind.CHANGED, G1),
    "xid-none": DriverEvent(EventKind.XID, G1),
    "pass": PASSED,
    "fail": Probe(G1, ProbeOutcome.FAILED, "Unknown Error"),
    "refuse": Probe(G1, ProbeOutcome.REFUSED, "GPU requires restart"),
    "lose": Probe(G1, ProbeOutcome.LOST, "GPU is lost"),
    "lose-wordless": Probe(G1, ProbeOutcome.LOST),
    "silent": Probe(G1, ProbeOutcome.SILENT, "2 s"),
    "silent-wordless": Probe(G1, ProbeOutcome.SILENT),
    "deaf": Probe(G1, ProbeOutcome.PASSED, unmonitored="not supported"),
}
SIGNS = {
    "rows-failed": ROWS,
    "rows-pending": GpuSigns(rows_pending=True),
    "pages-pending": GpuSigns(pages_pending=True),
    **{f"advise-{action}": GpuSigns(recovery=action) for action in RecoveryAction},
    **{f"fabric-{state}": GpuSigns(fabric=state) for state in FabricState},
}
REPORTS |= {name: replace(PASSED, signs=sign) for name, sign in SIGNS.items()}


def report_of(name: str) -> DriverEvent | Probe:
    """`xid48`, `xid48?` for one that names no GPU, or a name of REPORTS."""
    if xid := re.fullmatch(r"xid(\d+)(\??)", name):
        return DriverEvent(EventKind.XID, None if xid[2] else G1, int(xid[1]))
    return REPORTS[name]


def later(seconds: float) -> dt.datetime:
    return NOON + dt.timedelta(seconds=seconds)


def after(history: str, settings: HealthSettings = SETTINGS) -> tuple[Health, dt.datetime]:
    """The health after a history, and when that is.

    A number is the second from which the next reports are, `+5` is 5 s later, `pass*3` three of
    them. Deeds of the agent and of the operator are words as well.
    """
    health, second = Health(Condition.OK, since=NOON), 10.0
    deeds = {
        "ages": lambda now: judge.aged(health, now, settings),
        "restart": lambda now: judge.remembered(health, now, settings, boot_changed=False),
        "boot": lambda now: judge.remembered(health, now, settings, boot_changed=True),
        "was-reset": lambda now: judge.relieved(health, SIGNS["advise-none"], now),
        "release": lambda now: judge.released(health, now),
        "of-0.1.0": lambda _: replace(health, before=None),
        "take-back": lambda now: judge.taken_back(health, now, settings),
        "off": judge.switched_off,
    }
    for word in history.split():
        if moment := re.fullmatch(r"(\+?)(-?[\d.]+)", word):
            second = second * bool(moment[1]) + float(moment[2])
            continue
        name, _, times = word.partition("*")
        for _ in range(int(times or 1)):
            now = later(second)
            if name in deeds:
                health = deeds[name](now)
                continue
            health = judge.judge(health, report_of(name), now, settings)
    return health, later(second)


def told(health: Health) -> str:
    """The health in one line: what differs from a GPU that is well."""

    def second(moment: dt.datetime) -> str:
        return f"{(moment - NOON).total_seconds():g}"

    words = [health.condition.value, "" if health.serving else "out"]
    if health.condition is not Condition.OK:
        words += [str(health.cause), str(health.action), f"@{second(health.since)}"]
    if health.xid is not None and f"XID {health.xid}" not in health.text:
        words += [f"xid {health.xid}"]
    words += ["needs-reset" * health.needs_reset, "needs-reboot" * health.needs_reboot]
    words += [f"rests@{second(health.quiet_since)}" if health.quiet_since else ""]
    words += [f"passed:{health.passed_probes}" if health.passed_probes else ""]
    words += [f"bouts:{health.bouts}" if health.bouts > 1 else ""]
    if health.recovered_at is not None:
        words += [f"recovered@{second(health.recovered_at)}"]
    return " ".join(filter(None, words)) + (f" | {health.text}" if health.text else "")


HISTORIES = dict(rows_of(__file__, "histories.txt"))
"""By history: what is told of the GPU after it."""


def said(history: str) -> str:
    """What a row asks for: the health, what a cool-down still needs, what happened, or no news."""
    kind, _, rest = history.partition(": ")
    match kind:
        case "needs":
            return "; ".join(missing(*after(rest), SETTINGS)) or "nothing"
        case "happened":
            return past(after(rest)[0])
        case "again":
            words, _, report = rest.rpartition(" ")
            health, now = after(words)
            again = judge.judge(health, report_of(report), now, SETTINGS)
            return "the same" if again is health else told(again)
    return told(after(history)[0])


@pytest.mark.parametrize("history", HISTORIES)
def test_a_history_leads_to_what_is_told_of_it(history):
    assert HISTORIES[history] == said(history)


@pytest.mark.parametrize(
    "settings",
    [HealthSettings(xids={48: XidClass.APPLICATION}), HealthSettings(disabled_xids="48")],
)
def test_what_the_operator_declares_harmless_is_forgotten_and_nothing_else(settings):
    struck, faulty = after("xid48")[0], after("ecc")[0]
    assert Condition.OK is judge.remembered(struck, NOON, settings, boot_changed=False).condition
    assert Condition.BAD is judge.remembered(faulty, NOON, settings, boot_changed=False).condition


def test_a_gpu_that_keeps_falling_ill_rests_twice_as_long_each_time_up_to_two_hours():
    health, now, rests = Health(Condition.OK, since=NOON), 0.0, []
    for _ in range(7):
        report = DriverEvent(EventKind.XID, G1, 54)
        health = judge.judge(health, report, later(now), SETTINGS)
        began = now
        while health.ill:
            now += 10.0
            health = judge.judge(health, PASSED, later(now), SETTINGS)
        rests.append(now - began)
        now += 60.0

    assert [600.0, 1200.0, 2400.0, 4800.0, 7200.0, 7200.0, 7200.0] == rests


# The XID table.

APPLICATION = (13, 31, 43, 45, 68, 109)


def declared(disable: str, enable: str = "", **kinds: XidClass) -> HealthSettings:
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
        judged = declared(disable, enable)
        assert off is judged.off
        assert ignored == tuple(
            one for one in every if xid_class(one, judged) is XidClass.APPLICATION
        )


def test_the_agents_own_setting_wins_over_both_variables():
    judged = declared("94,48", "13", x94=XidClass.FATAL, x13=XidClass.APPLICATION)
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
