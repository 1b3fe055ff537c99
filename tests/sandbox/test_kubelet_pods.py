"""What a pod takes, how the kubelet panics, and what its Node shows, in the kubelet model."""

import asyncio

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.sandbox.kubelet.pods import read_pod
from tests.fakes.kubelet_rig import KubeletRig, a_container_object, a_pod_object, a_rig_with_plugin
from tests.fakes.node_rig import a_node_rig
from tests.fakes.plugin import RESOURCE, ScriptedPlugin, devices


@pytest.mark.parametrize(
    ("inits", "apps", "expected"),
    [
        ([], [1, 2], 3),
        ([("i", 5, False)], [1, 2], 5),
        ([("s", 2, True), ("i", 2, False)], [1], 4),
        ([("i", 2, False), ("s", 2, True)], [1], 3),
    ],
)
def test_a_pod_requests_the_greater_of_its_phases(inits, apps, expected):
    pod = a_pod_object(
        inits=[a_container_object(n, count=c, sidecar=s) for n, c, s in inits],
        containers=[a_container_object(f"a{n}", count=c) for n, c in enumerate(apps)],
    )

    assert expected == read_pod(pod).request(RESOURCE)


# Pods of the store through the kubelet model and back into their status.


async def test_a_job_ends_succeeded_and_frees_its_ids(tmp_path):
    async with a_node_rig(tmp_path, count=1) as node:
        node.create("job", annotations={"sandbox/run-seconds": "40"})
        await node.phases(job="Running")
        started = asyncio.get_running_loop().time()
        await node.phases(job="Succeeded")

        assert 40 <= round(asyncio.get_running_loop().time() - started, 1) + 0.1
        terminated = node.pod("job")["status"]["containerStatuses"][0]["state"]["terminated"]
        assert 0 == terminated["exitCode"]
        node.create("next")
        await node.phases(next="Running")
        node.store.delete("pods", "default", "job")
        await asyncio.sleep(1)
        assert 1 == len(node.rig.kubelet.node.pods)


# The predicates come after the device manager: the plugin has answered before they refuse.


async def test_what_other_active_pods_ask_for_counts_as_used(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, _):
        inits = [a_container_object("i", count=3), a_container_object("s", sidecar=True)]
        await rig.admit(a_pod_object("u1", inits=inits, created="2026-08-21T06:20:39Z"))
        await rig.admit(a_pod_object("u2", created="2026-08-21T06:20:40Z"))
        await rig.until_seen("container_started", 4)
        rig.kubelet.node.published[RESOURCE] = 3  # the init phase needs 3, what stays 2

        await rig.kubelet.restart(lose_checkpoint=True)

        text = (await rig.until_seen("rejected")).text
        assert text.endswith("requested: 1, used: 3, capacity: 3")
        assert rig.kubelet.pod("u1").admission.admitted


# Containers that start and die beside admission, and how the kubelet panics of it.

REFUSED = GRPCError(Status.FAILED_PRECONDITION, "not now")


async def lose_the_checkpoint(rig: KubeletRig, plugin: ScriptedPlugin, uids: list[str]) -> None:
    """Running pods whose records the kubelet has lost."""
    for uid in uids:
        await rig.admit(a_pod_object(uid))
    await rig.until_seen("container_started", len(uids))
    await rig.kubelet.restart(lose_checkpoint=True)
    await rig.come_back(plugin)
    await rig.until_seen("admitted", 2 * len(uids))
    await asyncio.sleep(1)  # until it has heard of everything, running containers pass unasked
    plugin.allocated.clear()
    plugin.allocating.clear()


async def a_call_is_held(rig: KubeletRig, plugin: ScriptedPlugin) -> asyncio.Event:
    """A container whose record is lost is being asked for; what lets its answer go."""
    await lose_the_checkpoint(rig, plugin, ["u1"])
    gate = plugin.script.gate = asyncio.Event()
    await rig.kubelet.container_died("u1", "main")
    await rig.soon(plugin.allocating.wait())
    plugin.script.gate = None
    return gate


async def test_an_earlier_call_that_is_granted_beside_a_later_one_panics_the_kubelet(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        gate = await a_call_is_held(rig, plugin)
        await rig.admit(a_pod_object("new"))

        gate.set()

        panic = await rig.until_seen("panicked")
        assert "assignment to entry in nil map" == panic.text
        await rig.until_seen("started", 3)
        await rig.come_back(plugin)
        await rig.until_seen("admitted", 5)
        assert [] == rig.seen("rejected"), "the plugin was back in time: all run on"
        assert {"main"} == rig.kubelet.pod("new").running


async def test_an_earlier_call_that_is_refused_beside_a_later_one_harms_nobody(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        gate = await a_call_is_held(rig, plugin)
        assert (await rig.admit(a_pod_object("new"))).admitted

        plugin.script.refusals.append(REFUSED)
        gate.set()

        await rig.soon(rig.kubelet.until_running("u1", "main"))
        assert [] == rig.seen("panicked")
        assert {("u1", "main"), ("new", "main")} == rig.ids().keys()


async def test_the_end_of_a_pod_waits_for_the_admission_that_is_going_on(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object("u1"))
        plugin.script.gate = asyncio.Event()
        plugin.allocating.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(rig.admit(a_pod_object("u2")))
            await plugin.allocating.wait()
            end = group.create_task(rig.kubelet.pod_gone("u1"))
            await asyncio.sleep(60)
            assert not end.done()
            plugin.script.gate.set()

        assert rig.kubelet.pod("u1") is None


# The Node object as the kubelet model keeps it.


async def test_the_node_follows_at_ticks_of_ten_seconds(tmp_path):
    async with a_node_rig(tmp_path, count=4) as node:
        loop, started = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        await node.sees(lambda: "4" == node.count("allocatable"))
        node.plugin.publish(devices(2))
        await node.rig.until_listed(2)
        await asyncio.sleep(5)
        assert "4" == node.count("allocatable")

        await node.sees(lambda: "2" == node.count("allocatable"))
        assert 10 == round(loop.time() - started)

        node.plugin.end_streams()
        await node.sees(lambda: "0" == node.count("allocatable"))
        assert "2" == node.count("capacity")
        await node.sees(lambda: "0" == node.count("capacity"))
        assert 300 < loop.time() - started < 340
