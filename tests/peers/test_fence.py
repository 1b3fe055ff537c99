"""`allocation.fence: prestart`: who may start starts; who was booked another GPU is told so."""

from dataclasses import replace

import pytest_asyncio

from agent.sandbox.kubelet.checkpoint import FILE_NAME, decode, encode
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.faces import readings
from tests.peers.lab.grants import expected_inside, seen_inside
from tests.peers.lab.node_state import gpu_uuids, until_allocatable
from tests.peers.lab.nodes import kill_container
from tests.peers.lab.placement import wall
from tests.peers.lab.pods import (
    a_telling_pod,
    as_seen,
    delete,
    gpu_of,
    key,
    lives_of,
    run,
    status_of,
    until_deleted,
    until_settled,
    until_told,
)
from tests.peers.lab.space import until, until_answer

EVENTS = "/api/v1/namespaces/default/events"
NOTED_WITHIN = 3.0
ASKED = "device plugin PreStartContainer rpc failed with err: rpc error:"
"""What the kubelet writes before the words of whom it asked."""


@pytest_asyncio.fixture(loop_scope="session")
async def fenced(cluster):
    """An agent that the kubelet asks before each start."""
    return await cluster.start_registered_agent("--fence", "prestart")


async def until_waiting(cluster, name):
    """Why a pod's container is not started again, once the kubelet says so, and in what words."""

    seen = {}

    def waits():
        found = status_of(cluster, name).get("containerStatuses") or [{"state": {}}]
        waiting = found[0]["state"].get("waiting") or {}
        if waiting.get("reason") != "CrashLoopBackOff":  # it rests first
            seen.update(waiting)
        return seen

    await cluster.pods.until(waits, 60.0, f"{name} does not wait: {status_of(cluster, name)}")
    return seen["reason"], seen["message"]


async def book_elsewhere(cluster, agent, name):
    """The kubelet starts with records that name a slice of another GPU, and then the agent.

    The GPU that the pod was given, and the other one.
    """
    (mine,) = (await cluster.kubelet.held(RESOURCE))[key(name), "main"]
    elsewhere = next(uuid for uuid in gpu_uuids(cluster) if uuid != gpu_of(mine))
    await agent.part.kill()
    await cluster.kubelet.part.kill()
    path, uid = cluster.kubelet.plugins / FILE_NAME, as_seen(cluster, name)["metadata"]["uid"]
    found = decode(path.read_bytes())
    other = {-1: (f"{elsewhere}-9",)}
    entries = (replace(one, numa=other) if one.pod_uid == uid else one for one in found.entries)
    path.write_bytes(encode(replace(found, entries=tuple(entries))))
    await cluster.kubelet.start()
    await until_answer(lambda: holds(cluster, name, f"{elsewhere}-9"), 20.0, lambda: "not rebooked")
    await agent.part.start()
    return gpu_of(mine), elsewhere


async def test_a_container_that_was_booked_another_gpu_is_not_started_and_its_pod_says_why(
    cluster, fenced, table
):
    (name, other) = await run(cluster, *(a_telling_pod(cluster, one) for one in ("off", "well")))
    await until_settled(cluster, name, other)
    await until_told(cluster, name, other)
    before = lives_of(cluster, [name, other])

    mine, elsewhere = await book_elsewhere(cluster, fenced, name)
    began = wall()
    await until(lambda: bool(fenced.events("ledger.mismatch")), 30.0, fenced.part.tail)
    table.hold("agent starts → another GPU's slice is told", wall() - began, NOTED_WITHIN)
    await until_allocatable(cluster)
    assert before == lives_of(cluster, [name, other])
    assert 1 == (await readings(fenced))["hami_agent_allocation_mismatches_total"]
    await until_answer(lambda: event_of(cluster, name), 20.0, fenced.part.tail)

    await kill_container(cluster, name)
    reason, message = await until_waiting(cluster, name)
    assert "CreateContainerConfigError" == reason
    assert message.startswith(f"{ASKED} code = FailedPrecondition desc = Container main ")
    assert message.endswith(
        f"was given GPU {mine}, but the kubelet booked slices of {elsewhere} for it; "
        "create the pod again. [HA-4006]"
    )
    await run(cluster, a_telling_pod(cluster, "new"))
    assert before[other] == lives_of(cluster, [other])[other]
    assert {} == lives_of(cluster, [name])[name]

    await delete(cluster, name, grace=0)
    await until_deleted(cluster, name)
    await run(cluster, a_telling_pod(cluster, name))
    assert expected_inside(cluster, name) == await seen_inside(cluster, name)


async def holds(cluster, name, slice_id):
    """Whether the kubelet has booked this slice for a pod."""
    held = await cluster.kubelet.held(RESOURCE)
    return {slice_id} == held.get((key(name), "main"))


async def event_of(cluster, name):
    """Whether the pod has the Event of a mismatch."""
    found = (await cluster.api.get(EVENTS))["items"]
    return any(
        one["reason"] == "SliceMismatch" and one["involvedObject"]["name"] == name for one in found
    )
