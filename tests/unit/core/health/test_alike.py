"""What all GPUs say alike, and fail, is the driver's trouble."""

import pytest

from agent.health.attribution import OF_ALL, fail_alike, of_the_driver, same_fault
from agent.model import GpuFault, GpuSigns, GpuUuid, Probe, ProbeOutcome, Scan, Trouble
from tests.builders import a_gpu

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
