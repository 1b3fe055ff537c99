"""A share: the part of one GPU that the scheduler gave one container."""

import dataclasses

from agent.core.inventory.gpu import GpuUuid


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """`memory_mib` MiB and `core_percent` percent of the GPU `uuid`. 0 MiB means all memory."""

    uuid: GpuUuid
    memory_mib: int
    core_percent: int
