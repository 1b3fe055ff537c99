"""Which of the GPUs that are under suspicion counts more memory errors than before."""

import datetime as dt

from agent.core.condition import Cause, Condition, Health
from agent.core.events import DriverEvent, EventKind, Probe
from agent.core.gpu import GpuUuid


class MemoryErrors:
    """Compares each GPU's count of uncorrected errors with that of the probe before.

    The driver may report such an error and name no GPU. Then all are watched for it, and the one
    whose count rose within `near` seconds of that is the one.
    """

    def __init__(self, near: float) -> None:
        self._near = dt.timedelta(seconds=near)
        self._counts: dict[GpuUuid, int] = {}
        self._rose_at: dict[GpuUuid, dt.datetime] = {}

    def told(self, probe: Probe, known: Health, now: dt.datetime) -> DriverEvent | None:
        """The error as if the driver had named the GPU; None: nothing says that it was this one.

        `known` is its health without `probe`.
        """
        uuid, count = probe.uuid, probe.signs.ecc_uncorrected
        if count is None:
            return None
        if count > self._counts.get(uuid, count):
            self._rose_at[uuid] = now
        self._counts[uuid] = count
        rose_at = self._rose_at.get(uuid)
        suspected = known.condition is Condition.WATCH and known.cause == Cause.ECC
        if not suspected or rose_at is None or abs(rose_at - known.since) > self._near:
            return None
        del self._rose_at[uuid]
        return DriverEvent(EventKind.ECC_DOUBLE, uuid)
