"""While the API server is away the node goes on with what it knows; afterwards nothing is owed."""

import asyncio
from collections import Counter

import pytest

from agent import cluster as annotations
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import notes_of
from tests.peers.lab.nodes import RealNode
from tests.peers.lab.part import until, until_answer
from tests.peers.lab.pods import a_container, a_pod, agent_said, key, wall

AWAY = 5.0
"""Seconds for which the API server is away."""

PATIENCE = 150.0
"""Seconds until everybody is back: kubelet and kube-scheduler look again after up to a minute."""


@pytest.mark.timeout(300)
async def test_what_the_agent_knew_is_served_without_the_api_server_and_settled_after_it(
    cluster, agent, table
):
    residents = "resident-0", "resident-1"
    await cluster.run(*(cluster.a_telling_pod(name) for name in (*residents, "marker")))
    await cluster.until_settled(*residents, "marker")
    before, asked, pid = cluster.lives_of(residents), agent.answers(), agent.part.pid
    register = notes_of(cluster.node_of())[annotations.REGISTER]
    server, mine = cluster.plane.apiserver, cluster.share(3, 2000, 5)
    node = RealNode(cluster)
    late = cluster.telling(a_pod("late", node.container("first"), a_container()))
    late["metadata"]["generateName"] = "late"  # as a controller's pod: its name does not return

    async with node.plugin() as other:
        # Another plugin keeps the kubelet waiting with the pod in hand: it has asked for its first
        # container, and asks the agent for the next only once the API server is away.
        other.hold()
        await cluster.place(late, [[], [mine]])
        await until(lambda: bool(other.asked), 20.0, cluster.kubelet.part.tail)
        await until_agent_knows(cluster, agent, "late")
        server.freeze()
        gone = wall()
        other.let_go()
        await cluster.until_told("late")
    table.add("API server away, the kubelet asks → the container runs", wall() - gone)
    await server.kill()
    assert (mine,) == cluster.rows()["default/late", "main"].shares
    await asyncio.sleep(gone + AWAY - wall())
    assert 80 == len(await cluster.kubelet.allocatable(RESOURCE))
    back = wall()
    await server.start()

    await cluster.until_unlocked(60.0)
    table.add("API server comes back → lock free", wall() - back)
    await cluster.create(cluster.a_telling_pod("new"))
    await cluster.until_settled("late", within=90.0)
    table.add("API server comes back → pod settled", wall() - back)
    await cluster.until_running("late", "new", within=PATIENCE)
    table.add("API server comes back → new pod runs, all peers included", wall() - back)

    for name in ("late", "new"):
        assert cluster.expected_inside(name) == await cluster.seen_inside(name)
    assert back <= min(agent_said(agent, "lock.released", back - AWAY))
    assert before == cluster.lives_of(residents)
    assert asked + Counter((name, "main") for name in ("late", "new")) == agent.answers()
    assert (pid, register) == (agent.part.pid, notes_of(cluster.node_of())[annotations.REGISTER])
    assert [] == cluster.lost()


async def until_agent_knows(cluster, agent, name):
    """Return once the agent itself has seen the lock of a bound pod, and the pod.

    Its watch of the pods tells what happens in order: when it shows that the pod "marker", deleted
    now, is gone, it has shown this pod before.
    """

    async def has_lock():
        _, text = await agent.page("/api/v1/status")
        return f'"{key(name)}"' in text

    async def has_no_marker():
        _, text = await agent.page("/metrics")
        return 'pod="marker"' not in text

    assert not await has_no_marker()
    await cluster.delete("marker", grace=0)
    await until_answer(has_lock, 20.0, agent.part.tail)
    await until_answer(has_no_marker, 20.0, agent.part.tail)
