"""What a process of a sandbox's container leaves in its directory while it uses its GPU."""

import re
from typing import Final

from agent.kit.timing import SystemClock
from agent.sandbox.hami_core import HamiCoreRegion
from agent.sandbox.lab.cluster import SandboxCluster

ALLOCATED: Final = "hami.io/vgpu-devices-allocated"
ENVIRONMENT: Final = {"CUDA_DEVICE_MEMORY_LIMIT_0": "1024m", "CUDA_DEVICE_SM_LIMIT": "60"}
MIB: Final = 2**20


def use_gpu(cluster: SandboxCluster, pod: str, *, used: int, percent: int) -> None:
    """Let the container `main` of a running pod use its GPU, in MiB and percent of the SMs.

    Its last kernel starts now.
    """
    found, now = cluster.pod(pod), SystemClock().now()
    directory = cluster.places.hook / "vgpu" / "containers" / f"{found['metadata']['uid']}_main"
    region = HamiCoreRegion(directory / "region.cache")
    process = region.start(1, ENVIRONMENT, now)
    region.name_gpus(
        re.findall(r"GPU-[0-9a-f-]{36}", found["metadata"]["annotations"][ALLOCATED])[:1]
    )
    for purpose, size in (("context", 300), ("module", 12), ("data", used)):
        process.allocate(0, size * MIB, purpose)
    process.watch(0, percent)
    process.launch(now)
