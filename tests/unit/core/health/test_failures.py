"""Failed probes: a hiccup takes no GPU away, and one that keeps failing is taken, however it is."""

import pytest

from agent.health.judge import LATELY, MOST_LATELY, SAME_HICCUP, judge, remembered
from agent.model import Condition, DriverEvent, Health, Probe
from tests.unit.core.health.judging import DEAF, FAILED, OK, PASSED, SETTINGS, SILENT, later, xid

CONTAINED = xid(94)


def after(health: Health, *steps: tuple[float, Probe | DriverEvent]) -> Health:
    """The health after these reports, each at its second."""
    for at, report in steps:
        health = judge(health, report, later(at), SETTINGS)
    return health


def alternating(*probes: Probe, every: float, count: int) -> list[tuple[float, Probe]]:
    """These probes in turn."""
    return [(every * n, probes[n % len(probes)]) for n in range(count)]


UNHEARD = after(OK, (0, DEAF))
SILENCED = after(OK, (0, SILENT))
WATCHED = after(OK, (0, CONTAINED))


@pytest.mark.parametrize("before", [OK, UNHEARD, SILENCED, WATCHED])
def test_the_first_failed_probe_is_a_doubt_and_the_second_in_a_row_is_bad(before):
    once = after(before, (1, FAILED))
    twice = after(once, (6, FAILED))

    assert once.serving
    assert once.condition is (Condition.WATCH if before is OK else before.condition)
    assert (Condition.BAD, False, "probe", "inspect") == (
        twice.condition,
        twice.serving,
        twice.cause,
        twice.action,
    )


@pytest.mark.parametrize("before", [OK, UNHEARD, SILENCED, WATCHED])
def test_all_failures_of_one_hiccup_are_one(before):
    shaken = after(before, *((1 + n * SAME_HICCUP / 50, FAILED) for n in range(50)))

    assert shaken.serving
    assert 1 == len(shaken.failures) == shaken.failed_in_row


def test_a_passed_probe_between_two_failures_ends_the_row():
    between = after(OK, (0, FAILED), (10, PASSED), (20, FAILED))

    assert (Condition.WATCH, 2) == (between.condition, len(between.failures))
    assert Condition.BAD is after(between, (30, FAILED)).condition


@pytest.mark.parametrize("passed", [PASSED, DEAF])
def test_a_gpu_that_fails_and_passes_in_turn_is_bad_before_long(passed):
    steps = alternating(FAILED, passed, every=10, count=2 * MOST_LATELY - 1)

    assert after(OK, *steps[:-1]).serving
    assert Condition.BAD is after(OK, *steps).condition


def test_a_gpu_that_fails_and_falls_silent_in_turn_is_bad():
    steps = alternating(FAILED, SILENT, PASSED, every=10, count=3 * MOST_LATELY)

    assert Condition.BAD is after(OK, *steps).condition


def test_a_failure_now_and_then_never_adds_up():
    steps = alternating(FAILED, PASSED, every=LATELY / 6, count=500)

    assert Condition.WATCH is after(OK, *steps).condition
    assert len(after(OK, *steps).failures) < MOST_LATELY


def test_a_silence_wipes_out_no_failure():
    back = after(OK, (0, FAILED), (10, SILENT), (20, PASSED))

    assert (Condition.WATCH, "probe", 1) == (back.condition, back.cause, len(back.failures))
    assert Condition.OK is after(OK, (0, FAILED), (10, SILENT), (LATELY, PASSED)).condition


def test_a_gpu_that_was_bad_and_is_well_again_has_no_failures_on_its_account():
    bad = after(OK, (0, FAILED), (5, FAILED))
    well = after(bad, *((700 + n, PASSED) for n in range(3)))

    assert ((), 0) == (bad.failures, bad.failed_in_row)
    assert Condition.OK is well.condition
    assert Condition.WATCH is after(well, (800, FAILED)).condition


def test_failures_outlive_a_restart_but_no_boot_and_no_clock_that_was_set_back():
    once = after(OK, (100, FAILED))
    kept = remembered(once, later(101), boot_changed=False)
    early = remembered(once, later(50), boot_changed=False)

    assert Condition.BAD is judge(kept, FAILED, later(106), SETTINGS).condition
    assert (later(50),) == early.failures
    assert Condition.BAD is judge(early, FAILED, later(55), SETTINGS).condition
    assert () == remembered(once, later(101), boot_changed=True).failures
