"""Two agents on one node: one serves, the other waits and touches nothing until it is alone."""

import asyncio

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.cluster import ACCOUNT
from tests.peers.lab.faces import is_ready, page
from tests.peers.lab.node_state import gpu_uuids, until_unlocked
from tests.peers.lab.placement import place, share
from tests.peers.lab.pods import gpus_held, lives_of, until_running
from tests.peers.lab.waiting import until, until_answer
from tests.peers.lab.workloads import a_pod

BOUND = 1.0


async def standby_of(cluster):
    """Another agent, which waits; as another user, so that the audit log tells them apart."""
    second = await cluster.start_agent(user=ACCOUNT, name="standby")
    await until(lambda: bool(second.events("lock.standby")), 20.0, second.part.tail)
    return second


async def serves(cluster, agent):
    return await cluster.kubelet.offers(RESOURCE, 80) and await is_ready(agent)


async def test_a_standby_takes_over_and_pods_run_on(cluster, table):
    first = await cluster.start_registered_agent(name="first")
    await place(cluster, a_pod("held"), [[share(cluster, 0)]])
    await until_running(cluster, "held")
    await until_unlocked(cluster)
    containers = lives_of(cluster, ["held"])
    mark = cluster.plane.audit.mark()
    second = await standby_of(cluster)
    code, text = await page(second, "/readyz")
    assert 503 == code
    assert "standby: another agent runs on this host (pid " in text
    await place(cluster, a_pod("with-two"), [[share(cluster, 1)]])
    await until_running(cluster, "with-two")
    await until_unlocked(cluster)
    assert [] == cluster.plane.audit.since(mark, ACCOUNT)
    assert not second.events("alloc.answered") + second.events("plugin.serving")

    loop = asyncio.get_running_loop()
    began = loop.time()
    await first.part.kill()
    await until_answer(lambda: serves(cluster, second), 30.0, second.part.tail)
    table.hold("second agent serves after the first was killed", loop.time() - began, BOUND)

    await place(cluster, a_pod("after"), [[share(cluster, 2)]])
    await until_running(cluster, "after", "with-two", "held")
    await until_unlocked(cluster)
    assert containers == lives_of(cluster, ["held"])
    assert {"main": [gpu_uuids(cluster)[0]]} == await gpus_held(cluster, "held")
    assert ["after"] == [line["pod"] for line in second.events("alloc.answered")]
    assert cluster.plane.audit.since(mark, ACCOUNT)
