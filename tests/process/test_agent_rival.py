"""Another device plugin of the node serves the same resource."""

import asyncio
import contextlib
import socket

import pytest

from agent.kubelet.register import SETTLE
from agent.sandbox.lab.cluster import open_cluster
from tests.process.agent_process import PATIENCE, comes, offers, options, started

pytestmark = pytest.mark.looptime(False)


@contextlib.contextmanager
def a_socket(path, *, listens):
    """HAMi's plugin there, or what a killed one leaves behind."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        if listens:
            server.listen()
        yield


async def test_beside_hamis_plugin_it_says_so_and_serves_nothing():
    async with open_cluster(options()) as cluster:
        with a_socket(cluster.places.plugins / "nvidia-gpu.sock", listens=True):
            await cluster.start_agent()
            async with asyncio.timeout(PATIENCE):
                assert 78 == await cluster.agent.wait()

        (line,) = cluster.log.of("agent.failed")
        assert "nvidia.com/gpu at " in str(line.fields["err"])
        assert "takeover: true" in str(line.fields["err"])
        assert [] == cluster.kubelet.history.of("registered")
        assert ["PluginConflict"] == [event["reason"] for event in cluster.store.select("events")]


@pytest.mark.parametrize(
    ("listens", "flags"), [(False, ()), (True, ("--takeover",))], ids=["dead", "told to"]
)
async def test_it_serves_over_a_dead_socket_and_when_it_is_told_to(listens, flags):
    async with open_cluster(options(*flags)) as cluster:
        with a_socket(cluster.places.plugins / "nvidia-gpu.sock", listens=listens):
            await started(cluster)
            assert await offers(cluster, 80)


async def test_the_gpu_operators_plugin_is_no_rival_for_a_resource_of_another_domain():
    async with open_cluster(options("--resource-name=hami.io/gpu")) as cluster:
        theirs = cluster.places.plugins / "nvidia-gpu.sock"
        with a_socket(theirs, listens=True):
            await cluster.start_agent()
            assert await comes(lambda: bool(cluster.kubelet.history.of("registered")))
            assert await comes(lambda: bool(cluster.log.of("registration.serving")))
        theirs.unlink()
        renewed = await comes(lambda: bool(cluster.log.of("registration.rival_gone")), 3 * SETTLE)

        assert not renewed
        assert 1 == len(cluster.kubelet.history.of("registered"))
        assert [] == cluster.store.select("events")
