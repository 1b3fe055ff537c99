"""What one container uses of each of its GPUs, summed over its live processes."""

import datetime as dt
from collections.abc import Iterable, Sequence

import msgspec

from agent.core.inventory.gpu import GpuUuid
from agent.core.usage.region import MemoryUse, RegionGpu, RegionReading, RegionState


class ContainerGpuUse(msgspec.Struct, frozen=True):
    """The use of one GPU by one container.

    - `index`, `memory_limit` (bytes) and `core_limit` (percent): as in RegionGpu.
    - `uuid`: see `use_of`.
    - `memory`: bytes. `sm_percent`: of the whole GPU; the sum may exceed 100.
    """

    index: int
    uuid: str
    memory_limit: int
    core_limit: int
    memory: MemoryUse
    sm_percent: int


class ContainerUse(msgspec.Struct, frozen=True):
    """The use of a container's GPUs at one time.

    - `last_kernel`: None: not known. `processes`: how many live ones use the region.
    - `reason`: why nothing is known, as in RegionReading; empty otherwise.
    """

    at: dt.datetime
    state: RegionState
    gpus: tuple[ContainerGpuUse, ...] = ()
    last_kernel: dt.datetime | None = None
    processes: int = 0
    reason: str = ""

    @property
    def idle(self) -> dt.timedelta | None:
        """The time since the last kernel; None: not known. A clock set back counts as no time."""
        if self.last_kernel is None:
            return None
        return max(self.at - self.last_kernel, dt.timedelta())


def use_of(reading: RegionReading, at: dt.datetime, given: Sequence[GpuUuid] = ()) -> ContainerUse:
    """Sum the reading over its live processes; without `alive` all slots in use count.

    `given`: the GPUs that the container was given, in CUDA's order; empty: not known. The uuids of
    the result are always of these. If the region names others, its GPUs count by position.
    """
    region = reading.region
    if region is None:
        return ContainerUse(at, reading.state, reason=reading.reason)
    uuids = _uuids(region.gpus, tuple(dict.fromkeys(given)))
    live = tuple(
        process
        for process in region.processes
        if reading.alive is None or process.pid in reading.alive
    )
    return ContainerUse(
        at=at,
        state=reading.state,
        gpus=tuple(
            ContainerGpuUse(
                index=gpu.index,
                uuid=uuid,
                memory_limit=gpu.memory_limit,
                core_limit=gpu.core_limit,
                memory=_sum(process.memory[position] for process in live),
                sm_percent=sum(process.sm_percent[position] for process in live),
            )
            for position, (gpu, uuid) in enumerate(zip(region.gpus, uuids, strict=False))
        ),
        last_kernel=region.last_kernel,
        processes=len(live),
    )


def _uuids(gpus: Sequence[RegionGpu], given: Sequence[GpuUuid]) -> Sequence[str]:
    """The uuids of the region's first GPUs. GPUs beyond those that were given have none."""
    named = [gpu.uuid for gpu in gpus]
    distinct = frozenset(named)
    if not given or (len(distinct) == len(named) and distinct <= frozenset(given)):
        return named
    return given


def _sum(parts: Iterable[MemoryUse]) -> MemoryUse:
    """The sum over processes. Only of all together HAMi-core's numbers cannot be negative."""
    sums = map(sum, zip(*parts, strict=True))
    return MemoryUse(*(max(0, number) for number in sums))
