"""Containers that start and die beside admission, and how the kubelet panics of it."""

import asyncio

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from tests.fakes.kubelet_rig import KubeletRig, a_pod_object, a_rig_with_plugin
from tests.fakes.plugin import RESOURCE, ScriptedPlugin

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


async def test_a_container_that_dies_is_started_again_without_a_call(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object())
        await rig.until_seen("container_started")
        plugin.end_streams()
        await rig.until_listed(0)

        await rig.kubelet.container_died("u1", "main")
        assert set() == rig.kubelet.pod("u1").running
        await rig.soon(rig.kubelet.until_running("u1", "main"))

        assert 1 == len(plugin.allocated)
        died, started = rig.seen("disconnected")[0], rig.seen("container_started")[1]
        assert 0.2 <= started.elapsed - died.elapsed <= 1.0


async def test_refused_there_the_pod_lives_and_is_asked_again_after_8_to_10_seconds(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await lose_the_checkpoint(rig, plugin, ["u1"])
        plugin.script.refusals.append(REFUSED)

        await rig.kubelet.container_died("u1", "main")
        refused = await rig.until_seen("container_waiting")
        assert {"main": "not now"} == rig.kubelet.pod("u1").waiting
        served = await rig.until_seen("container_started", 2)

        assert 8 <= served.elapsed - refused.elapsed <= 10
        assert {} == rig.kubelet.pod("u1").waiting
        assert [] == rig.seen("rejected")


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


async def test_a_burst_of_deaths_panics_a_kubelet_whose_plugin_grants_everything(tmp_path):
    uids = [f"u{number}" for number in range(6)]
    async with a_rig_with_plugin(tmp_path, count=12) as (rig, plugin):
        await lose_the_checkpoint(rig, plugin, uids)
        plugin.script.gate = asyncio.Event()
        for uid in uids:
            await rig.kubelet.container_died(uid, "main")
        await asyncio.sleep(2)
        assert 6 == len(plugin.allocated), "they overlap"

        plugin.script.gate.set()

        await rig.until_seen("panicked")


async def test_a_worker_waits_for_the_admission_that_is_going_on(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object("u1"))
        await rig.until_seen("container_started")
        plugin.script.gate = asyncio.Event()
        plugin.allocating.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(rig.admit(a_pod_object("u2")))
            await plugin.allocating.wait()
            await rig.kubelet.container_died("u1", "main")
            await asyncio.sleep(60)

            assert set() == rig.kubelet.pod("u1").running
            plugin.script.gate.set()
        await rig.soon(rig.kubelet.until_running("u1", "main"))


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


async def test_a_removed_endpoint_has_its_own_text(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object())
        await rig.until_seen("container_started")
        plugin.end_streams()
        await rig.until_listed(0)
        await asyncio.sleep(301)
        assert {RESOURCE} == rig.kubelet.tick().removed

        await rig.kubelet.container_died("u1", "main")

        text = f"endpoint not found in cache for a registered resource: {RESOURCE}"
        assert text == (await rig.until_seen("container_waiting")).text
