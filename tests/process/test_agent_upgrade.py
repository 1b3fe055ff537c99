"""SIGTERM in the middle of an admission: the kubelet is answered, and the share is durable.

Of one container: the next one of a pod is given a tenth of a second, which no busy machine promises
between two processes. tests/doors/test_plugin_server.py has the row of them.
"""

import asyncio
import signal

import pytest

from agent.cluster import BIND_PHASE, PHASE_SUCCESS, REGISTER
from agent.sandbox.kubelet.services import PodResourcesLister
from agent.sandbox.lab.cluster import NAMESPACE, RESOURCE, SandboxCluster, open_cluster
from agent.state import CURRENT, decode_state
from agent.wire.v1 import GetPodResourcesRequest, GetPodResourcesResponse
from tests.process.agent_process import PATIENCE, options, started

ATTEMPTS = 5
"""One of them has to be quick enough: the agent gives a preference a fifth of a second."""

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(90)]


class HeldSlices:
    """The kubelet's answers to the agent's questions wait until `open` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = asyncio.Event()
        self.open = asyncio.Event()
        answer = PodResourcesLister.get

        async def get(
            lister: PodResourcesLister, message: GetPodResourcesRequest
        ) -> GetPodResourcesResponse:
            self.asked.set()
            await self.open.wait()
            return await answer(lister, message)

        monkeypatch.setattr(PodResourcesLister, "get", get)


def submit(cluster: SandboxCluster, name: str) -> None:
    limits = {RESOURCE: "1", "nvidia.com/gpumem": "1000"}
    containers = [{"name": "one", "resources": {"limits": limits}}]
    metadata = {"name": name, "namespace": NAMESPACE}
    cluster.submit({"metadata": metadata, "spec": {"containers": containers}})


async def is_stopping_in_flight(cluster: SandboxCluster, patch: pytest.MonkeyPatch) -> bool:
    """Whether the agent was told to stop, and said so, before it gave up the preference."""
    assert await cluster.until(lambda: REGISTER in cluster.node_annotations(), PATIENCE)
    held = HeldSlices(patch)
    submit(cluster, "train")
    async with asyncio.timeout(PATIENCE):
        await held.asked.wait()
    cluster.agent.signal(signal.SIGTERM)
    assert await cluster.until(
        lambda: bool(cluster.log.of("agent.stopping", cluster.agent.pid)), PATIENCE
    )
    held.open.set()
    return not cluster.kubelet.history.of("preferred")


async def is_served(cluster: SandboxCluster) -> None:
    """The pod has its GPU of the agent that stops, and keeps it under the next."""
    agent = cluster.agent
    assert 0 == await agent.wait()
    told = cluster.pod("train")["status"]
    answers = [line.fields["ctr"] for line in cluster.log.of("alloc.answered", agent.pid)]
    rows = decode_state((cluster.places.state / CURRENT).read_bytes()).ledger.rows
    assert ["one"] == answers, (told, cluster.log.last(20))
    assert {"one"} == {row.key.container for row in rows}

    await started(cluster, slices=20)

    def served() -> bool:
        return cluster.pod("train")["metadata"]["annotations"][BIND_PHASE] == PHASE_SUCCESS

    assert await cluster.until(served, PATIENCE), cluster.log.last(20)
    assert "Failed" != cluster.pod("train")["status"].get("phase")


async def test_a_pod_whose_preference_is_in_flight_gets_its_gpus_and_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
):
    for _ in range(ATTEMPTS):
        async with open_cluster(options(gpus=2)) as opened:
            cluster = await started(opened, slices=20)
            with monkeypatch.context() as patch:
                if await is_stopping_in_flight(cluster, patch):
                    await is_served(cluster)
                    return
    pytest.fail("the agent never said in time that it stops")
