"""What reports mean for a GPU: XIDs, ECC errors, probes, rest."""

import datetime as dt

import pytest

from agent.health.judge import aged, judge
from agent.health.xids import XIDS, HealthSettings, XidClass, xid_class
from agent.model import Condition, DriverEvent, EventKind, Health, Probe, ProbeOutcome
from tests.builders import G1, NOON, a_health
from tests.unit.core.health.judging import (
    FAILED,
    LOST,
    OK,
    PASSED,
    SETTINGS,
    SILENT,
    after,
    later,
    xid,
)


@pytest.mark.parametrize("number", [13, 31, 43, 45, 68, 32])
def test_an_xid_of_an_application_says_nothing_about_the_gpu(number):
    assert OK is after(OK, xid(number))


@pytest.mark.parametrize("number", [63, 92, 94])
def test_a_contained_error_is_watched_and_served(number):
    health = after(OK, xid(number))

    assert (Condition.WATCH, True, number) == (health.condition, health.serving, health.xid)


@pytest.mark.parametrize(("number", "reset"), [(54, False), (16, False), (999, False)])
def test_a_fatal_xid_is_bad_without_a_reset_and_so_is_an_unknown_one(number, reset):
    health = after(OK, xid(number))

    assert (Condition.BAD, False, reset) == (health.condition, health.serving, health.needs_reset)


@pytest.mark.parametrize("number", [48, 64, 74, 79, 95, 119, 120, 140])
def test_a_grave_xid_is_bad_until_a_reset(number):
    health = after(OK, xid(number))

    assert (Condition.BAD, False, True) == (health.condition, health.serving, health.needs_reset)
    assert f"XID {number}" in health.text
    assert f"[H-{number:03d}]" in health.text


def test_the_operator_may_reclassify_an_xid():
    settings = HealthSettings(xids={13: XidClass.FATAL, 79: XidClass.APPLICATION})

    assert Condition.BAD is judge(OK, xid(13), NOON, settings).condition
    assert OK is judge(OK, xid(79), NOON, settings)


def test_an_xid_that_needs_a_reboot_says_so_and_is_not_mended_by_a_reset():
    struck = after(OK, xid(151))
    back = after(struck, LOST, PASSED)

    assert (True, True, "reboot") == (struck.needs_reset, struck.needs_reboot, struck.action)
    assert "reboot the node [H-151]" in struck.text
    assert (Condition.BAD, True, "reboot") == (back.condition, back.needs_reboot, back.action)
    assert Condition.BAD is after(back, *[PASSED] * 9, at=86400).condition


@pytest.mark.parametrize(
    ("report", "cause", "action", "runbook"),
    [
        (xid(94), "xid", "wait", "H-094"),
        (xid(54), "xid", "wait", "H-054"),
        (xid(48), "xid", "reset", "H-048"),
        (xid(151), "xid", "reboot", "H-151"),
        (DriverEvent(EventKind.ECC_DOUBLE, G1), "ecc", "reset", "H-ECC"),
        (LOST, "lost", "reset", "H-LOST"),
        (FAILED, "probe", "wait", "H-PROBE"),
        (SILENT, "driver", "inspect", "H-SILENT"),
    ],
)
def test_every_verdict_has_a_cause_an_action_and_a_runbook_id(report, cause, action, runbook):
    health = after(OK, report)

    assert (cause, action, runbook) == (health.cause, health.action, health.runbook)
    assert health.text.endswith(f"[{runbook}]")


def test_every_row_of_the_table_is_found_by_its_number():
    assert all(number == row.number for number, row in XIDS.items())
    assert XidClass.FATAL is xid_class(54321)


def test_an_xid_of_a_gpu_that_the_driver_cannot_name_is_a_suspicion_only():
    health = after(OK, xid(48, uuid=None))

    assert (Condition.WATCH, True) == (health.condition, health.serving)
    assert "cannot name" in health.text


def test_a_memory_error_of_a_gpu_that_the_driver_cannot_name_is_a_suspicion_only():
    health = after(OK, DriverEvent(EventKind.ECC_DOUBLE, None))

    assert (Condition.WATCH, True, "ecc", "H-ECC") == (
        health.condition,
        health.serving,
        health.cause,
        health.runbook,
    )
    assert not health.needs_reset
    assert "cannot name" in health.text


@pytest.mark.parametrize("event", [xid(63, uuid=None), DriverEvent(EventKind.ECC_DOUBLE, None)])
def test_what_names_no_gpu_begins_no_rest_of_an_ill_one_anew(event):
    ill = after(OK, xid(54))

    assert ill is judge(ill, event, NOON + dt.timedelta(seconds=300), HealthSettings())


def test_an_xid_without_a_number_is_fatal():
    assert Condition.BAD is after(OK, DriverEvent(EventKind.XID, G1)).condition


@pytest.mark.parametrize("kind", [EventKind.ECC_SINGLE, EventKind.CHANGED])
def test_corrected_errors_and_changes_judge_nothing(kind):
    assert OK is after(OK, DriverEvent(kind, G1))


def test_an_uncorrectable_memory_error_needs_a_reset():
    health = after(OK, DriverEvent(EventKind.ECC_DOUBLE, G1))

    assert ("ecc", True, False) == (health.cause, health.needs_reset, health.serving)


def test_the_first_cause_stays_but_a_graver_one_takes_its_place():
    watched, bad, reset = xid(94), xid(54), xid(48)

    assert 54 == after(OK, watched, bad, watched).xid
    assert 48 == after(OK, bad, reset, bad).xid
    assert 48 == after(OK, reset, xid(95)).xid


def test_a_repeated_report_begins_the_quiet_time_anew_at_most_once_a_second():
    bad = after(OK, xid(54))

    assert bad is judge(bad, xid(54), later(10.9), SETTINGS)
    again = judge(bad, xid(54), later(11), SETTINGS)
    assert (bad.since, later(11)) == (again.since, again.quiet_since)
    rested = judge(bad, PASSED, later(10.5), SETTINGS)
    assert later(10.9) == judge(rested, xid(54), later(10.9), SETTINGS).quiet_since


def test_failed_probes_of_a_bad_gpu_only_begin_its_rest_anew():
    rested = after(after(OK, xid(54)), PASSED, at=20)

    assert (0, 54) == (after(rested, FAILED, at=30).passed_probes, rested.xid)
    failed = after(rested, FAILED, at=30)
    assert (rested.since, later(30)) == (failed.since, failed.quiet_since)
    assert after(failed, *[PASSED] * 3, at=30 + SETTINGS.quiet - 1).ill
    assert Condition.OK is after(failed, *[PASSED] * 3, at=30 + SETTINGS.quiet).condition


def test_a_lost_gpu_is_not_served_and_stays_lost_whatever_is_reported():
    lost = after(OK, LOST)

    assert (Condition.LOST, False) == (lost.condition, lost.serving)
    assert lost is after(lost, LOST, at=20)
    assert lost is after(lost, FAILED, at=20)
    assert Condition.LOST is after(lost, xid(79), at=20).condition
    assert 79 == after(lost, xid(79), at=20).xid
    assert "XID 79" in after(OK, xid(79), LOST).text
    assert "no reason" in after(OK, Probe(G1, ProbeOutcome.LOST)).text


def test_lost_then_present_takes_the_need_for_a_reset_away_but_not_the_rest():
    back = after(OK, xid(79), LOST, PASSED)

    assert (Condition.BAD, False, 1) == (back.condition, back.needs_reset, back.passed_probes)


def test_an_xid_of_a_lost_gpu_counts_only_if_the_gpu_was_back_already():
    lost = after(OK, xid(79), LOST)
    back, echo = after(lost, xid(48), PASSED), after(lost, xid(48), xid(48), LOST, PASSED)

    assert (Condition.BAD, True, "reset") == (back.condition, back.needs_reset, back.action)
    assert "needs another reset [H-079]" in back.text
    assert (Condition.BAD, False) == (echo.condition, echo.needs_reset)
    rebooting = after(lost, xid(151), LOST, PASSED)
    assert (True, "reboot") == (rebooting.needs_reboot, rebooting.action)


def test_a_bad_gpu_recovers_after_a_quiet_time_and_enough_passed_probes():
    bad = after(OK, xid(54), at=0)
    twice = after(after(bad, PASSED, at=500), PASSED, at=599)

    assert Condition.BAD is twice.condition
    well = Health(Condition.OK, since=later(600), bouts=1, recovered_at=later(600))
    assert well == after(twice, PASSED, at=600)
    assert Condition.BAD is after(bad, PASSED, PASSED, at=601).condition
    assert Condition.OK is after(bad, PASSED, PASSED, PASSED, at=601).condition


def test_passed_probes_are_counted_only_as_far_as_they_matter():
    thrice = after(after(OK, xid(54)), PASSED, PASSED, PASSED)

    assert thrice is after(thrice, PASSED)


def test_a_gpu_that_needs_a_reset_never_recovers_by_rest():
    bad = after(OK, xid(48), at=0)

    assert Condition.BAD is after(bad, *[PASSED] * 9, at=86400).condition


def test_a_watched_gpu_is_ok_again_after_its_quiet_time():
    watched = after(OK, xid(94), at=0)

    assert Condition.OK is after(watched, PASSED, PASSED, PASSED, at=600).condition


def test_a_silent_gpu_is_served_until_the_driver_has_hung_too_long():
    silent = after(OK, SILENT, at=0)

    assert (Condition.UNMONITORED, True) == (silent.condition, silent.serving)
    assert silent is aged(silent, later(59.9), SETTINGS)
    assert silent is after(silent, SILENT, at=59.9)
    assert not aged(silent, later(60), SETTINGS).serving
    assert not after(silent, SILENT, at=60).serving
    assert "no reply" in after(OK, Probe(G1, ProbeOutcome.SILENT)).text


def test_reports_of_a_silent_gpu_do_not_stretch_the_time_for_which_it_is_served():
    silent = after(OK, SILENT, at=0)

    assert 0 == (after(silent, xid(94), at=50).since - NOON).total_seconds()
    assert Condition.UNMONITORED is after(silent, xid(94), at=50).condition
    assert Condition.BAD is after(silent, xid(79), at=50).condition


def test_a_gpu_that_answers_again_is_ok_or_watched_if_it_was():
    assert Health(Condition.OK, since=later(10)) == after(OK, SILENT, PASSED)
    assert Condition.WATCH is after(OK, xid(94), SILENT, PASSED).condition


def test_silence_of_a_bad_or_lost_gpu_voids_its_passed_probes_and_nothing_else():
    bad = after(OK, xid(54), PASSED)

    assert (Condition.BAD, 0) == (after(bad, SILENT).condition, after(bad, SILENT).passed_probes)
    assert Condition.LOST is after(OK, LOST, SILENT).condition


def test_time_alone_changes_no_other_condition():
    for condition in (Condition.OK, Condition.WATCH, Condition.BAD, Condition.LOST):
        health = a_health(condition=condition)
        assert health is aged(health, later(1e6), SETTINGS)


@pytest.mark.parametrize(
    ("reports", "runbook", "action"),
    [
        ((xid(79),), "H-079", "reboot"),
        ((xid(79), LOST), "H-079", "reboot"),
        ((xid(48), LOST), "H-048", "reset"),
        ((LOST, xid(79)), "H-LOST", "reboot"),
        ((LOST, xid(79), PASSED), "H-LOST", "reset"),
        ((xid(79), LOST, PASSED), "H-079", "wait"),
        ((xid(151), LOST), "H-151", "reboot"),
    ],
)
def test_one_incident_keeps_its_id_and_asks_for_the_strongest_action(reports, runbook, action):
    health = after(OK, *reports)

    assert (runbook, action) == (health.runbook, health.action)
    assert health.text.endswith(f"[{runbook}]")
