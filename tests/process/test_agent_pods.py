"""Pods of a megabyte, which any tenant can create, keep no real agent from serving others."""

import pytest

from agent.cluster import BIND_PHASE, PHASE_SUCCESS, REGISTER
from agent.sandbox.lab.cluster import NAMESPACE, NODE, RESOURCE, SandboxCluster, open_cluster
from tests.process.agent_process import PATIENCE, offers, options, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(90)]


def add_big_pods(cluster: SandboxCluster) -> None:
    """More bytes than one answer may have, in variables and in annotations."""
    for number in range(8):
        long = [{"name": "LONG", "value": "x" * 1_100_000}]
        notes = {"hami.io/bind-phase": "x" * 255_000}
        cluster.store.create(
            "pods",
            {
                "metadata": {"name": f"big-{number}", "namespace": NAMESPACE, "annotations": notes},
                "spec": {"nodeName": NODE, "containers": [{"name": "main", "env": long}]},
            },
        )


async def is_served(cluster: SandboxCluster, name: str) -> bool:
    limits = {RESOURCE: "1", "nvidia.com/gpumem": "1000"}
    cluster.submit(
        {
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
        }
    )

    def served() -> bool:
        notes = cluster.pod(name)["metadata"].get("annotations") or {}
        return notes.get(BIND_PHASE) == PHASE_SUCCESS

    return await cluster.until(served, PATIENCE)


async def test_beside_big_pods_the_next_agent_serves_too():
    async with open_cluster(options(gpus=2)) as opened:
        cluster = await started(opened, slices=20)
        assert await cluster.until(lambda: REGISTER in cluster.node_annotations(), PATIENCE)
        add_big_pods(cluster)
        assert await is_served(cluster, "first"), cluster.log.last(20)

        await cluster.kill_agent()
        assert await offers(cluster, 0)
        await started(cluster, slices=20)
        agent = cluster.agent.pid
        listed = await cluster.until(lambda: bool(cluster.log.of("pods.listed", agent)), PATIENCE)
        assert listed, cluster.log.last(20)

        assert await is_served(cluster, "second"), cluster.log.last(20)
        assert not cluster.log.of("pods.lost")
