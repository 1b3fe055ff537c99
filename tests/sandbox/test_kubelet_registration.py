"""Registration as kubelet ≤ 1.36 serves it, its traps included."""

import asyncio

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from tests.fakes.kubelet_rig import a_rig, a_rig_with_plugin
from tests.fakes.plugin import RESOURCE, ScriptedPlugin


async def refusal(plugin: ScriptedPlugin, **other: str) -> tuple[Status, str | None]:
    with pytest.raises(GRPCError) as caught:
        await plugin.register(**other)
    return caught.value.status, caught.value.message


async def test_a_listener_that_never_speaks_counts_as_not_connected(tmp_path):
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with a_rig(tmp_path) as rig:
        mute = await asyncio.start_unix_server(say_nothing, rig.plugins / "mute.sock")
        async with mute:
            found = await refusal(ScriptedPlugin(rig.plugins), endpoint="mute.sock")

    assert (Status.UNKNOWN, "failed to dial device plugin: context deadline exceeded") == found


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
