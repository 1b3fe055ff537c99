"""While the API server is away the node goes on with what it knows; afterwards nothing is owed."""

import asyncio
import contextlib
from collections import Counter

import pytest
import pytest_asyncio

from agent.codec.register import decode_register
from agent.core import annotations
from agent.core.errors import Gate
from agent.core.share import Share
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.agreement import lost, rows
from tests.peers.lab.clockwork import ALL_HEALTHY, until_kubelet_says, wall
from tests.peers.lab.gpu_pods import (
    answers,
    create,
    environment_of,
    forget_told,
    has_its_limits,
    kill_main,
    lives_of,
    run,
    until_running,
    until_told,
)
from tests.peers.lab.identities import NODE
from tests.peers.lab.placement import annotate, bind, gpu_uuids, lock, lock_text, place
from tests.peers.lab.placement import create as create_by_hand
from tests.peers.lab.waiting import until
from tests.peers.lab.workloads import a_container, a_pod, telling

AWAY = 30.0
"""Seconds for which the API server is away."""

PATIENCE = 150.0
"""Seconds until everybody is back: kubelet and kube-scheduler look again after up to a minute."""


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _nothing_told(cluster):
    forget_told(cluster)


def a_telling_pod(cluster, name, **kinds):
    return telling(a_pod(name, a_container(**kinds)), cluster.root / "told")


@contextlib.asynccontextmanager
async def bound_unseen(cluster, pod, share):
    """A pod with its lock, bound by hand; the kubelet sleeps until the block ends."""
    name = pod["metadata"]["name"]
    await create_by_hand(cluster, pod)
    await annotate(cluster, name, [[share]])
    await lock(cluster, name)
    cluster.kubelet.part.freeze()
    try:
        await bind(cluster, name)
        key = f"default/{name}"
        await cluster.pods.until(
            lambda: "nodeName" in cluster.pods.objects[key]["spec"], 10.0, f"{key} is not bound"
        )
        yield
    finally:
        cluster.kubelet.part.thaw()


async def serve_while_away(cluster, agent, table, *, killed):
    """A pod is bound, and the API server goes for 30 s before the kubelet sees the pod."""
    server, told = cluster.plane.apiserver, cluster.root / "told"
    share = Share(gpu_uuids(cluster)[3], 5000, 20)
    async with bound_unseen(cluster, a_telling_pod(cluster, "late"), share):
        server.freeze()
        gone = wall()
    await until((told / "late.main.done").exists, 20.0, cluster.kubelet.part.tail)
    table.add("API server away, the kubelet asks → the container runs", wall() - gone)
    if killed:
        await server.kill()
    assert (share,) == rows(cluster)["default/late", "main"].shares
    await asyncio.sleep(gone + AWAY - wall())
    assert agent.part.is_alive
    assert 80 == len(await cluster.kubelet.allocatable(RESOURCE))
    assert "default/late" in await cluster.kubelet.list()
    if killed:
        await server.start()
    else:
        server.thaw()
    await cluster.plane.until_ready()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("manner", ["killed", pytest.param("frozen", marks=pytest.mark.long)])
async def test_what_the_agent_knew_is_served_without_the_api_server_and_settled_after_it(
    cluster, agent, table, manner
):
    residents = await run(
        cluster, *(a_telling_pod(cluster, f"resident-{number}") for number in range(2))
    )
    before, asked, pid = lives_of(cluster, residents), answers(agent), agent.part.pid
    register = noted(cluster)[annotations.REGISTER]

    await serve_while_away(cluster, agent, table, killed=manner == "killed")
    back = wall()
    await cluster.nodes.until(lambda: lock_text(cluster) is None, 60.0, "the lock is still held")
    table.add(f"API server is back ({manner}) → lock free", wall() - back)
    await create(cluster, a_telling_pod(cluster, "new"))
    await cluster.pods.until(
        lambda: annotations.PHASE_SUCCESS == phase_of(cluster, "late"), 90.0, "late is not settled"
    )
    table.add(f"API server is back ({manner}) → pod settled", wall() - back)
    await until_running(cluster, ["late", "new"], PATIENCE)
    table.add(f"API server is back ({manner}) → new pod runs, all peers included", wall() - back)

    assert await has_its_limits(cluster, "late")
    assert await has_its_limits(cluster, "new")
    assert before == lives_of(cluster, residents)
    assert asked + Counter((name, "main") for name in ("late", "new")) == answers(agent)
    assert pid == agent.part.pid
    assert register == noted(cluster)[annotations.REGISTER]
    assert 8 == len(decode_register(register))
    assert [] == lost(cluster)


def noted(cluster):
    """The Node's annotations."""
    return cluster.nodes.objects[NODE]["metadata"]["annotations"]


def phase_of(cluster, name):
    """The phase of a pod's binding, as its annotation says."""
    pod = cluster.pods.objects.get(f"default/{name}")
    return pod["metadata"].get("annotations", {}).get(annotations.BIND_PHASE) if pod else None


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_who_is_back_before_the_agent_after_an_outage_finds_it_ready(cluster, agent):
    await cluster.plane.apiserver.kill()
    await asyncio.sleep(AWAY)
    await cluster.plane.apiserver.start()
    await cluster.plane.until_ready()
    await cluster.kubelet.restart()  # which does not wait for its next look, and the agent may

    for number, gpu in enumerate(gpu_uuids(cluster)[:3]):
        name = f"soon-{number}"
        await place(cluster, a_telling_pod(cluster, name), [[Share(gpu, 5000, 20)]])
        await until_running(cluster, [name])
        assert await has_its_limits(cluster, name)
        await cluster.nodes.until(lambda: lock_text(cluster) is None, 30.0, "the lock is held")
    assert 3 == len(agent.events("lock.released"))
    assert [] == lost(cluster)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_an_agent_that_cannot_learn_of_the_pods_refuses_in_a_sentence_until_it_can(
    cluster, agent, table
):
    told = cluster.root / "told"
    (name,) = await run(cluster, a_telling_pod(cluster, "dies", gpus=2))
    await until_told(told, name)
    environment = environment_of(cluster, name)
    began = wall()
    await cluster.kubelet.restart(lose_checkpoint=True)
    await until_kubelet_says(cluster, '"SyncLoop ADD" source="api" pods=["default/dies"]', began)
    await cluster.plane.apiserver.kill()
    await agent.part.kill()
    began = wall()
    await agent.part.start()
    await until_kubelet_says(cluster, ALL_HEALTHY, began)

    (told / "dies.main.done").unlink()
    kill_main(cluster, lives_of(cluster, [name])[name]["main"].id)
    await until(lambda: bool(agent.events("alloc.refused")), 30.0, agent.part.tail)
    refused = agent.events("alloc.refused")[0]
    assert Gate.PODS_UNKNOWN.value == refused["gate"]
    assert refused["reason"].startswith("The API server cannot be asked")
    await cluster.plane.apiserver.start()
    await cluster.plane.until_ready()
    back = wall()

    await until((told / "dies.main.done").exists, PATIENCE, agent.part.tail)
    table.add("API server is back → a container that was refused runs again", wall() - back)
    assert environment == environment_of(cluster, name)
    assert "replay" == agent.events("alloc.answered")[-1]["result"]
    await cluster.pods.until(
        lambda: 1 == restarts(cluster, name), PATIENCE, "the restart is not told"
    )
    assert [] == lost(cluster)


def restarts(cluster, name):
    """How often the container of a running pod was started again."""
    life = lives_of(cluster, [name])[name].get("main")
    return life.restarts if life else None
