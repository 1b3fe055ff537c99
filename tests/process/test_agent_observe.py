"""`run --observe`: beside the node's agent, without a trace at the kubelet or the API server."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent.cluster import REGISTER
from agent.sandbox.lab.child import AgentChild, start_child
from agent.sandbox.lab.cluster import SandboxCluster, open_cluster
from agent.sandbox.lab.web import fetch
from tests.process.agent_process import (
    PATIENCE,
    comes,
    copied_settings,
    offers,
    options,
    started,
)

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


async def test_beside_an_agent_with_other_settings_it_shows_what_would_differ():
    async with open_cluster(options()) as opened:
        cluster = await started(opened)
        assert await cluster.until(lambda: writes(cluster) == 1, PATIENCE)

        child = await observer(cluster, "--split-count", "4")

        assert await cluster.until(lambda: bool(would_write(cluster, child)), PATIENCE)
        assert '"count":4' in would_write(cluster, child)[0][REGISTER]
        assert '"count":10' in cluster.node_annotations()[REGISTER]
        assert 1 == writes(cluster)
        assert 80 == cluster.allocatable()


async def test_a_failing_gpu_is_shown_and_no_event_posted():
    async with open_cluster(options()) as opened:
        cluster = opened
        child = await observer(cluster)
        assert await cluster.until(lambda: bool(would_write(cluster, child)), PATIENCE)

        cluster.hardware.xid("0", 79)

        assert await cluster.until(lambda: len(would_write(cluster, child)) == 2, PATIENCE)
        assert 7 == would_write(cluster, child)[1][REGISTER].count('"health":true')
        assert 0 == writes(cluster)


async def test_it_leaves_the_series_of_hamis_monitor_to_that():
    async with open_cluster(options()) as cluster:
        await observer(cluster)
        page = (await fetch(cluster.web_address or "", "/metrics")).text

        assert "hami_agent_build_info{" in page
        assert "hami_build_info" not in page


async def test_in_plain_mode_it_serves_no_socket_and_needs_no_api_server():
    async with open_cluster(options("--scheduler", "none")) as cluster:
        child = await observer(cluster)

        assert await cluster.until(
            lambda: bool(cluster.log.of("list.changed", child.pid)), PATIENCE
        )
        assert 200 == (await fetch(cluster.web_address or "", "/readyz")).status
        assert {} == dict(cluster.api.journal.counts)
        assert [] == cluster.kubelet.history.of("registered")
        assert ["kubelet.sock"] == [path.name for path in cluster.places.plugins.glob("*.sock")]
