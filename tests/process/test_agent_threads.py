"""`top -H` tells the agent's threads apart: each but the first shows in /proc what it does."""

from pathlib import Path

import pytest

from agent.sandbox.lab.cluster import SandboxCluster, open_cluster
from tests.process.agent_process import comes, options, started
from tests.process.driver_node import a_node

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(60)]

DISKS = {"state", "disk", "settings", "regions", "clearing"}


def shown(cluster: SandboxCluster) -> set[str]:
    """The names that the kernel has of the agent's threads, without the first one's."""
    pid = cluster.agent.pid
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {(one / "comm").read_text().strip() for one in tasks if one.name != str(pid)}


async def test_the_threads_beside_a_scheduler_have_their_names():
    async with open_cluster(options(gpus=1)) as cluster:
        await started(cluster, slices=10)

        assert await comes(lambda: shown(cluster) == {*DISKS, "asyncio"}), shown(cluster)


async def test_the_threads_of_the_driver_have_their_names(library: Path):
    async with a_node(library) as node:
        wanted = {*DISKS, "nvml calls", "nvml-events"}

        assert await comes(lambda: shown(node.cluster) == wanted), shown(node.cluster)
