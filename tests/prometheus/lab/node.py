"""A node whose containers use their GPUs, and which a Prometheus can scrape."""

import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Final

from agent.kit.timing import SystemClock
from agent.sandbox.hami_core import HamiCoreRegion
from agent.sandbox.lab.cluster import SandboxCluster, open_cluster
from agent.sandbox.scenario.facts import is_running
from agent.sandbox.scenario.stage import Wish, Workload
from tests.process.agent_process import PATIENCE, options, started

ALLOCATED: Final = "hami.io/vgpu-devices-allocated"
ENVIRONMENT: Final = {"CUDA_DEVICE_MEMORY_LIMIT_0": "1024m", "CUDA_DEVICE_SM_LIMIT": "60"}
MIB: Final = 2**20


@contextlib.asynccontextmanager
async def open_node(
    pods: Mapping[str, tuple[int, int]], config: str = "", *flags: str, gpus: int = 2
) -> AsyncIterator[tuple[SandboxCluster, str]]:
    """A running agent and its host:port. Each pod uses so many MiB and percent of its GPU."""
    async with open_cluster(options(*flags, gpus=gpus)) as cluster:
        cluster.places.config.write_text(config)
        await started(cluster, slices=10 * gpus)
        for name, (used, percent) in pods.items():
            cluster.submit(Workload(name, "", (Wish("main", 1, 1024, 20),)).pod())
            assert await cluster.until(partial(is_running, cluster, name), PATIENCE)
            use_gpu(cluster, name, used, percent)
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        yield cluster, (cluster.web_address or "").removeprefix("http://")


def use_gpu(cluster: SandboxCluster, pod: str, used: int, percent: int) -> None:
    """Let the container of a running pod use its GPU; its last kernel starts now."""
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
