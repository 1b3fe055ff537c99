"""What a kubelet does to its directories when it starts, and leaves when it goes."""

import asyncio

import pytest
from grpclib.client import Channel

from agent.sandbox.kubelet.model import KubeletModel
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock
from tests.fakes.kubelet_rig import a_pod_object, a_rig, a_rig_with_plugin
from tests.fakes.plugin import RESOURCE


async def test_a_first_start_makes_both_directories(tmp_path):
    async with a_rig(tmp_path / "fresh") as rig:
        assert (rig.plugins / "kubelet.sock").is_socket()
        assert (rig.pod_resources / "kubelet.sock").is_socket()


async def test_an_exit_leaves_a_dead_socket_file(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        await rig.kubelet.stop()
        await rig.soon(plugin.streams_ended.wait())

        assert (rig.plugins / "kubelet.sock").is_socket()
        assert plugin.path.is_socket()
        with pytest.raises(ConnectionRefusedError):
            await plugin.register()


async def test_connections_break_when_the_kubelet_goes(tmp_path):
    async with a_rig(tmp_path) as rig:
        reader, writer = await asyncio.open_unix_connection(rig.pod_resources / "kubelet.sock")
        await reader.read(9)

        await rig.kubelet.kill()

        await rig.soon(reader.read())
        assert reader.at_eof()
        writer.close()
        await writer.wait_closed()


async def test_a_start_knows_resources_and_holds_from_the_checkpoint(tmp_path):
    async with a_rig_with_plugin(tmp_path, count=3) as (rig, _):
        await rig.admit(a_pod_object())
        held = rig.ids()

        await rig.kubelet.restart()

        assert held == rig.ids()
        tick = rig.kubelet.tick()
        assert ({RESOURCE: 0}, {RESOURCE: 0}) == (tick.capacity, tick.allocatable)
        await asyncio.sleep(299)
        assert not rig.kubelet.tick().removed, "the grace period starts anew"
        await asyncio.sleep(2)
        assert {RESOURCE} == rig.kubelet.tick().removed


async def test_a_directory_that_cannot_be_made_fails_the_start(tmp_path):
    (tmp_path / "file").touch()
    kubelet = KubeletModel(tmp_path / "file", tmp_path / "pr", ManualClock(), Seeded())

    with pytest.raises(ExceptionGroup) as caught:
        await kubelet.start()

    assert caught.group_contains(NotADirectoryError)
    assert not kubelet.is_up
    await kubelet.stop()


async def test_a_second_start_is_refused_and_a_second_stop_does_nothing(tmp_path):
    async with a_rig(tmp_path) as rig:
        with pytest.raises(RuntimeError, match="started already"):
            await rig.kubelet.start()
        await rig.kubelet.stop()
        await rig.kubelet.stop()

        assert not rig.kubelet.is_up
        assert 0 == rig.kubelet.capacity(RESOURCE) == rig.kubelet.allocatable(RESOURCE)
        assert {} == rig.ids()
        assert {} == rig.kubelet.tick().capacity


async def test_a_kubelet_that_is_killed_while_it_starts_does_not_come_up(tmp_path):
    kubelet = KubeletModel(tmp_path / "dp", tmp_path / "pr", ManualClock(), Seeded())
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(kubelet.start())
        await asyncio.sleep(0.1)
        await kubelet.kill()
        await starting

    assert not kubelet.is_up
    with pytest.raises(FileNotFoundError):
        async with Channel(path=str(tmp_path / "dp" / "kubelet.sock")) as channel:
            await channel.__connect__()
