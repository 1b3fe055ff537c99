"""A GPU falls ill under a running pod: who is told, what stays, and what lands there no more."""

import asyncio

import pytest

from agent.sandbox.hardware_talk import HardwareRequest
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.pods import a_container, a_pod, gpu_of
from tests.peers.lab.running import registered_health

pytestmark = pytest.mark.timeout(300)  # longer than what is waited for inside, which tells more

SCHEDULED = 15.0
"""Seconds between two looks of HAMi's scheduler."""
LIST_BOUND = 1.0
FELL_OFF = HardwareRequest("xid", "0", 79)


def told_health(cluster, name):
    """By slice id, what the pod's status says of the resource."""
    containers = cluster.status_of(name).get("containerStatuses") or []
    return {
        resource["resourceID"]: resource["health"]
        for one in containers
        for entry in one.get("allocatedResourcesStatus") or []
        if RESOURCE in entry["name"]
        for resource in entry["resources"]
    }


async def test_an_ill_gpu_is_told_everywhere_its_pod_runs_on_and_no_other_comes(
    cluster, agent, table
):
    loop = asyncio.get_running_loop()
    await cluster.place(a_pod("resident"), [[cluster.share(0)]])
    await cluster.until_running("resident")
    await cluster.until_unlocked()
    ill, *others = cluster.gpu_uuids()
    (held,) = (await cluster.kubelet.held(RESOURCE)).values()
    before = cluster.lives_of(["resident"])

    began = loop.time()
    await agent.simulate(FELL_OFF)

    await cluster.until_allocatable(70)
    table.hold("XID 79: allocatable without its slices", loop.time() - began, LIST_BOUND)
    offered = await cluster.kubelet.allocatable(RESOURCE)
    assert {*others} == {gpu_of(text) for text in offered}
    wanted = {ill: False} | dict.fromkeys(others, True)
    await cluster.nodes.until(
        lambda: wanted == registered_health(cluster.node_of()), 20.0, "register"
    )
    said = loop.time()
    table.hold("XID 79: register annotation says so", said - began, LIST_BOUND)
    await cluster.pods.until(
        lambda: told_health(cluster, "resident") == dict.fromkeys(held, "Unhealthy"),
        60.0,
        f"status: {cluster.status_of('resident')}",
    )
    table.add("XID 79: the pod's status says so", loop.time() - began)
    await cluster.until_offered(70)
    await cluster.place(a_pod("unlucky"), [[cluster.share(0)]])

    status = await cluster.until_failed("unlucky")
    assert "UnexpectedAdmissionError" == status["reason"]
    assert f"GPU 0 ({ill}) is lost: " in status["message"]
    assert "so that it is placed on another GPU. [HA-4002]" in status["message"]
    await cluster.until_unlocked()

    # The scheduler itself places nothing there; it looks at a changed Node every 15 s.
    await asyncio.sleep(said + SCHEDULED - loop.time())
    await cluster.run(a_pod("seven", a_container(gpus=7, cores=60)))
    assert sorted(others) == (await cluster.gpus_held("seven"))["main"]
    await cluster.create(a_pod("finds-none", a_container(cores=60)))

    def is_turned_away():
        conditions = cluster.status_of("finds-none").get("conditions") or []
        return "Unschedulable" in {one.get("reason") for one in conditions}

    await cluster.pods.until(is_turned_away, 60.0, "it is placed")
    assert "nodeName" not in cluster.as_seen("finds-none")["spec"]
    assert before == cluster.lives_of(["resident"])
