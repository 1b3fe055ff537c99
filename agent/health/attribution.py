"""Whose a fault is, where the driver does not say: the driver's own, or that of one GPU.

- If the driver gives only an index and no UUID, the GPU that is missing is behind the fault.
- If all GPUs fail with the same text, the fault is the driver's.
- If the driver reports a memory error without a GPU, all GPUs are watched. The error belongs to
  the GPU whose count of uncorrected errors rose at about that time.
"""

import datetime as dt
from collections.abc import Callable, Collection, Iterable
from typing import Final

import msgspec

from agent.errors import cap
from agent.model import (
    NO_SIGNS,
    Cause,
    Condition,
    DriverEvent,
    EventKind,
    GpuFault,
    GpuUuid,
    Health,
    Probe,
    ProbeOutcome,
    Scan,
    Trouble,
)

NAMELESS: Final = "index "
"""The prefix of GpuFault.gpu if only the index is known."""


def named(scan: Scan, missing: Collection[GpuUuid]) -> Scan:
    """`scan` with UUIDs for its nameless faults.

    `missing` are GPUs that were known before and that `scan` does not describe. If one GPU is
    missing and one fault is nameless, they are the same GPU. Otherwise each missing GPU may be
    behind any of the faults.
    """
    nameless = [fault for fault in scan.faults if fault.gpu.startswith(NAMELESS)]
    if not nameless or not missing:
        return scan
    if len(nameless) == len(missing) == 1:
        (fault,), (uuid,) = nameless, missing
        index = int(fault.gpu.removeprefix(NAMELESS))
        known = msgspec.structs.replace(fault, gpu=uuid, index=index)
        faults = tuple(known if each is fault else each for each in scan.faults)
    else:
        text = "; ".join(f"it may be {fault.gpu}: {fault.text}" for fault in nameless)
        trouble = doubtful(nameless)
        faults = (*scan.faults, *(GpuFault(uuid, text, trouble) for uuid in sorted(missing)))
    return msgspec.structs.replace(scan, faults=faults)


def doubtful(nameless: Iterable[GpuFault]) -> Trouble:
    """The trouble of a GPU that may be behind any of these faults. It is never LOST."""
    is_silent = all(fault.trouble is Trouble.SILENT for fault in nameless)
    return Trouble.SILENT if is_silent else Trouble.FAILED


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
