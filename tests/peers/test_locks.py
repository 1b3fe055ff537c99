"""The node lock beside a real kubelet: who is served, who is refused, and when it comes free."""

import asyncio

import pytest

from agent import cluster as annotations
from agent.settle import UNCLAIMED
from tests.peers.lab.clockwork import until_taken_up
from tests.peers.lab.faults import frozen
from tests.peers.lab.grants import told_environment
from tests.peers.lab.node_state import lock_held, until_unlocked
from tests.peers.lab.placement import annotate, bind, create_by_hand, lock, place, share
from tests.peers.lab.pods import (
    annotations_of,
    delete,
    key,
    phase_of,
    status_of,
    telling,
    until_bind_phase,
    until_deleted,
    until_failed,
    until_phase,
    until_running,
    until_told,
)
from tests.peers.lab.waiting import until
from tests.peers.lab.workloads import a_container, a_pod, stray

RELEASE_BOUND = 5.0
GONE_BOUND = 35.0


async def was_given(cluster, name, container="main"):
    """The GPUs and the first limit that a telling pod's container saw."""
    await until_told(cluster, name)
    seen = told_environment(cluster, name, container)
    return seen.get("NVIDIA_VISIBLE_DEVICES"), seen.get("CUDA_DEVICE_MEMORY_LIMIT_0")


async def sees(agent, name, event="settlement.owed"):
    def seen():
        return any(line.get("pod") == name for line in agent.events(event))

    await until(seen, 20.0, agent.part.tail)


async def run_next(cluster, name="next", index=7):
    """The node is free again: another pod gets its share."""
    await place(cluster, a_pod(name), [[share(cluster, index)]])
    await until_running(cluster, name)
    await until_unlocked(cluster)


async def test_the_lock_of_a_pod_that_the_kubelet_rejected_unasked_is_released(
    cluster, agent, table
):
    forbidden = {"sysctls": [{"name": "kernel.msgmax", "value": "65536"}]}
    rejected = a_pod("rejected", securityContext=forbidden)
    began = asyncio.get_running_loop().time()

    await place(cluster, rejected, [[share(cluster, 0)]])

    status = await until_failed(cluster, "rejected")
    assert "SysctlForbidden" == status["reason"]
    assert not agent.events("alloc.answered") + agent.events("alloc.refused")
    await until_unlocked(cluster)
    freed = asyncio.get_running_loop().time()
    over = cluster.pods.when(key("rejected"), lambda pod: phase_of(pod) == "Failed", since=began)
    table.hold("lock of a rejected pod: released", freed - over, RELEASE_BOUND)
    await run_next(cluster)


async def test_the_lock_of_an_owner_that_nobody_saw_goes_when_it_stood_for_long_whatever_its_stamp(
    cluster, agent, table
):
    await lock(cluster, "gone", age=-3600.0)
    began = asyncio.get_running_loop().time()

    await until_unlocked(cluster, 90.0)
    took = asyncio.get_running_loop().time() - began

    assert UNCLAIMED.total_seconds() - 1.0 < took
    table.hold("lock of an owner nobody saw: released", took, 35.0)


async def test_the_lock_of_an_owner_deleted_while_the_agent_was_away_goes_after_its_start(
    cluster, agent, table
):
    await agent.part.kill()
    with frozen(cluster.kubelet.part):
        await place(cluster, a_pod("gone"), [[share(cluster, 0)]])
        await delete(cluster, "gone", grace=0)
        await until_deleted(cluster, "gone")
    await lock(cluster, "gone")
    began = asyncio.get_running_loop().time()

    await cluster.start_registered_agent(name="afterwards")

    await until_unlocked(cluster, 90.0)
    took = asyncio.get_running_loop().time() - began
    table.hold("lock of an owner deleted unseen: released", took, 40.0)
    await run_next(cluster)


@pytest.mark.parametrize("lost", ["forgotten", "terminating"])
async def test_a_pod_deleted_between_bind_and_allocate_takes_no_share_with_it(
    cluster, agent, table, lost
):
    grace = 0 if lost == "forgotten" else 30
    with frozen(cluster.kubelet.part):
        await place(
            cluster,
            a_pod(lost, terminationGracePeriodSeconds=grace),
            [[share(cluster, 0)]],
        )
        await delete(cluster, lost, grace=grace)
        began = asyncio.get_running_loop().time()
        if lost == "forgotten":
            await until_unlocked(cluster, 60.0)
            took = asyncio.get_running_loop().time() - began
            table.hold("lock of a deleted pod, kubelet frozen: released", took, GONE_BOUND)

    await until_deleted(cluster, lost)
    await until_unlocked(cluster, 60.0)
    await run_next(cluster)

    answered = [line["pod"] for line in agent.events("alloc.answered")]
    refused = [(line["gate"], lost in line["reason"]) for line in agent.events("alloc.refused")]
    if lost == "forgotten":
        assert ["next"] == answered
        assert refused in ([], [("HA-2003", True)])
        table.add("Allocate for a pod deleted with grace 0: asked", len(refused), unit="")
    else:
        assert not refused
        assert answered in (["next"], [lost, "next"])
        table.add("Allocate for a pod deleted with grace 30: asked", len(answered) - 1, unit="")


async def test_a_pod_of_the_same_name_as_one_deleted_before_allocate_gets_its_own_share(
    cluster, agent
):
    # A StatefulSet's next pod bears the name of the last one. The kubelet may ask for that one,
    # too: it hears the next one's answer, and ends.
    mine = share(cluster, 5, 2000)
    successor = telling(cluster, a_pod("twin", a_container(memory=2000)))
    with frozen(cluster.kubelet.part):
        await place(cluster, telling(cluster, a_pod("twin")), [[share(cluster, 0)]])
        await delete(cluster, "twin", grace=0)
        await until_unlocked(cluster, 60.0)
        await place(cluster, successor, [[mine]])

    await until_running(cluster, "twin")
    await until_unlocked(cluster)
    assert (mine.uuid, "2000m") == await was_given(cluster, "twin")
    assert [] == agent.events("alloc.refused")


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_lock_handed_over_gives_neither_pod_the_share_of_the_other(cluster, agent, when):
    first, second = f"first-{when}", f"second-{when}"
    shares = {first: share(cluster, 0, 1000), second: share(cluster, 5, 2000)}
    for name, one in shares.items():
        pod = a_pod(name, a_container(memory=one.memory_mib))
        await create_by_hand(cluster, telling(cluster, pod))
        await annotate(cluster, name, [[one]])
    await lock(cluster, first)

    with frozen(cluster.kubelet.part if when == "before" else agent.part):
        await bind(cluster, first)
        if when == "during":
            await until_taken_up(cluster, first)
        await lock(cluster, second)
        await bind(cluster, second)

    await until_running(cluster, second)
    await until_phase(cluster, first, "Failed", "Running")
    await until_unlocked(cluster)
    served = {name for name in shares if status_of(cluster, name)["phase"] == "Running"}
    seen = {name: await was_given(cluster, name) for name in served}
    assert {one: (shares[one].uuid, f"{shares[one].memory_mib}m") for one in served} == seen
    if first not in served:
        message = status_of(cluster, first)["message"]
        assert "[HA-2004]" in message
        assert key(second) in message


@pytest.mark.parametrize("claims", [False, True], ids=["bare", "claiming"])
async def test_a_stray_pod_is_refused_and_the_owner_of_the_lock_is_served(cluster, agent, claims):
    mine = share(cluster, 2, 4000)
    with frozen(cluster.kubelet.part):
        lone = await create_by_hand(cluster, stray(telling(cluster, a_pod("stray"))))
        if claims:
            await annotate(cluster, "stray", [[mine]])
        made = lone["metadata"]["creationTimestamp"]
        owner = telling(cluster, a_pod("owner", a_container(memory=4000)))
        while (await create_by_hand(cluster, owner))["metadata"]["creationTimestamp"] == made:
            await delete(cluster, "owner", grace=0)  # the older is admitted first
        await annotate(cluster, "owner", [[mine]])
        await lock(cluster, "owner")
        await bind(cluster, "owner")

    status = await until_failed(cluster, "stray")
    assert "UnexpectedAdmissionError" == status["reason"]
    assert "Pod default/stray asks for GPUs" in status["message"]
    assert "default/owner" in status["message"]
    assert "[HA-2004]" in status["message"]
    await until_running(cluster, "owner")
    await until_bind_phase(cluster, "owner", annotations.PHASE_SUCCESS)
    await until_unlocked(cluster)
    assert (mine.uuid, "4000m") == await was_given(cluster, "owner")
    if claims:
        await until_bind_phase(cluster, "stray", annotations.PHASE_FAILED)
        await sees(agent, "stray")
    settled = {line["pod"] for line in agent.events("settlement.owed")}
    assert settled <= {"stray"}
    assert annotations.PHASE_SUCCESS == annotations_of(cluster, "owner")[annotations.BIND_PHASE]


async def test_a_pod_that_was_created_with_its_node_takes_over_no_lock_of_its_name(cluster, agent):
    mine = share(cluster, 2, 4000)
    with frozen(cluster.kubelet.part):
        await place(cluster, a_pod("heir"), [[share(cluster, 0)]])
        await delete(cluster, "heir", grace=0)
        await until_deleted(cluster, "heir")
        await create_by_hand(cluster, stray(a_pod("heir")))
        await annotate(cluster, "heir", [[mine]])
        assert await lock_held(cluster)

    status = await until_failed(cluster, "heir")
    assert "without nodeName" in status["message"]
    assert "[HA-2005]" in status["message"]
    await until_unlocked(cluster, 60.0)
    await run_next(cluster)


async def test_what_an_answer_owes_is_paid_by_the_next_agent_though_the_pod_is_gone(
    cluster, agent, table
):
    server, pod = cluster.plane.apiserver, a_pod("answered")
    pod["metadata"]["generateName"] = "answered"  # a name that returns must be looked at
    with frozen(agent.part):
        await place(cluster, pod, [[share(cluster, 0)]])
        await until_taken_up(cluster, "answered")
        server.freeze()
    await sees(agent, "answered", "alloc.answered")
    await agent.part.kill()
    await server.kill()  # with the agent's writes that it has not read
    await server.start()
    await cluster.plane.until_ready()
    assert await lock_held(cluster)
    await delete(cluster, "answered", grace=0)
    began = asyncio.get_running_loop().time()

    await cluster.start_registered_agent(name="next")

    await until_unlocked(cluster)
    took = asyncio.get_running_loop().time() - began
    table.hold("lock owed by a killed agent: released", took, RELEASE_BOUND)
    await run_next(cluster)
