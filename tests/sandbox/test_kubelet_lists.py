"""What a list does to the kubelet's tables, and what the end of the stream does."""

import asyncio
import json

from agent.sandbox.kubelet.books import NodeResources
from agent.sandbox.kubelet.devices import DeviceTable, ListedDevice
from agent.wire.v1beta1 import ContainerAllocateResponse
from tests.fakes.kubelet_rig import a_pod_object, a_rig_with_plugin
from tests.fakes.plugin import RESOURCE, a_device, devices

FILE = "kubelet_internal_checkpoint"


def registered(rig) -> list[str]:
    data = json.loads((rig.plugins / FILE).read_text())["Data"]
    return sorted(data["RegisteredDevices"][RESOURCE])


async def test_each_list_replaces_the_one_before_wholly(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=4) as (rig, plugin):
        plugin.publish([a_device("other")])
        await rig.until_listed(1)

        assert 1 == rig.kubelet.capacity(RESOURCE)
        assert ["other"] == registered(rig)


async def test_capacity_is_healthy_and_unhealthy_and_allocatable_is_healthy(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=1) as (rig, plugin):
        ill = [a_device(f"i{n}", health=word) for n, word in enumerate(["", "healthy", "Bad"])]
        plugin.publish([*devices(2), *ill])
        await rig.until_listed(2)

        assert 5 == rig.kubelet.capacity(RESOURCE)
        assert ["g0", "g1"] == registered(rig)


def test_an_id_listed_as_healthy_and_unhealthy_is_in_both_sets():
    table = DeviceTable.of([ListedDevice("g0", "Healthy"), ListedDevice("g0", "Unhealthy")])

    assert 2 == table.capacity
    assert {"g0"} == table.healthy == table.unhealthy == table.ill


async def test_the_end_of_the_stream_makes_everything_unhealthy_and_nobody_dials_again(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=3) as (rig, plugin):
        plugin.end_streams()
        await rig.until_listed(0)
        await asyncio.sleep(200)

        assert 3 == rig.kubelet.capacity(RESOURCE)
        assert 1 == plugin.connections
        assert ["g0", "g1", "g2"] == registered(rig), "a disconnect does not write the checkpoint"


async def test_a_register_within_five_minutes_restores_everything(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=3) as (rig, plugin):
        plugin.end_streams()
        await rig.until_listed(0)
        await asyncio.sleep(299)
        assert NodeResources({RESOURCE: 3}, {RESOURCE: 0}) == rig.kubelet.tick()

        await plugin.register()

        await rig.until_listed(3)
        await asyncio.sleep(10)
        assert NodeResources({RESOURCE: 3}, {RESOURCE: 3}) == rig.kubelet.tick()


async def test_after_five_minutes_the_next_tick_removes_the_resource(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=3) as (rig, plugin):
        plugin.end_streams()
        await rig.until_listed(0)
        await asyncio.sleep(301)

        assert NodeResources(removed=frozenset({RESOURCE})) == rig.kubelet.tick()
        assert NodeResources() == rig.kubelet.tick()
        assert {} == json.loads((rig.plugins / FILE).read_text())["Data"]["RegisteredDevices"]

        await plugin.register()
        await rig.until_listed(3)


async def test_a_list_over_4_mib_ends_the_stream(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=1) as (rig, plugin):
        plugin.publish([a_device("x" * 4_194_288)])
        event = await rig.until_seen("disconnected")

        assert "code = ResourceExhausted" in event.text
        assert "received message larger than max (4194307 vs. 4194304)" in event.text
        assert 0 == rig.kubelet.allocatable(RESOURCE)


async def test_a_list_of_just_4_mib_is_taken(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=1) as (rig, plugin):
        plugin.publish([a_device("x" * 4_194_271), a_device("y")])

        await rig.until_listed(2)


async def test_the_plugins_own_word_on_health_outlives_its_stream(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=1) as (rig, plugin):
        plugin.script.responses = lambda _: [ContainerAllocateResponse()]
        await rig.admit(a_pod_object())
        plugin.end_streams()
        await rig.until_listed(0)
        assert {RESOURCE: {"g0": True}} == rig.kubelet.health("u1", "main")

        plugin.publish([a_device("g0", health="Unhealthy"), a_device("g1")])
        await plugin.register()
        await rig.until_listed(1)
        assert {RESOURCE: {"g0": False}} == rig.kubelet.health("u1", "main")

        plugin.publish([a_device("g1"), a_device("g2")])
        await rig.until_listed(2)
        assert {RESOURCE: {"g0": True}} == rig.kubelet.health("u1", "main"), "absent: Healthy"
