"""When GetPreferredAllocation is called, with what, and what becomes of its answer."""

from contextlib import asynccontextmanager

from agent.wire.v1beta1 import DevicePluginOptions
from tests.fakes.kubelet_rig import a_container_object, a_pod_object, a_rig
from tests.fakes.plugin import ScriptedPlugin

OFFERED = DevicePluginOptions(get_preferred_allocation_available=True)


@asynccontextmanager
async def a_rig_that_prefers(root, prefer, *, count=6):
    async with a_rig(root) as rig, ScriptedPlugin(rig.plugins, count=count) as plugin:
        plugin.script.options = OFFERED
        plugin.script.prefer = prefer
        await plugin.register()
        await rig.until_listed(count)
        yield rig, plugin


async def test_the_answer_is_what_allocate_then_names(tmp_path):
    async with a_rig_that_prefers(tmp_path, lambda *_: ["g5", "g2"]) as (rig, plugin):
        await rig.admit(a_pod_object(count=2))

        ((available, must_include, size),) = plugin.preferred
        assert {f"g{n}" for n in range(6)} == set(available)
        assert ([], 2) == (must_include, size)
        assert {"g5", "g2"} == set(plugin.allocated[0])


async def test_it_is_called_even_when_all_that_is_left_is_needed(tmp_path):
    async with a_rig_that_prefers(tmp_path, lambda *_: []) as (rig, plugin):
        await rig.admit(a_pod_object(count=6))

        assert 1 == len(plugin.preferred)


async def test_what_a_sidecar_holds_is_not_given_again(tmp_path):
    pod = a_pod_object(
        inits=[a_container_object("side", sidecar=True), a_container_object("init")],
        containers=[a_container_object("a1"), a_container_object("a2")],
    )
    async with a_rig_that_prefers(tmp_path, lambda ids, *_: [min(ids)]) as (rig, plugin):
        await rig.admit(pod)

        assert [["g0"], ["g1"], ["g1"], ["g2"]] == plugin.allocated
