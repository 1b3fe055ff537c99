"""Whose a fault is: what all GPUs say alike is the driver's, a rising count tells one GPU."""

import msgspec
import pytest

from agent.health.judge import (
    NOT_COUNTED,
    OF_ALL,
    ErrorCount,
    compared,
    fail_alike,
    of_the_driver,
    same_fault,
)
from agent.model import (
    Condition,
    DriverEvent,
    EventKind,
    GpuFault,
    GpuSigns,
    GpuUuid,
    Health,
    Probe,
    ProbeOutcome,
    Scan,
    Trouble,
)
from tests.builders import G1, NOON, a_gpu, a_health
from tests.unit.core.health.test_judge import later

A, B, C = (GpuUuid(f"GPU-{letter}") for letter in "abc")
ERROR, LOST = "Unknown Error", "GPU is lost"


def nobody(_: GpuUuid) -> bool:
    return False


def failed(uuid: GpuUuid, text: str = ERROR) -> Probe:
    return Probe(uuid, ProbeOutcome.LOST if text == LOST else ProbeOutcome.FAILED, text)


def passed(uuid: GpuUuid) -> Probe:
    return Probe(uuid, ProbeOutcome.PASSED)


@pytest.mark.parametrize("text", [ERROR, LOST])
def test_what_fails_alike_on_all_has_not_answered(text):
    probes = of_the_driver((failed(A, text), failed(B, text)), nobody)

    assert [Probe(uuid, ProbeOutcome.SILENT, OF_ALL + text) for uuid in (A, B)] == list(probes)


@pytest.mark.parametrize(
    "probes",
    [
        (failed(A), passed(B)),
        (failed(A), failed(B, LOST)),
        (failed(A), Probe(B, ProbeOutcome.SILENT, ERROR)),
        (failed(A), Probe(B, ProbeOutcome.REFUSED, ERROR)),
        (failed(A), Probe(B, ProbeOutcome.FAILED, ERROR, GpuSigns(rows_failed=True))),
        (failed(A),),
        (),
    ],
)
def test_what_one_says_otherwise_or_alone_is_its_own(probes):
    assert probes == of_the_driver(probes, nobody)


def test_one_that_is_ill_already_speaks_for_nobody():
    probes = (failed(A, LOST), failed(B), failed(C))
    silent = [Probe(uuid, ProbeOutcome.SILENT, OF_ALL + ERROR) for uuid in (B, C)]

    assert (probes[0], *silent) == of_the_driver(probes, {A}.__contains__)
    assert probes == of_the_driver(probes, {A, B}.__contains__)


def test_one_alone_is_worth_another_session():
    assert fail_alike([failed(A)], nobody)
    assert not fail_alike([failed(A)], {A}.__contains__)
    assert not fail_alike([], nobody)


@pytest.mark.parametrize("trouble", [Trouble.LOST, Trouble.FAILED])
def test_a_scan_that_describes_nobody_for_one_reason_has_one_fault(trouble):
    faults = tuple(GpuFault(uuid, ERROR, trouble) for uuid in (A, B))

    assert faults[0] == same_fault(Scan("570", (), faults), nobody)
    assert faults[1] == same_fault(Scan("570", (), faults), {A}.__contains__)
    assert same_fault(Scan("570", (), faults), {A, B}.__contains__) is None
    assert same_fault(Scan("570", (a_gpu(),), faults), nobody) is None


@pytest.mark.parametrize("trouble", [Trouble.SILENT, Trouble.DENIED, Trouble.RESET])
def test_gpus_that_wake_or_must_be_reset_are_no_drivers_trouble(trouble):
    faults = tuple(GpuFault(uuid, ERROR, trouble) for uuid in (A, B))

    assert same_fault(Scan("570", (), faults), nobody) is None


NEAR = 20.0
OK = a_health()
SUSPECTED = a_health(condition=Condition.WATCH, cause="ecc")
HERS = DriverEvent(EventKind.ECC_DOUBLE, G1)


def counting(count: int | None) -> Probe:
    return Probe(G1, ProbeOutcome.PASSED, signs=GpuSigns(ecc_uncorrected=count))


def told(known: ErrorCount, count: int | None, health: Health = SUSPECTED, at: float = 0.0):
    return compared(known, counting(count), health, later(at), NEAR)


@pytest.mark.parametrize(
    ("known", "count", "found"),
    [
        (NOT_COUNTED, 7, (ErrorCount(7), None)),
        (ErrorCount(7), 7, (ErrorCount(7), None)),
        (ErrorCount(7), 8, (ErrorCount(8), HERS)),
        (ErrorCount(7, NOON), None, (ErrorCount(7, NOON), None)),
        (ErrorCount(7), 0, (ErrorCount(0), None)),
        (ErrorCount(0), 1, (ErrorCount(1), HERS)),
    ],
)
def test_a_count_that_rises_under_suspicion_is_told_once(known, count, found):
    assert found == told(known, count)


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
