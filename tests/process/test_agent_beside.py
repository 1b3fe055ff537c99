"""`run --observe`: beside the node's agent, without a trace at the kubelet or the API server."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from agent.cluster import REGISTER
from agent.sandbox.lab.child import AgentChild, start_child
from agent.sandbox.lab.cluster import SandboxCluster, fetch, open_cluster
from tests.process.agent_process import PATIENCE, comes, copied_settings, offers, options, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(60)]


async def observer(cluster: SandboxCluster) -> AgentChild:
    """One more agent of the same settings that observes, once it has said so on its pages."""
    command = (*cluster.command(), "--observe")
    child = await start_child(command, cluster.environment(), cluster.log)
    cluster.children.append(child)
    cluster.tasks.create_task(child.read())
    assert await cluster.until(lambda: bool(cluster.web_address), PATIENCE), cluster.log.last(20)
    return child


def would_write(cluster: SandboxCluster, child: AgentChild) -> list[Any]:
    return [line.fields["annotations"] for line in cluster.log.of("observe.would_write", child.pid)]


def files(root: Path) -> dict[str, bytes]:
    """Every regular file below, by its path."""
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


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

        assert {"watch"} == {verb for _, verb, _ in cluster.api.asked}
        assert REGISTER not in cluster.node_annotations()
        assert [] == cluster.kubelet.history.of("registered")
        assert ["kubelet.sock"] == [path.name for path in cluster.places.plugins.glob("*.sock")]
        assert {} == files(cluster.places.state)
        assert library == files(cluster.places.hook)


async def test_beside_the_nodes_agent_it_changes_nothing_and_finds_nothing_to_write():
    async with open_cluster(options()) as opened:
        cluster = await started(opened)
        first = cluster.agent
        asked = cluster.api.asked

        def is_settled() -> bool:
            """Its last change at a start is the copy of the settings with the Node's labels."""
            copy = copied_settings(cluster)
            is_seen = asked[cluster.user, "patch", "nodes"] == 1 and cluster.api.open_watches == 2
            return is_seen and copy is not None and bool(copy.labels)

        assert await comes(is_settled)
        # It reads nothing of other pods, and writes nothing but the annotation.
        kinds = {"watch nodes", "list pods", "watch pods", "patch nodes"}
        assert kinds == {f"{verb} {resource}" for _, verb, resource in asked}
        assert {1} == {*asked.values()}
        state = files(cluster.places.state)

        child = await observer(cluster)
        page = ""
        async with asyncio.timeout(PATIENCE):
            while "[+]report ok" not in page:
                page = (await fetch(cluster.web_address or "", "/readyz?verbose")).text

        assert "[+]observed ok" in page
        assert [] == would_write(cluster, child)
        assert 0 == await child.stop()
        assert kinds == {f"{verb} {resource}" for _, verb, resource in asked}
        assert 1 == asked[cluster.user, "patch", "nodes"]
        assert state == files(cluster.places.state)
        assert 1 == len(cluster.kubelet.history.of("registered"))
        assert first.code is None
        assert await offers(cluster, 80)


# Another device plugin of the node serves the same resource.


@pytest.mark.parametrize(
    ("listens", "flags", "serves"),
    [(True, (), False), (False, (), True), (True, ("--takeover",), True)],
    ids=["serving", "dead", "told to"],
)
async def test_beside_hamis_plugin_it_says_so_and_serves_nothing(listens, flags, serves):
    """Over a dead socket, as a killed plugin leaves it, and when it is told to, it serves."""
    async with open_cluster(options(*flags)) as cluster:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(cluster.places.plugins / "nvidia-gpu.sock"))
            if listens:
                server.listen()
            if serves:
                await started(cluster)
                return
            await cluster.start_agent()
            async with asyncio.timeout(PATIENCE):
                assert 78 == await cluster.agent.wait()

        (line,) = cluster.log.of("agent.failed")
        for said in ("nvidia.com/gpu at ", "takeover: true", "[PluginConflict]"):
            assert said in str(line.fields["err"])
        assert [] == cluster.kubelet.history.of("registered")
