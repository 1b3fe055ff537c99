"""Registration as kubelet ≤ 1.36 serves it, its traps included."""

import asyncio
import re

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.sandbox.kubelet.devices import is_extended_resource
from tests.fakes.kubelet_rig import a_pod_object, a_rig, a_rig_with_plugin
from tests.fakes.plugin import RESOURCE, ScriptedPlugin


async def refusal(plugin: ScriptedPlugin, **other: str) -> tuple[Status, str | None]:
    with pytest.raises(GRPCError) as caught:
        await plugin.register(**other)
    return caught.value.status, caught.value.message


@pytest.mark.parametrize(
    "name",
    [
        *("gpu", "/gpu", "a/", "a/b/c", "A/b", "requests.a.b/c", "a..b/c", "-a/b", "a/-b", "a/b_"),
        *("kubernetes.io/gpu", "x.kubernetes.io/g", "a/kubernetes.io/b"),
        "a" * 245 + "/b",
        "a/" + "b" * 64,
    ],
)
def test_names_that_no_plugin_may_register(name):
    assert not is_extended_resource(name)


@pytest.mark.parametrize(
    "name",
    ["vendor.com/gpu-1_x.y", "nvidia.com/gpu", "a/b", "a" * 244 + "/b", "a/" + "b" * 63, "a/B"],
)
def test_names_that_a_plugin_may_register(name):
    assert is_extended_resource(name)


async def test_the_dial_is_tried_again_after_about_a_second(tmp_path):
    loop = asyncio.get_running_loop()
    async with a_rig(tmp_path) as rig:
        plugin, started = ScriptedPlugin(rig.plugins), loop.time()

        async with asyncio.TaskGroup() as group:
            group.create_task(plugin.register())
            await asyncio.sleep(0.1)
            await plugin.serve()

        assert 1.0 == pytest.approx(loop.time() - started, abs=0.05)
        await plugin.die()


@pytest.mark.parametrize("endpoint", ["absent.sock", "", "x" * 200])
async def test_a_plugin_that_never_listens_fails_after_ten_seconds(tmp_path, endpoint):
    loop = asyncio.get_running_loop()
    async with a_rig(tmp_path) as rig:
        started = loop.time()

        found = await refusal(ScriptedPlugin(rig.plugins), endpoint=endpoint)

        text = "failed to dial device plugin: context deadline exceeded"
        assert (Status.UNKNOWN, text) == found
        assert 10.0 == pytest.approx(loop.time() - started, abs=0.05)


async def test_a_listener_that_never_speaks_counts_as_not_connected(tmp_path):
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with a_rig(tmp_path) as rig:
        mute = await asyncio.start_unix_server(say_nothing, rig.plugins / "mute.sock")
        async with mute:
            found = await refusal(ScriptedPlugin(rig.plugins), endpoint="mute.sock")

    assert (Status.UNKNOWN, "failed to dial device plugin: context deadline exceeded") == found


async def test_after_a_failed_register_again_the_end_of_the_stream_goes_unnoticed(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=2) as (rig, plugin):
        found = await refusal(plugin, endpoint="absent.sock")
        assert re.match("failed to dial", str(found[1]))

        plugin.end_streams()
        await rig.soon(plugin.streams_ended.wait())
        await asyncio.sleep(30)

        assert 2 == rig.kubelet.allocatable(RESOURCE)
        assert not rig.seen("disconnected")
        assert (await rig.admit(a_pod_object())).admitted, "its connection is still open"


async def test_the_end_of_a_stream_while_another_is_dialled_makes_everything_unhealthy(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=2) as (rig, plugin):
        new = ScriptedPlugin(rig.plugins, name="q.sock", count=3)
        async with asyncio.TaskGroup() as group:
            group.create_task(new.register())
            await asyncio.sleep(0.5)
            plugin.end_streams()
            await rig.until_listed(0)
            async with new:
                await rig.until_listed(3)

                new.end_streams()
                await rig.soon(new.streams_ended.wait())
                await asyncio.sleep(30)
                assert 3 == rig.kubelet.allocatable(RESOURCE), "nobody was current any more"


async def test_a_register_that_its_client_gives_up_leaves_nothing_behind(tmp_path):
    async with a_rig(tmp_path) as rig:
        plugin = ScriptedPlugin(rig.plugins)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await plugin.register()
        async with plugin:
            await asyncio.sleep(20)

            assert 0 == plugin.streams
            assert 0 == rig.kubelet.capacity(RESOURCE)
