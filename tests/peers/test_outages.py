"""While the API server is away the node goes on with what it knows; afterwards nothing is owed."""

import asyncio
from collections import Counter

import pytest

from agent import cluster as annotations
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.faces import answers
from tests.peers.lab.grants import expected_inside, lost, rows, seen_inside
from tests.peers.lab.node_state import node_of, notes_of, until_unlocked
from tests.peers.lab.nodes import frozen
from tests.peers.lab.placement import agent_said, place, share, wall
from tests.peers.lab.pods import (
    a_telling_pod,
    as_seen,
    create,
    lives_of,
    run,
    until_bind_phase,
    until_running,
    until_settled,
    until_told,
)

AWAY = 30.0
"""Seconds for which the API server is away."""

PATIENCE = 150.0
"""Seconds until everybody is back: kubelet and kube-scheduler look again after up to a minute."""


@pytest.mark.timeout(300)
async def test_what_the_agent_knew_is_served_without_the_api_server_and_settled_after_it(
    cluster, agent, table
):
    residents = await run(
        cluster, *(a_telling_pod(cluster, f"resident-{number}") for number in range(2))
    )
    await until_settled(cluster, *residents)
    before, asked, pid = lives_of(cluster, residents), answers(agent), agent.part.pid
    register = notes_of(node_of(cluster))[annotations.REGISTER]
    server, mine = cluster.plane.apiserver, share(cluster, 3, 2000, 5)
    late = a_telling_pod(cluster, "late")
    late["metadata"]["generateName"] = "late"  # as a controller's pod: its name does not return

    with frozen(cluster.kubelet.part):
        await place(cluster, late, [[mine]])
        await cluster.pods.until(
            lambda: "nodeName" in as_seen(cluster, "late")["spec"], 10.0, "late is not bound"
        )
        server.freeze()
        gone = wall()
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
