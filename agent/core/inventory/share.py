"""A share: the part of one GPU that the scheduler gave one container."""

import msgspec

from agent.core.inventory.gpu import GpuUuid


class Share(msgspec.Struct, frozen=True):
    """`memory_mib` MiB and `core_percent` percent of the GPU `uuid`. 0 MiB means all memory."""

    uuid: GpuUuid
    memory_mib: int
    core_percent: int
