"""What one container uses of each of its GPUs, summed over its live processes."""

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.slices import MIB
from agent.core.state.ledger import Row
from agent.core.usage.region import MemoryUse, RegionGpu, RegionState, RegionSums

MOST_MIB: Final = 1 << 20
"""More memory than a GPU can have whose size is not known."""
MOST_AT_ONCE: Final = 16
"""Processes that count with 100 percent each: samples of several moments are summed."""


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


def use_of(sums: RegionSums, at: dt.datetime, given: Sequence[GpuUuid] = ()) -> ContainerUse:
    """The use that a region says.

    `given`: the GPUs that the container was given, in CUDA's order; empty: not known. The uuids of
    the result are always of these. If the region names others, its GPUs count by position.
    """
    region = sums.region
    if region is None:
        return ContainerUse(at, sums.state, reason=sums.reason)
    uuids = _uuids(region.gpus, tuple(dict.fromkeys(given)))
    return ContainerUse(
        at=at,
        state=sums.state,
        gpus=tuple(
            ContainerGpuUse(gpu.index, uuid, gpu.memory_limit, gpu.core_limit, memory, percent)
            for gpu, uuid, memory, percent in zip(
                region.gpus, uuids, sums.memory, sums.sm_percent, strict=False
            )
        ),
        last_kernel=region.last_kernel,
        processes=sums.processes,
    )


def believed(use: ContainerUse, row: Row, registered: Mapping[GpuUuid, int]) -> ContainerUse:
    """The use; or, if a GPU cannot be used that much, an unreadable one with that reason.

    `registered`: the MiB of each GPU, as far as they are known.
    """
    for gpu in use.gpus:
        # Memory that was promised before the settings made the GPU smaller counts as well.
        promised = [share.memory_mib for share in row.limits if share.uuid == gpu.uuid]
        mib = max((registered.get(GpuUuid(gpu.uuid)) or MOST_MIB, *promised))
        said_mib = max(*gpu.memory, gpu.memory_limit) // MIB
        percent = 100 * min(use.processes, MOST_AT_ONCE)
        if said_mib > mib:
            said, has = f"{said_mib:,} MiB", f"{mib:,} MiB"
        elif gpu.sm_percent > percent:
            said, has = f"{gpu.sm_percent:,} % of compute", f"{percent:,} % for its processes"
        else:
            continue
        reason = f"not believable: it says {said} of a GPU with at most {has}"
        return ContainerUse(use.at, RegionState.UNREADABLE, reason=reason)
    return use


def _uuids(gpus: Sequence[RegionGpu], given: Sequence[GpuUuid]) -> Sequence[str]:
    """The uuids of the region's first GPUs. GPUs beyond those that were given have none."""
    named = [gpu.uuid for gpu in gpus]
    distinct = frozenset(named)
    if not given or (len(distinct) == len(named) and distinct <= frozenset(given)):
        return named
    return given
