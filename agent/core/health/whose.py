"""Whose trouble it is, where the driver does not say: its own, or which GPU's.

What it says of all GPUs alike is its own. It may report a memory error and name no GPU: then
all are watched for it, and the one whose count of uncorrected errors rose at about that time is it.
"""

import dataclasses
import datetime as dt
from collections.abc import Callable, Iterable
from typing import Final

from agent.core.errors import cap
from agent.core.health.reports import NO_SIGNS, DriverEvent, EventKind, Probe, ProbeOutcome
from agent.core.inventory.condition import Cause, Condition, Health
from agent.core.inventory.gpu import GpuFault, GpuUuid, Scan, Trouble

MANY: Final = 2
"""Of one GPU alone nobody can tell whether it is the driver's trouble."""

OF_ALL: Final = "the driver says the same of all GPUs: "

MAY_PASS: Final = frozenset({Trouble.LOST, Trouble.FAILED})
"""What a driver that is in trouble itself says of its GPUs, too."""

Ill = Callable[[GpuUuid], bool]
"""Whether a GPU is known to be bad or lost: it may fail as others do, for a reason of its own."""


def has_failed(probe: Probe) -> bool:
    """True where the driver answered with an error, and the GPU itself told nothing."""
    return probe.outcome in {ProbeOutcome.FAILED, ProbeOutcome.LOST} and probe.signs == NO_SIGNS


def fail_alike(probes: Iterable[Probe], ill: Ill) -> bool:
    """Whether all GPUs that were well fail in the same words, be it only one."""
    words = {probe.text if has_failed(probe) else None for probe in probes if not ill(probe.uuid)}
    return len(words) == 1 and None not in words


def of_the_driver(probes: Iterable[Probe], ill: Ill) -> tuple[Probe, ...]:
    """The same probes; where several GPUs fail alike, none of them has answered."""
    asked = tuple(probes)
    well = [probe for probe in asked if not ill(probe.uuid)]
    if len(well) < MANY or not fail_alike(well, ill):
        return asked
    (words,) = {probe.text for probe in well}
    told = OF_ALL + (cap(words) or "an error")
    return tuple(
        Probe(probe.uuid, ProbeOutcome.SILENT, told) if probe.text == words else probe
        for probe in asked
    )


def same_fault(scan: Scan, ill: Ill) -> GpuFault | None:
    """One fault that stands for all: no GPU is described, and those that were well fail alike."""
    faults = [
        fault
        for fault in scan.faults
        if fault.trouble not in {Trouble.RELEASED, Trouble.UNPLACED} and not ill(GpuUuid(fault.gpu))
    ]
    same = {dataclasses.replace(fault, gpu="", index=0) for fault in faults}
    if scan.gpus or len(same) != 1 or faults[0].trouble not in MAY_PASS:
        return None
    return faults[0]


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorCount:
    """What one GPU has counted so far. `rose_at`: when the count last rose, if nobody was told."""

    count: int | None = None
    rose_at: dt.datetime | None = None


NOT_COUNTED: Final = ErrorCount()


def compared(
    known: ErrorCount, probe: Probe, health: Health, now: dt.datetime, near: float
) -> tuple[ErrorCount, DriverEvent | None]:
    """What is known after `probe`, and the error as if the driver had named this GPU.

    None: nothing says that it was this one. `health` is its health without `probe`; the count must
    have risen within `near` seconds of the suspicion, before or after. A first count has not risen.
    """
    count = probe.signs.ecc_uncorrected
    if count is None:
        return known, None
    has_risen = known.count is not None and count > known.count
    rose_at = now if has_risen else known.rose_at
    suspected = health.condition is Condition.WATCH and health.cause == Cause.ECC
    if not suspected or rose_at is None or abs((rose_at - health.since).total_seconds()) > near:
        return ErrorCount(count, rose_at), None
    return ErrorCount(count), DriverEvent(EventKind.ECC_DOUBLE, probe.uuid)
