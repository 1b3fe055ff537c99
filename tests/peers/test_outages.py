"""While the API server is away the node goes on with what it knows; afterwards nothing is owed."""

import asyncio
from collections import Counter

import pytest

from agent import cluster as annotations
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.faces import answers, page
from tests.peers.lab.grants import expected_inside, lost, rows, seen_inside
from tests.peers.lab.node_state import node_of, notes_of, until_unlocked
from tests.peers.lab.nodes import RealNode
from tests.peers.lab.placement import agent_said, place, share, wall
from tests.peers.lab.pods import (
    a_container,
    a_pod,
    a_telling_pod,
    create,
    delete,
    key,
    lives_of,
    run,
    telling,
    until_bind_phase,
    until_running,
    until_settled,
    until_told,
)
from tests.peers.lab.space import until, until_answer

AWAY = 5.0
"""Seconds for which the API server is away."""

PATIENCE = 150.0
"""Seconds until everybody is back: kubelet and kube-scheduler look again after up to a minute."""


@pytest.mark.timeout(300)
async def test_what_the_agent_knew_is_served_without_the_api_server_and_settled_after_it(
    cluster, agent, table
):
    residents = "resident-0", "resident-1"
    await run(cluster, *(a_telling_pod(cluster, name) for name in (*residents, "marker")))
    await until_settled(cluster, *residents, "marker")
    before, asked, pid = lives_of(cluster, residents), answers(agent), agent.part.pid
    register = notes_of(node_of(cluster))[annotations.REGISTER]
    server, mine = cluster.plane.apiserver, share(cluster, 3, 2000, 5)
    node = RealNode(cluster)
    late = telling(cluster, a_pod("late", node.container("first"), a_container()))
    late["metadata"]["generateName"] = "late"  # as a controller's pod: its name does not return

    async with node.plugin() as other:
        # Another plugin keeps the kubelet waiting with the pod in hand: it has asked for its first
        # container, and asks the agent for the next only once the API server is away.
        other.hold()
        await place(cluster, late, [[], [mine]])
        await until(lambda: bool(other.asked), 20.0, cluster.kubelet.part.tail)
        await until_agent_knows(cluster, agent, "late")
        server.freeze()
        gone = wall()
        other.let_go()
        await until_told(cluster, "late")
    table.add("API server away, the kubelet asks → the container runs", wall() - gone)
    await server.kill()
    assert (mine,) == rows(cluster)["default/late", "main"].shares
    await asyncio.sleep(gone + AWAY - wall())
    assert 80 == len(await cluster.kubelet.allocatable(RESOURCE))
    back = wall()
    await server.start()

    await until_unlocked(cluster, 60.0)
    table.add("API server comes back → lock free", wall() - back)
    await create(cluster, a_telling_pod(cluster, "new"))
    await until_bind_phase(cluster, "late", annotations.PHASE_SUCCESS, within=90.0)
    table.add("API server comes back → pod settled", wall() - back)
    await until_running(cluster, "late", "new", within=PATIENCE)
    table.add("API server comes back → new pod runs, all peers included", wall() - back)

    for name in ("late", "new"):
        assert expected_inside(cluster, name) == await seen_inside(cluster, name)
    assert back <= min(agent_said(agent, "lock.released", back - AWAY))
    assert before == lives_of(cluster, residents)
    assert asked + Counter((name, "main") for name in ("late", "new")) == answers(agent)
    assert (pid, register) == (agent.part.pid, notes_of(node_of(cluster))[annotations.REGISTER])
    assert [] == lost(cluster)


async def until_agent_knows(cluster, agent, name):
    """Return once the agent itself has seen the lock of a bound pod, and the pod.

    Its watch of the pods tells what happens in order: when it shows that the pod "marker", deleted
    now, is gone, it has shown this pod before.
    """

    async def has_lock():
        _, text = await page(agent, "/api/v1/status")
        return f'"{key(name)}"' in text

    async def has_no_marker():
        _, text = await page(agent, "/metrics")
        return 'pod="marker"' not in text

    assert not await has_no_marker()
    await delete(cluster, "marker", grace=0)
    await until_answer(has_lock, 20.0, agent.part.tail)
    await until_answer(has_no_marker, 20.0, agent.part.tail)
