"""A real agent that would refuse every new pod: no pod is sent there, and what runs goes on."""

import pytest

from agent.cluster import REGISTER
from agent.hami.register import decode_register
from agent.sandbox.lab.cluster import SandboxCluster, open_cluster
from agent.sandbox.lab.web import fetch
from agent.sandbox.scenario.facts import is_running, pod_facts
from agent.sandbox.scenario.workloads import Wish, Workload
from tests.process.agent_process import PATIENCE, offers, options, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(90)]


def well(cluster: SandboxCluster) -> list[bool]:
    """The health of each GPU in the annotation."""
    text = cluster.node_annotations().get(REGISTER, "[]")
    return [gpu.healthy for gpu in decode_register(text)]


def told(cluster: SandboxCluster) -> list[str]:
    """What the Events say that nothing is offered."""
    events = cluster.store.select("events")
    return [one["message"] for one in events if one["reason"] == "NothingOffered"]


async def test_without_the_library_no_pod_is_sent_here_and_the_one_that_runs_goes_on():
    async with open_cluster(options(gpus=2)) as cluster:
        await started(cluster, slices=20)
        cluster.submit(Workload("first", "", (Wish("main", 1, 1024),)).pod())
        assert await cluster.until(lambda: is_running(cluster, "first"), PATIENCE)

        (cluster.places.hook / "vgpu" / "libvgpu.so").unlink()
        assert await offers(cluster, 0)
        assert await cluster.until(lambda: [False, False] == well(cluster), PATIENCE)
        assert await cluster.until(lambda: told(cluster) != [], PATIENCE)
        cluster.submit(Workload("second", "", (Wish("main", 1, 1024),)).pod())
        page = await fetch(cluster.web_address or "", "/readyz?verbose")

        assert "[!]offer degraded: no slice is on offer: HAMi-core is not installed" in page.text
        assert 200 == page.status
        assert 1 == len(told(cluster))
        assert is_running(cluster, "first")
        assert "Pending" == pod_facts(cluster, "second").phase
