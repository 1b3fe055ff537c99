"""`run --observe`: beside the node's agent, without a trace at the kubelet or the API server."""

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

from agent.cluster import REGISTER
from agent.sandbox.lab.child import AgentChild, start_child
from agent.sandbox.lab.cluster import SandboxCluster, fetch, open_cluster
from tests.process.agent_process import PATIENCE, comes, copied_settings, offers, options, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(60)]


async def observer(cluster: SandboxCluster, *arguments: str) -> AgentChild:
    """One more agent of the same settings that observes, once it has said so on its pages."""
    command = (*cluster.command(), "--observe", *arguments)
    child = await start_child(command, cluster.environment(), cluster.log)
    cluster.children.append(child)
    cluster.tasks.create_task(child.read())
    assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE), cluster.log.last(
        20
    )
    return child


def writes(cluster: SandboxCluster) -> int:
    return cluster.api.journal.writes(cluster.user)


def would_write(cluster: SandboxCluster, child: AgentChild) -> list[Any]:
    return [line.fields["annotations"] for line in cluster.log.of("observe.would_write", child.pid)]


def files(root: Path) -> dict[str, bytes]:
    """Every regular file below, by its path."""
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def is_copied(cluster: SandboxCluster) -> bool:
    """The copy of the settings has the Node's labels, which are its last change at a start."""
    copy = copied_settings(cluster)
    return copy is not None and bool(copy.labels)


async def test_alone_on_a_node_it_registers_nothing_and_writes_nothing():
    async with open_cluster(options()) as cluster:
        library = files(cluster.places.hook)
        child = await observer(cluster)

        assert await cluster.until(lambda: bool(would_write(cluster, child)), PATIENCE)
        (change,) = would_write(cluster, child)
        assert [REGISTER] == list(change)
        assert 8 == change[REGISTER].count('"id"')
        page = await fetch(cluster.web_address or "", "/readyz")
        assert 200 == page.status
        assert f"[!]observed degraded: would write {REGISTER}" in page.text
        metrics = (await fetch(cluster.web_address or "", "/metrics")).text
        assert "hami_agent_build_info{" in metrics
        assert "hami_build_info" not in metrics, "the series of HAMi's monitor are its own"
        assert 0 == await child.stop()

        assert 0 == writes(cluster)
        assert {"watch"} == {verb for _, verb, _ in cluster.api.journal.counts}
        assert REGISTER not in cluster.node_annotations()
        assert [] == cluster.kubelet.history.of("registered")
        assert ["kubelet.sock"] == [path.name for path in cluster.places.plugins.glob("*.sock")]
        assert {} == files(cluster.places.state)
        assert library == files(cluster.places.hook)


async def test_beside_the_nodes_agent_it_changes_nothing_and_finds_nothing_to_write():
    async with open_cluster(options()) as opened:
        cluster = await started(opened)
        first = cluster.agent
        assert await cluster.until(lambda: writes(cluster) == 1, PATIENCE)
        assert await comes(lambda: is_copied(cluster))
        state = files(cluster.places.state)

        child = await observer(cluster)
        page = ""
        async with asyncio.timeout(PATIENCE):
            while "[+]report ok" not in page:
                page = (await fetch(cluster.web_address or "", "/readyz?verbose")).text

        assert "[+]observed ok" in page
        assert [] == would_write(cluster, child)
        assert 0 == await child.stop()
        assert 1 == writes(cluster)
        assert state == files(cluster.places.state)
        assert 1 == len(cluster.kubelet.history.of("registered"))
        assert first.code is None
        assert await offers(cluster, 80)


# Another device plugin of the node serves the same resource.


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
        assert "[PluginConflict]" in str(line.fields["err"])


@pytest.mark.parametrize(
    ("listens", "flags"), [(False, ()), (True, ("--takeover",))], ids=["dead", "told to"]
)
async def test_it_serves_over_a_dead_socket_and_when_it_is_told_to(listens, flags):
    async with open_cluster(options(*flags)) as cluster:
        with a_socket(cluster.places.plugins / "nvidia-gpu.sock", listens=listens):
            await started(cluster)
            assert await offers(cluster, 80)
