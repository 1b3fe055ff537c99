"""Containers that have filled their memory limit, and the Event about it.

HAMi-core kills no process at the limit: it refuses further allocations, which no region records.
"""

from collections.abc import Iterator
from typing import Final

from agent.core.cluster.changes import NodeEvent
from agent.core.inventory.slices import MIB
from agent.core.state.ledger import Row
from agent.core.usage.use import ContainerGpuUse, ContainerUse

LIMIT_EVENT: Final = "MemoryLimitReached"
FULL: Final = 0.98
"""The share of the limit from which on hardly any allocation can succeed."""


def full_gpus(use: ContainerUse) -> Iterator[ContainerGpuUse]:
    """The GPUs whose memory limit the container has filled."""
    for gpu in use.gpus:
        if gpu.memory_limit and gpu.memory.total >= FULL * gpu.memory_limit:
            yield gpu


def limit_event(row: Row, full: ContainerGpuUse, label: str) -> NodeEvent:
    """The Event on the pod. `label`: of the GPU."""
    text = (
        f"Container {row.key.container} uses {full.memory.total // MIB:,} of its "
        f"{full.memory_limit // MIB:,} MiB of GPU {label}. HAMi-core "
        "refuses what it allocates beyond that (CUDA_ERROR_OUT_OF_MEMORY) and kills no process. If "
        "the application fails for want of memory, ask for more nvidia.com/gpumem."
    )
    return NodeEvent(
        LIMIT_EVENT,
        text,
        warning=False,
        namespace=row.namespace,
        pod=row.pod,
        pod_uid=row.pod_uid,
    )
