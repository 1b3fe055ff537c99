"""What the end of the stream does to the tables in time, and how long a list may be."""

import asyncio
import json

from agent.sandbox.kubelet.books import NodeResources
from tests.fakes.kubelet_rig import a_rig_with_plugin
from tests.fakes.plugin import RESOURCE, a_device

FILE = "kubelet_internal_checkpoint"


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


async def test_a_list_of_just_4_mib_is_taken(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=1) as (rig, plugin):
        plugin.publish([a_device("x" * 4_194_271), a_device("y")])

        await rig.until_listed(2)
