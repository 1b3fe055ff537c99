"""A node where nothing happens: the agent asks the API server for nothing."""

import asyncio
from collections import Counter

import pytest

from tests.peers.lab.identities import NODE_USER
from tests.peers.lab.pods import a_container, a_pod, run, until_settled
from tests.peers.lab.requests import asked_since, mark_of_rest, of_pods, reads, writes


@pytest.mark.timeout(420)
@pytest.mark.parametrize("seconds", [60, pytest.param(300, marks=pytest.mark.long)])
async def test_nothing_to_do_is_no_write_and_no_read_beyond_two_watches(cluster, agent, seconds):
    mark = await mark_of_rest(cluster)
    pods = [a_pod("one"), a_pod("two", a_container("left"), a_container("right"))]
    await until_settled(cluster, *await run(cluster, *pods, within=60.0))
    await asked_since(cluster, mark, NODE_USER, of_pods(len(pods)))

    mark = cluster.plane.audit.mark()
    await asyncio.sleep(seconds)  # what is claimed is about this time

    requests = cluster.plane.audit.since(mark, NODE_USER)
    assert agent.part.is_alive
    assert Counter() == writes(requests)
    assert Counter() == reads(requests)
