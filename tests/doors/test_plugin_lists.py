"""ListAndWatch as an independent gRPC client sees it: what is sent, when, and what is not."""

import asyncio
from pathlib import Path

import pytest

from agent.model import SliceList
from tests.fakes.door import a_door, a_group, a_list, a_plugin
from tests.fakes.grpc_messages import GrpcPlugin, message
from tests.fakes.raw_h2 import a_raw_call, messages, prefixed

pytestmark = pytest.mark.looptime(False)

LIST_AND_WATCH = "/v1beta1.DevicePlugin/ListAndWatch"
FIRST_WINDOW = 65_535


def health(answer) -> set[str]:
    return {device.health for device in answer.devices}


async def next_of(stream):
    return await asyncio.to_thread(next, stream)


@pytest.mark.parametrize("authority", ["localhost", "/var/lib/x.sock", "%2Fvar%2Flib%2Fx.sock"])
async def test_the_whole_list_comes_at_once_on_every_new_stream(tmp_path: Path, authority: str):
    async with a_door(tmp_path) as door:
        plugin = GrpcPlugin(door.path, authority)
        streams = [plugin.lists() for _ in range(3)]

        answers = [await next_of(stream) for stream in streams]

        ids = [text for group in door.lists.value.groups for text in group.ids]
        for answer in answers:
            assert ids == [device.ID for device in answer.devices]
            assert {"Healthy"} == health(answer)
        assert 3 == door.server.traffic.streams.value
        plugin.close()


async def test_a_change_of_health_reaches_every_stream(tmp_path: Path):
    async with a_plugin(tmp_path, a_list(1, a_group())) as (door, plugin):
        streams = [plugin.lists(), plugin.lists()]
        for stream in streams:
            await next_of(stream)

        door.lists.set(a_list(2, a_group(healthy=False)))

        assert [{"Unhealthy"}] * 2 == [health(await next_of(stream)) for stream in streams]


async def test_numa_node_0_is_sent_and_an_unknown_one_is_left_out(tmp_path: Path):
    groups = (a_group(0, slices=1, numa=0), a_group(1, slices=1, numa=None))
    async with a_plugin(tmp_path, a_list(1, *groups, a_group(2, slices=1, numa=-1))) as (_, plugin):
        zero, unknown, minus_one = (await next_of(plugin.lists())).devices

        assert [0] == [node.ID for node in zero.topology.nodes]
        assert not unknown.HasField("topology")
        assert not minus_one.HasField("topology")


async def test_a_new_generation_with_the_same_slices_sends_nothing(tmp_path: Path):
    async with a_plugin(tmp_path, a_list(1, a_group())) as (door, plugin):
        stream = plugin.lists()
        await next_of(stream)

        door.lists.set(a_list(2, a_group()))
        await asyncio.to_thread(plugin.options)  # the server had its turn
        door.lists.set(a_list(3, a_group(healthy=False)))

        assert {"Unhealthy"} == health(await next_of(stream))


async def test_of_a_burst_the_last_state_is_delivered(tmp_path: Path):
    async with a_plugin(tmp_path, a_list(1, a_group(slices=1))) as (door, plugin):
        stream = plugin.lists()
        await next_of(stream)

        for count in range(2, 9):
            door.lists.set(a_list(count, a_group(slices=count)))

        assert 8 == len((await next_of(stream)).devices)


async def test_a_peer_that_does_not_read_finds_only_the_newest_list_waiting(tmp_path: Path):
    async with (
        a_door(tmp_path, a_list(1, a_group(slices=2_000))) as door,
        a_raw_call(door.path) as call,
    ):
        await call.request(LIST_AND_WATCH, prefixed(b""))
        while len(call.body) < FIRST_WINDOW:
            await call.read(acknowledge=False)
        plugin = GrpcPlugin(door.path)

        for generation in range(2, 10):
            door.lists.set(a_list(generation, a_group(slices=2_000, numa=generation)))
            await asyncio.to_thread(plugin.options)  # the server had its turn
        await call.open_windows(1_000_000)
        while len(messages(call.body)) < 2:
            await call.read(acknowledge=False)

        lists = [message("ListAndWatchResponse").FromString(m) for _, m in messages(call.body)]
        assert [0, 9] == [answer.devices[0].topology.nodes[0].ID for answer in lists]
        assert FIRST_WINDOW < len(messages(call.body)[0][1])
        plugin.close()


@pytest.mark.parametrize("count", [1_600, 16_000])
async def test_a_long_list_arrives_whole(tmp_path: Path, count: int):
    groups = tuple(a_group(gpu, slices=count // 16, numa=gpu % 2) for gpu in range(16))
    async with a_plugin(tmp_path, a_list(1, *groups)) as (_, plugin):
        answer = await next_of(plugin.lists())

        assert [(text, group.numa) for group in groups for text in group.ids] == [
            (device.ID, device.topology.nodes[0].ID) for device in answer.devices
        ]


async def test_a_list_that_the_kubelet_would_not_take_is_not_sent(tmp_path: Path):
    async with a_plugin(tmp_path, a_list(1, a_group(slices=1))) as (door, plugin):
        stream = plugin.lists()
        await next_of(stream)

        door.lists.set(a_list(2, a_group(slices=80_000)))
        await asyncio.to_thread(plugin.options)
        door.lists.set(a_list(3, a_group(slices=2)))

        assert 2 == len((await next_of(stream)).devices)


async def test_an_empty_list_is_sent_as_one(tmp_path: Path):
    async with a_plugin(tmp_path, SliceList(1)) as (_, plugin):
        assert 0 == len((await next_of(plugin.lists())).devices)


async def test_a_stream_that_the_peer_ends_is_no_longer_counted(tmp_path: Path):
    async with a_plugin(tmp_path) as (door, plugin):
        stream = plugin.lists()
        await next_of(stream)

        stream.cancel()

        async with asyncio.timeout(30):
            await door.server.traffic.streams.until(lambda count: count == 0)


async def test_lists_are_not_compressed_for_a_peer_that_takes_gzip(tmp_path: Path):
    async with a_door(tmp_path) as door, a_raw_call(door.path) as call:
        await call.request(LIST_AND_WATCH, prefixed(b""))
        while not messages(call.body):
            await call.read()

        assert [0] == [flag for flag, _ in messages(call.body)]
        assert "grpc-encoding" not in call.headers
