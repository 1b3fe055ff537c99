"""A real agent holds a container back by its region file, and releases it however it ends."""

import struct
from pathlib import Path

import pytest

from agent.hami.region import V1_2
from agent.sandbox.lab.cluster import SandboxCluster, open_cluster
from agent.sandbox.scenario.facts import is_running, pod_facts
from agent.sandbox.scenario.workloads import Wish, Workload
from tests.hami_regions import region_file
from tests.host.region_dirs import FILE, poke
from tests.process.agent_process import PATIENCE, comes, options, started

pytestmark = [
    pytest.mark.process,
    pytest.mark.looptime(False),
    pytest.mark.timeout(90),
]
SWITCH, RECENT_KERNEL, PRIORITY = (V1_2.tail + 4 * word for word in (1, 2, 3))


async def run_one(cluster: SandboxCluster, name: str, priority: int) -> Path:
    """The region of a new pod of that priority."""
    pod = Workload(name, "", (Wish("main", 1, 1024),)).pod()
    pod["spec"]["containers"][0]["env"] = [{"name": "CUDA_TASK_PRIORITY", "value": str(priority)}]
    cluster.submit(pod)
    assert await cluster.until(lambda: is_running(cluster, name), PATIENCE), cluster.log.last(20)
    own = cluster.places.hook / f"vgpu/containers/{pod_facts(cluster, name).uid}_main"
    region = own / FILE
    region.write_bytes(region_file("v12-two").content)
    write(region, 0, switch=0, priority=priority)
    return region


def write(region: Path, recent: int, *, switch: int, priority: int) -> None:
    poke(region, SWITCH, "<iii", switch, recent, priority)


def state(region: Path) -> tuple[int, int]:
    """The utilisation switch and recent_kernel."""
    switch, recent = struct.unpack_from("<ii", region.read_bytes(), SWITCH)
    return switch, recent


async def test_a_container_is_held_back_and_released_at_the_end_and_after_a_kill():
    async with open_cluster(options(gpus=1)) as cluster:
        await started(cluster, slices=10)
        high, low = await run_one(cluster, "high", 0), await run_one(cluster, "low", 1)
        assert 0 == await cluster.stop_agent()
        write(high, 5, switch=0, priority=0)
        await started(cluster, slices=10)
        assert await comes(lambda: (1, -1) == state(low)), cluster.log.last(20)

        assert 0 == await cluster.stop_agent()
        assert (0, 0) == state(low)

        write(low, 0, switch=0, priority=1)
        write(high, 5, switch=0, priority=0)
        await started(cluster, slices=10)
        assert await comes(lambda: (1, -1) == state(low)), cluster.log.last(20)
        await cluster.kill_agent()
        assert (1, -1) == state(low)
        write(high, 0, switch=0, priority=0)
        await started(cluster, slices=10)
        assert await comes(lambda: (0, 0) == state(low)), cluster.log.last(20)
        assert [] == cluster.log.of("usage.unread") + cluster.log.of("usage.unwritten")
