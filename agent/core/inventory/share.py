"""A share: what the scheduler gave one container of one GPU."""

import dataclasses

from agent.core.inventory.gpu import GpuUuid


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """`memory_mib` MiB and `core_percent` percent of the GPU `uuid`. 0 MiB: all of its memory."""

    uuid: GpuUuid
    memory_mib: int
    core_percent: int
