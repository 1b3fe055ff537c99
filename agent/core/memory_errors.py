"""Which of the GPUs that are under suspicion counts more memory errors than before.

The driver may report such an error and name no GPU. Then all are watched for it, and the one whose
count of uncorrected errors rose at about that time is the one.
"""

import dataclasses
import datetime as dt
from typing import Final

from agent.core.condition import Cause, Condition, Health
from agent.core.events import DriverEvent, EventKind, Probe


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
