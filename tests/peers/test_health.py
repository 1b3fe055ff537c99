"""A GPU falls ill under a running pod: who is told, what stays, and what lands there no more."""

import asyncio
from functools import partial

import pytest

from agent.sandbox.hardware_talk import XidRequest
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.identities import NODE
from tests.peers.lab.node_state import (
    gpu_uuids,
    node_of,
    registered_health,
    until_allocatable,
    until_offered,
    until_unlocked,
)
from tests.peers.lab.placement import place, share
from tests.peers.lab.pods import (
    a_container,
    a_pod,
    as_seen,
    create,
    delete,
    gpu_of,
    gpus_held,
    is_up,
    lives_of,
    status_of,
    until_deleted,
    until_failed,
    until_running,
)

# Longer than what is waited for inside, which tells more.
pytestmark = pytest.mark.timeout(300)

LIST_BOUND = 1.0
FELL_OFF = XidRequest(gpu="0", xid=79)


async def place_on(cluster, name, index):
    await place(cluster, a_pod(name), [[share(cluster, index)]])


def told_health(cluster, name):
    """By slice id, what the pod's status says of the resource."""
    containers = status_of(cluster, name).get("containerStatuses") or []
    return {
        resource["resourceID"]: resource["health"]
        for one in containers
        for entry in one.get("allocatedResourcesStatus") or []
        if RESOURCE in entry["name"]
        for resource in entry["resources"]
    }


async def test_an_ill_gpu_is_told_everywhere_and_its_pod_runs_on(cluster, agent, table):
    loop = asyncio.get_running_loop()
    await place_on(cluster, "resident", 0)
    await until_running(cluster, "resident")
    await until_unlocked(cluster)
    ill, *others = gpu_uuids(cluster)
    (held,) = (await cluster.kubelet.held(RESOURCE)).values()
    before = lives_of(cluster, ["resident"])

    began = loop.time()
    await agent.simulate(FELL_OFF)

    await until_allocatable(cluster, 70)
    table.hold("XID 79: allocatable without its slices", loop.time() - began, LIST_BOUND)
    offered = await cluster.kubelet.allocatable(RESOURCE)
    assert set(others) == {gpu_of(text) for text in offered}
    wanted = {ill: False} | dict.fromkeys(others, True)
    await cluster.nodes.until(
        lambda: wanted == registered_health(node_of(cluster)), 20.0, "register"
    )
    said = cluster.nodes.when(
        NODE, lambda node: not registered_health(node).get(ill, True), since=began
    )
    table.hold("XID 79: register annotation says so", said - began, LIST_BOUND)
    await cluster.pods.until(
        lambda: told_health(cluster, "resident") == dict.fromkeys(held, "Unhealthy"),
        60.0,
        f"status: {status_of(cluster, 'resident')}",
    )
    table.add("XID 79: the pod's status says so", loop.time() - began)
    await until_offered(cluster, 70)
    assert before == lives_of(cluster, ["resident"])

    await place_on(cluster, "unlucky", 0)

    status = await until_failed(cluster, "unlucky")
    assert "UnexpectedAdmissionError" == status["reason"]
    assert f"GPU 0 ({ill}) is lost: " in status["message"]
    assert "XID 79" in status["message"]
    assert "so that it is placed on another GPU. [HA-4002]" in status["message"]
    await until_unlocked(cluster)
    assert before == lives_of(cluster, ["resident"])


def is_running(cluster, name):
    return is_up({"status": status_of(cluster, name)})


async def placed(cluster, name, gpus, is_done):
    """Create a pod anew until this is so.

    HAMi's scheduler looks at a changed Node every 15 s and may choose the ill GPU before that: then
    the agent refuses the pod.
    """
    async with asyncio.timeout(60):
        while True:
            await create(cluster, a_pod(name, a_container(gpus=gpus, cores=60)))
            await cluster.pods.until(
                lambda: is_done() or is_failed(cluster, name), 60.0, f"{name} stays as it is"
            )
            if is_done():
                return
            assert "[HA-4002]" in status_of(cluster, name)["message"]
            await delete(cluster, name, grace=0)
            await until_deleted(cluster, name)


def is_failed(cluster, name):
    return status_of(cluster, name).get("phase") == "Failed"


async def test_the_scheduler_places_nothing_on_an_ill_gpu(cluster, agent):
    ill, *others = gpu_uuids(cluster)
    await agent.simulate(FELL_OFF)
    await until_allocatable(cluster, 70)
    await cluster.nodes.until(
        lambda: not registered_health(node_of(cluster)).get(ill, True), 20.0, "register"
    )
    sizes = {"takes-four": 4, "takes-three": 3}

    for name, gpus in sizes.items():
        await placed(cluster, name, gpus, partial(is_running, cluster, name))

    given = [gpu for one in agent.events("alloc.answered") for gpu in one["gpus"]]
    assert sorted(others) == sorted(given)
    held = [gpu for name in sizes for gpu in (await gpus_held(cluster, name))["main"]]
    assert ill not in held

    def turned_away():
        conditions = status_of(cluster, "finds-none").get("conditions") or []
        return any(
            one["type"] == "PodScheduled" and one.get("reason") == "Unschedulable"
            for one in conditions
        )

    await placed(cluster, "finds-none", 1, turned_away)
    assert "nodeName" not in as_seen(cluster, "finds-none")["spec"]
