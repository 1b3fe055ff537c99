"""A memory error that names no GPU is the one's whose count rose at about that time."""

import msgspec
import pytest

from agent.health.attribution import NOT_COUNTED, ErrorCount, compared
from agent.model import Condition, DriverEvent, EventKind, GpuSigns, Health, Probe, ProbeOutcome
from tests.builders import G1, NOON, a_health
from tests.unit.core.health.judging import OK, later

NEAR = 20.0
SUSPECTED = a_health(condition=Condition.WATCH, cause="ecc")
HERS = DriverEvent(EventKind.ECC_DOUBLE, G1)


def counting(count: int | None) -> Probe:
    return Probe(G1, ProbeOutcome.PASSED, signs=GpuSigns(ecc_uncorrected=count))


def told(known: ErrorCount, count: int | None, health: Health = SUSPECTED, at: float = 0.0):
    return compared(known, counting(count), health, later(at), NEAR)


def test_a_first_count_and_an_equal_one_say_nothing():
    assert (ErrorCount(7), None) == told(NOT_COUNTED, 7)
    assert (ErrorCount(7), None) == told(ErrorCount(7), 7)


def test_a_count_that_rises_under_suspicion_is_told_once():
    assert (ErrorCount(8), HERS) == told(ErrorCount(7), 8)
    assert (ErrorCount(8), None) == told(ErrorCount(8), 8)


@pytest.mark.parametrize(
    "health",
    [
        OK,
        a_health(condition=Condition.WATCH, cause="xid"),
        a_health(condition=Condition.BAD, cause="ecc"),
    ],
)
def test_a_count_that_rises_without_suspicion_is_kept_for_one_that_follows(health):
    known, event = told(ErrorCount(7), 8, health, at=-NEAR)

    assert (ErrorCount(8, later(-NEAR)), None) == (known, event)
    assert (ErrorCount(8), HERS) == told(known, 8)


@pytest.mark.parametrize("at", [-NEAR - 1, NEAR + 1])
def test_a_count_that_rose_too_far_from_the_suspicion_is_not_its_cause(at):
    known, _ = told(ErrorCount(7), 8, OK, at=at)

    assert (known, None) == told(known, 8, at=NEAR)


def test_a_later_suspicion_of_the_same_gpu_counts_too():
    suspected = msgspec.structs.replace(SUSPECTED, quiet_since=later(100))

    assert (ErrorCount(8), HERS) == told(ErrorCount(7), 8, suspected, at=100)


def test_a_probe_that_tells_no_count_changes_nothing():
    known = ErrorCount(7, NOON)

    assert (known, None) == told(known, None)


def test_a_count_that_begins_anew_has_not_risen():
    known, event = told(ErrorCount(7), 0)

    assert (ErrorCount(0), None) == (known, event)
    assert (ErrorCount(1), HERS) == told(known, 1)
