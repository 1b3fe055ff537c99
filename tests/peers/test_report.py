"""What the agent reports of its node, and what kubelet and HAMi's scheduler make of it."""

import asyncio
import contextlib
import json

import pytest
import pytest_asyncio

from agent.sandbox.hardware_talk import HardwareRequest
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.cluster import is_ready
from tests.peers.lab.grants import told_environment
from tests.peers.lab.identities import NODE
from tests.peers.lab.node_state import (
    NODE_PATH,
    Told,
    gpu_uuids,
    node_of,
    node_writes,
    register_text,
    registered_health,
    until_allocatable,
    until_node_writes,
    until_offered,
    until_told,
    until_unlocked,
)
from tests.peers.lab.placement import agent_said, place, share, wall
from tests.peers.lab.pods import (
    a_container,
    a_pod,
    a_telling_pod,
    as_seen,
    create,
    gpu_of,
    gpus_held,
    lives_of,
    run,
    status_of,
    until_failed,
    until_running,
    until_settled,
)
from tests.peers.lab.pods import until_told as until_pods_told
from tests.peers.lab.requests import mark_of_rest
from tests.peers.lab.space import until
from tests.peers.lab.table import FAR

pytestmark = pytest.mark.timeout(300)  # longer than what is waited for inside, which tells more

BOUND = 2.0
"""Seconds from a change to its effect; the agent spreads the writes of many nodes over one."""
BACK_WITHIN = 90.0
"""Seconds until an agent has tried again after tries in vain, each of them later."""
SCHEDULED = 15.0
"""Seconds between two looks of HAMi's scheduler."""
QUIET = 3.0
"""Seconds in which a write that is one too many would be there."""
LIST_BOUND = 1.0
FELL_OFF = HardwareRequest("xid", "0", 79)


def write_settings(cluster, **entry):
    """HAMi's config.json with an entry for this node; its path. The agent looks every 5 s."""
    path = cluster.root / "config.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"nodeconfig": [{"name": NODE, **entry}]}))
    fresh.rename(path)
    return path


async def with_settings(cluster):
    """An agent that reads the file."""
    path = write_settings(cluster, devicesplitcount=10)
    return await cluster.start_registered_agent("--nodeconfig", str(path))


async def test_memory_beyond_a_gpus_own_can_be_had_once_it_is_scaled(cluster, table):
    agent = await with_settings(cluster)
    before = await run(cluster, a_telling_pod(cluster, "before"))
    await until_settled(cluster, *before)
    lived = lives_of(cluster, before)

    write_settings(cluster, devicesplitcount=12, devicememoryscaling=1.5, libcudaloglevel="4")
    loop = asyncio.get_running_loop()
    began = loop.time()
    at = await until_told(cluster, Told(8, 12, 122338), began, FAR * BOUND)
    table.hold("config.json edited → register annotation", at - began, 6.0)
    await until_allocatable(cluster, 8 * 12)
    await run(cluster, a_telling_pod(cluster, "after", memory=120_000), within=60.0)
    table.hold("memory scaled → a pod with 120 GB runs", loop.time() - began, 6.0 + SCHEDULED)

    await until_pods_told(cluster, "before", "after")
    old, new = (told_environment(cluster, name) for name in ("before", "after"))
    limits = ("CUDA_DEVICE_MEMORY_LIMIT_0", "CUDA_OVERSUBSCRIBE", "LIBCUDA_LOG_LEVEL")
    assert ("120000m", "true", "4") == tuple(new[name] for name in limits)
    assert ("3000m", None, "1") == tuple(old.get(name) for name in limits)
    assert lived == lives_of(cluster, before)
    assert [] == agent.events("alloc.refused")


@contextlib.asynccontextmanager
async def present_again(cluster):
    """Whatever happens in the block, afterwards there is a Node that takes pods."""
    try:
        yield
    finally:
        if NODE not in cluster.nodes.objects:
            await cluster.kubelet.restart()
        await cluster.nodes.until(lambda: is_ready(cluster.nodes), 60.0, "the Node is not ready")


async def test_a_node_that_was_deleted_and_made_anew_is_told_by_one_write(cluster, agent, table):
    uid, text = node_of(cluster)["metadata"]["uid"], register_text(cluster)
    mark = await mark_of_rest(cluster)

    async with present_again(cluster):
        await cluster.api.delete(NODE_PATH)
        await until(lambda: bool(agent.events("node.deleted")), 20.0, agent.part.tail)
        await asyncio.sleep(QUIET)  # what is claimed is about this time
        assert 0 == node_writes(cluster, mark), "there is no Node to write to"
        began = asyncio.get_running_loop().time()
        await cluster.kubelet.restart()  # it makes its Node when it starts, and only then
        at = await until_told(cluster, Told(8, 10), began, 60.0)
        made = cluster.nodes.when(NODE, lambda node: uid != node["metadata"]["uid"], since=began)
        table.hold("Node made anew → register annotation", at - made, BOUND)
    await until_allocatable(cluster)
    await until_node_writes(cluster, mark, 1)
    await asyncio.sleep(QUIET)  # what is claimed is about this time

    assert text == register_text(cluster)
    assert 1 == node_writes(cluster, mark)


@pytest_asyncio.fixture(loop_scope="session")
async def fresh_kubelet(cluster):
    """Afterwards a kubelet that sees the Node as it is.

    The watch of one that was without its server comes back up to a minute later, and until then it
    does not write what it takes for written.
    """
    yield
    await cluster.revive()
    await cluster.kubelet.restart()


@pytest.mark.usefixtures("fresh_kubelet")
@pytest.mark.parametrize(
    ("manner", "seconds"), [("killed", 5), pytest.param("frozen", 30, marks=pytest.mark.long)]
)
async def test_what_changed_while_the_api_server_was_away_is_one_write_after_it(
    cluster, table, manner, seconds
):
    agent = await with_settings(cluster)
    ill, *others = gpu_uuids(cluster)
    mark = await mark_of_rest(cluster)
    server, gone = cluster.plane.apiserver, wall()
    if manner == "frozen":
        server.freeze()
    else:
        await server.kill()
    await agent.simulate(FELL_OFF)
    await until_allocatable(cluster, 7 * 10)
    write_settings(cluster, devicesplitcount=5)
    await until_allocatable(cluster, 7 * 5)
    assert not agent_said(agent, "report.written", gone)
    await asyncio.sleep(gone + seconds - wall())
    back = wall()
    if manner == "frozen":
        server.thaw()
    else:
        await server.start()

    await until_told(cluster, Told(8, 5), 0.0, BACK_WITHIN)
    await until(
        lambda: bool(agent_said(agent, "report.written", gone)), BACK_WITHIN, agent.part.tail
    )
    wrote = agent_said(agent, "report.written", gone)[0]
    table.add(f"API server comes back ({manner}, {seconds} s) → register annotation", wrote - back)
    await until_node_writes(cluster, mark, 1)
    await asyncio.sleep(QUIET)  # what is claimed is about this time

    # One that stood still finds a try whose client has left long ago, and lets it be.
    assert 1 == node_writes(cluster, mark, done=True)
    assert {ill: False} | dict.fromkeys(others, True) == registered_health(node_of(cluster))
    # The cluster's next test finds the scheduler back: its watches wait up to 30 s for a retry.
    await run(cluster, a_pod("after"), within=90.0)


# A GPU falls ill under a running pod: who is told, what stays, and what lands there no more.


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
    await place(cluster, a_pod("resident"), [[share(cluster, 0)]])
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
    await place(cluster, a_pod("unlucky"), [[share(cluster, 0)]])

    status = await until_failed(cluster, "unlucky")
    assert "UnexpectedAdmissionError" == status["reason"]
    assert f"GPU 0 ({ill}) is lost: " in status["message"]
    assert "so that it is placed on another GPU. [HA-4002]" in status["message"]
    await until_unlocked(cluster)
    assert before == lives_of(cluster, ["resident"])


async def test_the_scheduler_places_nothing_on_an_ill_gpu(cluster, agent):
    ill, *others = gpu_uuids(cluster)
    await agent.simulate(FELL_OFF)
    await until_allocatable(cluster, 70)
    await cluster.nodes.until(
        lambda: not registered_health(node_of(cluster)).get(ill, True), 20.0, "register"
    )
    await asyncio.sleep(SCHEDULED)  # HAMi's scheduler looks at a changed Node every 15 s

    await run(cluster, a_pod("seven", a_container(gpus=7, cores=60)))
    assert sorted(others) == (await gpus_held(cluster, "seven"))["main"]
    await create(cluster, a_pod("finds-none", a_container(cores=60)))

    def is_turned_away():
        conditions = status_of(cluster, "finds-none").get("conditions") or []
        return "Unschedulable" in {one.get("reason") for one in conditions}

    await cluster.pods.until(is_turned_away, 60.0, "it is placed")
    assert "nodeName" not in as_seen(cluster, "finds-none")["spec"]
