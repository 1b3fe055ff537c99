"""Without an API server both ports are there, and empty."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from agent.core.changes import NodeChange, NodeEvent, PodChange, PodList
from agent.core.pods import NodeView, PodTable, PodUid
from agent.core.ports import NodeApi, PodApi
from agent.host.nokube import NoKube
from agent.kit.cell import Cell
from agent.services.pods import Pods
from tests.fakes.chance import NoChance
from tests.fakes.clock import LoopClock


async def within_a_day(watch: AsyncIterator[NodeChange] | AsyncIterator[PodChange]) -> None:
    async with asyncio.timeout(86_400):
        await anext(watch)


async def test_writes_go_nowhere_and_lists_are_empty():
    kube = NoKube("node-1")
    await kube.release_lock("key", "value")
    await kube.annotate_pod("ns", "pod", PodUid("u"), {"a": "b"})
    await kube.post_event(NodeEvent("Reason", "text", warning=False))

    assert PodList((), "0") == await kube.list_pods()
    assert NodeView("node-1", "", "") == await kube.annotate_node({"a": "b"})


async def test_watches_wait_for_ever():
    node: NodeApi = NoKube("node-1")
    pods: PodApi = NoKube("node-1")
    for watch in (node.watch_node(), pods.watch_pods("0")):
        with pytest.raises(TimeoutError):
            await within_a_day(watch)


async def test_the_pod_table_is_empty_and_synced():
    table = Cell(PodTable())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3600):
            await Pods(NoKube("node-1"), table, LoopClock(), NoChance()).run()

    assert PodTable(synced=True) == table.value
