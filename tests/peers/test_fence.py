"""`allocation.fence: prestart`: who may start starts; who was booked another GPU is told so."""

import pytest_asyncio
from msgspec.structs import replace

from agent.sandbox.kubelet.checkpoint import FILE_NAME, decode, encode
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.nodes import end_container
from tests.peers.lab.part import until, until_answer
from tests.peers.lab.pods import gpu_of, key, wall

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
        found = cluster.status_of(name).get("containerStatuses") or [{"state": {}}]
        waiting = found[0]["state"].get("waiting") or {}
        if waiting.get("reason") != "CrashLoopBackOff":  # it rests first
            seen.update(waiting)
        return seen

    await cluster.pods.until(waits, 60.0, f"{name} does not wait: {cluster.status_of(name)}")
    return seen["reason"], seen["message"]


async def book_elsewhere(cluster, agent, name):
    """The kubelet starts with records that name a slice of another GPU, and then the agent.

    The GPU that the pod was given, and the other one.
    """
    (mine,) = (await cluster.kubelet.held(RESOURCE))[key(name), "main"]
    elsewhere = next(uuid for uuid in cluster.gpu_uuids() if uuid != gpu_of(mine))
    await agent.part.kill()
    await cluster.kubelet.part.kill()
    path, uid = cluster.kubelet.plugins / FILE_NAME, cluster.as_seen(name)["metadata"]["uid"]
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
    (name, other) = await cluster.run(*(cluster.a_telling_pod(one) for one in ("off", "well")))
    await cluster.until_settled(name, other)
    await cluster.until_told(name, other)
    before = cluster.lives_of([name, other])

    mine, elsewhere = await book_elsewhere(cluster, fenced, name)
    began = wall()
    await until(lambda: bool(fenced.events("ledger.mismatch")), 30.0, fenced.part.tail)
    table.hold("agent starts → another GPU's slice is told", wall() - began, NOTED_WITHIN)
    await cluster.until_allocatable()
    assert before == cluster.lives_of([name, other])
    _, metrics = await fenced.page("/metrics")
    assert "hami_agent_allocation_mismatches_total 1.0" in metrics.splitlines()
    await until_answer(lambda: event_of(cluster, name), 20.0, fenced.part.tail)

    await end_container(cluster.lives_of([name])[name]["main"])
    reason, message = await until_waiting(cluster, name)
    assert "CreateContainerConfigError" == reason
    assert message.startswith(f"{ASKED} code = FailedPrecondition desc = Container main ")
    assert message.endswith(
        f"was given GPU {mine}, but the kubelet booked slices of {elsewhere} for it; "
        "create the pod again. [HA-4006]"
    )
    await cluster.run(cluster.a_telling_pod("new"))
    assert before[other] == cluster.lives_of([other])[other]
    assert {} == cluster.lives_of([name])[name]

    await cluster.delete(name, grace=0)
    await cluster.until_deleted(name)
    await cluster.run(cluster.a_telling_pod(name))
    assert cluster.expected_inside(name) == await cluster.seen_inside(name)


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
