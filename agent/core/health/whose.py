"""Attributes a fault that the driver does not attribute: to the driver itself, or to one GPU.

- If all GPUs fail with the same text, the fault is the driver's.
- If the driver reports a memory error without a GPU, all GPUs are watched. The error belongs to the
  GPU whose count of uncorrected errors rose at about that time.
"""

import datetime as dt
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from agent.core.errors import cap
from agent.core.health.reports import NO_SIGNS, DriverEvent, EventKind, Probe, ProbeOutcome
from agent.core.inventory.condition import Cause, Condition, Health
from agent.core.inventory.gpu import GpuFault, GpuUuid, Scan, Trouble

MANY: Final = 2
"""The fewest GPUs for which equal failures are the driver's."""

OF_ALL: Final = "the driver reports the same for all GPUs: "

MAY_PASS: Final = frozenset({Trouble.LOST, Trouble.FAILED})
"""Troubles that the driver also reports for a GPU when the driver itself has a fault."""

Ill = Callable[[GpuUuid], bool]
"""Whether a GPU is known to be bad or lost. Such a GPU can fail for a reason of its own."""


def has_failed(probe: Probe) -> bool:
    """True if the driver answered the probe with an error and without signs of the GPU."""
    return probe.outcome in {ProbeOutcome.FAILED, ProbeOutcome.LOST} and probe.signs == NO_SIGNS


def fail_alike(probes: Iterable[Probe], ill: Ill) -> bool:
    """Whether all GPUs that were healthy, at least one, fail with the same text."""
    texts = {probe.text if has_failed(probe) else None for probe in probes if not ill(probe.uuid)}
    return len(texts) == 1 and None not in texts


def of_the_driver(probes: Iterable[Probe], ill: Ill) -> tuple[Probe, ...]:
    """The same probes. If all healthy GPUs fail alike, their probes become silent instead."""
    probes = tuple(probes)
    well = [probe for probe in probes if not ill(probe.uuid)]
    if len(well) < MANY or not fail_alike(well, ill):
        return probes
    (failure,) = {probe.text for probe in well}
    text = OF_ALL + (cap(failure) or "an error")
    return tuple(
        Probe(probe.uuid, ProbeOutcome.SILENT, text) if probe.text == failure else probe
        for probe in probes
    )


def same_fault(scan: Scan, ill: Ill) -> GpuFault | None:
    """The common fault if the scan describes no GPU and all healthy GPUs fail alike, else None."""
    faults = [
        fault
        for fault in scan.faults
        if fault.trouble not in {Trouble.RELEASED, Trouble.UNPLACED} and not ill(GpuUuid(fault.gpu))
    ]
    same = {msgspec.structs.replace(fault, gpu="", index=0) for fault in faults}
    if scan.gpus or len(same) != 1 or faults[0].trouble not in MAY_PASS:
        return None
    return faults[0]


class ErrorCount(msgspec.Struct, frozen=True):
    """The uncorrected errors of one GPU. `rose_at`: when they rose, if no event was made of it."""

    count: int | None = None
    rose_at: dt.datetime | None = None


NOT_COUNTED: Final = ErrorCount()


def compared(
    known: ErrorCount, probe: Probe, health: Health, now: dt.datetime, near: float
) -> tuple[ErrorCount, DriverEvent | None]:
    """The error count after `probe`, and a memory error event if it belongs to this GPU.

    The event is None if nothing attributes the error to this GPU. `health` is the health before
    `probe`. The count must have risen at most `near` seconds before or after the GPU last came
    under suspicion. A first count does not count as a rise.
    """
    count = probe.signs.ecc_uncorrected
    if count is None:
        return known, None
    has_risen = known.count is not None and count > known.count
    rose_at = now if has_risen else known.rose_at
    suspected = health.condition is Condition.WATCH and health.cause == Cause.ECC
    is_near = rose_at is not None and abs((rose_at - health.quiet_from).total_seconds()) <= near
    if not suspected or not is_near:
        return ErrorCount(count, rose_at), None
    return ErrorCount(count), DriverEvent(EventKind.ECC_DOUBLE, probe.uuid)
