"""The life of a server: bound before it says so, drained before it goes, nobody else's file."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from agent.errors import KubeletError, SettingsError
from agent.kit.cell import Cell
from agent.kubelet import door as door_module
from agent.kubelet.door import PluginServer
from tests.fakes.allocator import FakeAllocator
from tests.fakes.chance import Seeded
from tests.fakes.door import RESOURCE, FakeDoor, a_door, a_group, a_list, a_plugin
from tests.fakes.grpc_messages import GrpcPlugin
from tests.fakes.raw_h2 import a_raw_call, prefixed

pytestmark = pytest.mark.looptime(False)


async def an_open_allocate(
    door: FakeDoor, plugin: GrpcPlugin, group: asyncio.TaskGroup
) -> asyncio.Task[Any]:
    """An Allocate that the allocator answers when it is opened."""
    door.allocator.open.clear()
    allocate = group.create_task(asyncio.to_thread(plugin.allocate, ["a"]))
    while not door.allocator.asked:
        await asyncio.to_thread(plugin.options)
    return allocate


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


async def test_it_answers_by_the_time_that_it_has_an_endpoint(tmp_path: Path):
    async with a_plugin(tmp_path) as (door, plugin):
        assert (await asyncio.to_thread(plugin.options)).get_preferred_allocation_available
        assert 0o600 == door.path.stat().st_mode & 0o777


async def test_at_the_end_streams_end_well_and_the_socket_is_gone(tmp_path: Path):
    async with a_door(tmp_path) as door:
        plugin = GrpcPlugin(door.path)
        stream = plugin.lists()
        await asyncio.to_thread(next, stream)

    assert [] == await asyncio.to_thread(list, stream)
    assert grpc.StatusCode.OK == stream.code()
    assert set() == names(tmp_path)
    assert 0 == door.server.traffic.streams.value
    plugin.close()


async def test_an_allocate_in_flight_is_answered_and_new_ones_are_refused(tmp_path: Path):
    async with a_plugin(tmp_path) as (door, plugin), asyncio.TaskGroup() as group:
        before = await an_open_allocate(door, plugin, group)

        rebinding = group.create_task(door.server.rebind())
        await asyncio.sleep(0)
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(plugin.allocate, ["b"])
        assert not rebinding.done()
        door.allocator.open.set()

        assert "a" == (await before).container_responses[0].envs["IDS"]
        assert grpc.StatusCode.UNAVAILABLE == caught.value.code()
        assert caught.value.details().endswith("[HA-5004]")
        await rebinding


async def test_an_agent_that_ends_during_a_rebind_waits_for_the_open_allocate(tmp_path: Path):
    async with a_plugin(tmp_path) as (door, plugin), asyncio.TaskGroup() as group:
        before = await an_open_allocate(door, plugin, group)
        rebinding = group.create_task(door.server.rebind())
        await asyncio.sleep(0)
        with pytest.raises(grpc.RpcError):  # it drains
            await asyncio.to_thread(plugin.allocate, ["b"])

        rebinding.cancel()
        ending = group.create_task(door.end())
        await asyncio.wait((rebinding,))
        await asyncio.to_thread(plugin.options)
        assert not ending.done()
        door.allocator.open.set()

        assert "a" == (await before).container_responses[0].envs["IDS"]
        await ending


class ServedKubelet:
    """The kubelet's one connection, with its list stream open."""

    def __init__(self, door: FakeDoor) -> None:
        self.plugin = GrpcPlugin(door.path)
        self.stream = self.plugin.lists()

    async def __aenter__(self) -> GrpcPlugin:
        await asyncio.to_thread(next, self.stream)
        return self.plugin

    async def __aexit__(self, *_: object) -> None:
        assert [] == await asyncio.to_thread(list, self.stream)
        assert grpc.StatusCode.OK == self.stream.code()
        self.plugin.close()


def ask_for_ever(plugin: GrpcPlugin) -> None:
    while True:
        plugin.allocate(["a"])


async def test_an_admission_that_is_under_way_is_served_to_its_end(tmp_path: Path):
    async with asyncio.TaskGroup() as group:
        async with a_door(tmp_path) as door, ServedKubelet(door) as plugin:
            door.allocator.open.clear()
            asked = group.create_task(asyncio.to_thread(plugin.prefer, ["a", "b"], [], 1))
            while not door.allocator.preferring:
                await asyncio.to_thread(plugin.options)

            ending = group.create_task(door.end())
            await asyncio.to_thread(plugin.options)
            assert not ending.done()
            door.allocator.open.set()

            assert ["b"] == await asked
            for container in ("b", "a"):  # the next container of the pod comes at once, too
                answer = await asyncio.to_thread(plugin.allocate, [container])
                assert container == answer.container_responses[0].envs["IDS"]
                await asyncio.to_thread(plugin.prefer, ["a"], [], 1)
            answer = await asyncio.to_thread(plugin.allocate, ["a"])
            assert "a" == answer.container_responses[0].envs["IDS"]
            await ending
        assert set() == names(tmp_path)


async def test_a_kubelet_that_goes_on_asking_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(door_module, "LAST_CALLS", 0.2)
    async with (
        asyncio.TaskGroup() as group,
        a_door(tmp_path) as door,
        ServedKubelet(door) as plugin,
    ):
        await asyncio.to_thread(plugin.allocate, ["a"])
        ending = group.create_task(door.end())
        with pytest.raises(grpc.RpcError):
            await asyncio.to_thread(ask_for_ever, plugin)
        await ending


async def test_a_call_that_outlasts_the_wait_for_the_last_ones_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Python 3.11.2, which is Debian 12's, cut it off: see PluginServer.run."""
    monkeypatch.setattr(door_module, "LAST_CALLS", 0.0)
    async with (
        asyncio.TaskGroup() as group,
        a_door(tmp_path) as door,
        ServedKubelet(door) as plugin,
    ):
        before = await an_open_allocate(door, plugin, group)

        ending = group.create_task(door.end())
        await asyncio.to_thread(plugin.options)
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.to_thread(plugin.allocate, ["b"])
        door.allocator.open.set()

        assert "a" == (await before).container_responses[0].envs["IDS"]
        assert caught.value.details().endswith("[HA-5004]")
        await ending


async def test_a_rebind_serves_on_a_new_name_and_ends_the_old_streams(tmp_path: Path):
    async with a_door(tmp_path) as door:
        old = door.path
        plugin = GrpcPlugin(old)
        stream = plugin.lists()
        await asyncio.to_thread(next, stream)

        await door.server.rebind()

        assert [] == await asyncio.to_thread(list, stream)
        assert {door.path.name} == names(tmp_path)
        assert old != door.path
        plugin.close()


async def test_an_allocate_by_a_former_name_is_refused_although_a_preference_came_before(
    tmp_path: Path,
):
    """The kubelet books the former name; the row would get the new one."""
    async with a_door(tmp_path) as door, asyncio.TaskGroup() as group:
        async with ServedKubelet(door) as plugin:
            assert ["b"] == await asyncio.to_thread(plugin.prefer, ["a", "b"], [], 1)
            door.resource.set("example.com/vgpu")
            rebinding = group.create_task(door.server.rebind())
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(plugin.allocate, ["b"])
            assert grpc.StatusCode.UNAVAILABLE == caught.value.code()
            assert caught.value.details().endswith("[HA-5004]")
            assert [] == door.allocator.asked
        await rebinding

        renamed = GrpcPlugin(door.path)
        answer = await asyncio.to_thread(renamed.allocate, ["b"])
        assert "b" == answer.container_responses[0].envs["IDS"]
        renamed.close()


async def test_a_new_server_lists_what_is_newest(tmp_path: Path):
    async with a_door(tmp_path, a_list(1, a_group(slices=1))) as door:
        door.lists.set(a_list(2, a_group(slices=2)))
        await door.server.rebind()
        door.lists.set(a_list(3, a_group(slices=3)))
        plugin = GrpcPlugin(door.path)

        seen = 0
        stream = plugin.lists()
        while seen != 3:
            seen = len((await asyncio.to_thread(next, stream)).devices)
        plugin.close()


async def test_a_peer_that_neither_reads_nor_leaves_does_not_hold_up_the_end(tmp_path: Path):
    listed = a_list(1, a_group(slices=5_000))
    async with a_door(tmp_path, listed) as door, a_raw_call(door.path) as call:
        await call.request("/v1beta1.DevicePlugin/ListAndWatch", prefixed(b""))
        while len(call.body) < 65_535:
            await call.read(acknowledge=False)

        await door.server.rebind()

        await call.until_ended()
        assert {door.path.name} == names(tmp_path)
        async with asyncio.timeout(30):
            await door.server.traffic.streams.until(lambda count: count == 0)


async def test_only_its_own_file_is_deleted_at_the_end(tmp_path: Path):
    async with a_door(tmp_path, seed=1) as neighbour:
        async with a_door(tmp_path, seed=2) as door:
            door.path.unlink()
            stolen = door.path
            stolen.write_text("not a socket of ours")

        assert {neighbour.path.name, stolen.name} == names(tmp_path)
        plugin = GrpcPlugin(neighbour.path)
        assert await asyncio.to_thread(plugin.options)
        plugin.close()


async def test_dead_sockets_of_ours_are_cleared_away_and_no_others(tmp_path: Path):
    kept = ["kubelet.sock", "nvidia-gpu.sock", "hami-gpu.sock", "hami-gpumem-00000001.sock"]
    for name in [*kept, "hami-gpu-0badcafe.sock"]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(str(tmp_path / name))
    (tmp_path / "hami-gpu-0000beef.sock").write_text("not a socket")
    kept.append("hami-gpu-0000beef.sock")

    async with a_door(tmp_path, seed=1) as live, a_door(tmp_path, seed=2) as door:
        assert {*kept, live.path.name, door.path.name} == names(tmp_path)


async def test_without_a_directory_nothing_serves_until_there_is_one(tmp_path: Path):
    directory = tmp_path / "device-plugins"
    server = PluginServer(directory, Cell(RESOURCE), Cell(a_list()), FakeAllocator(), Seeded())

    with pytest.raises(KubeletError, match="is not there"):
        await server.rebind()
    assert "" == server.endpoint
    directory.mkdir()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(server.run())
        await server.rebind()
        assert {server.endpoint} == names(directory)
        running.cancel()

    assert set() == names(directory)
    with pytest.raises(KubeletError, match="stopping"):
        await server.rebind()


async def test_the_path_of_a_long_resource_fits_into_a_socket_address(tmp_path: Path):
    directory = tmp_path / ("d" * (107 - len(f"{tmp_path}//hami-g-01234567.sock")))
    directory.mkdir()
    server = PluginServer(
        directory, Cell("vendor.com/" + "g" * 63), Cell(a_list()), FakeAllocator(), Seeded()
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(server.run())
        await server.rebind()
        assert 107 == len(str(directory / server.endpoint))
        running.cancel()


async def test_a_directory_with_too_long_a_path_is_named(tmp_path: Path):
    directory = tmp_path / ("d" * 107)
    directory.mkdir()
    server = PluginServer(directory, Cell(RESOURCE), Cell(a_list()), FakeAllocator(), Seeded())

    with pytest.raises(SettingsError, match="too long for a socket path of 107 bytes"):
        await server.rebind()
