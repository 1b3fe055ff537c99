"""How the kubelet chooses ids, in which order it refuses, and what it asks of the plugin."""

import asyncio

from tests.fakes.kubelet_rig import a_container_object, a_pod_object, a_rig_with_plugin
from tests.fakes.plugin import RESOURCE, ScriptedPlugin, answer


def failed(text: str) -> str:
    return f"Pod was rejected: Allocate failed due to {text}, which is unexpected"


async def test_two_resources_are_asked_in_random_order(tmp_path):
    both = a_container_object()
    both["resources"]["limits"]["b.c/d"] = "1"
    async with (
        a_rig_with_plugin(tmp_path, count=40) as (rig, ours),
        ScriptedPlugin(rig.plugins, resource="b.c/d", name="o.sock", count=40) as other,
    ):
        await other.register()
        await rig.until_listed(40, "b.c/d")
        for number in range(30):
            await rig.admit(a_pod_object(f"u{number}", containers=[both]))

        order = [event.resource for event in rig.seen("allocating")]
        assert {RESOURCE, "b.c/d"} == set(order[::2])
        assert [30, 30] == [len(ours.allocated), len(other.allocated)]


async def test_ids_come_in_random_order(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=8) as (rig, plugin):
        await rig.admit(a_pod_object(count=8))

        assert sorted(plugin.allocated[0]) != plugin.allocated[0]


async def test_a_resource_held_but_removed_is_unregistered(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.admit(a_pod_object("u1"))
        plugin.end_streams()
        await rig.until_listed(0)
        await asyncio.sleep(301)
        rig.kubelet.tick()

        verdict = await rig.admit(a_pod_object("u2"))

        assert failed(f"cannot allocate unregistered device {RESOURCE}") == verdict.message


async def test_the_second_resources_refusal_voids_the_first_ones_answer(tmp_path):
    pod = a_pod_object(containers=[a_container_object(name) for name in "abc"])
    async with a_rig_with_plugin(tmp_path, count=3) as (rig, plugin):
        plugin.script.responses = lambda ids: [] if len(plugin.allocated) == 2 else [answer(ids)]

        assert not (await rig.admit(pod)).admitted

        assert 2 == len(plugin.allocated), "the third container is not asked"
        assert {("u1", "a")} == rig.ids().keys(), "stays until the next allocation"
