"""How the kubelet chooses ids, in which order it refuses, and what it asks of the plugin."""

import asyncio
import json
from itertools import pairwise

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from agent.sandbox.kubelet.allocation import NodeResources
from agent.sandbox.kubelet.endpoint import dial, go_text
from agent.wire.v1 import ListPodResourcesRequest
from agent.wire.v1beta1 import DevicePluginOptions, ListAndWatchResponse
from tests.fakes.kubelet_rig import a_container_object, a_pod_object, a_rig, a_rig_with_plugin
from tests.fakes.plugin import RESOURCE, ScriptedPlugin, a_device, devices


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


# The kubelet's connection to a plugin when the plugin, or the way to it, is broken.


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GRPCError(Status.CANCELLED, "x"), "rpc error: code = Canceled desc = x"),
        (GRPCError(Status.DATA_LOSS, None), "rpc error: code = DataLoss desc = "),
        (GRPCError(Status.OUT_OF_RANGE, "é"), "rpc error: code = OutOfRange desc = é"),
        (
            ConnectionRefusedError("refused"),
            'rpc error: code = Unavailable desc = connection error: desc = "refused"',
        ),
        (
            StreamTerminatedError("gone"),
            "rpc error: code = Unavailable desc = error reading from server: EOF",
        ),
    ],
)
def test_errors_read_as_go_prints_them(error, expected):
    assert expected == go_text(error)


class Garbled(ListAndWatchResponse):
    """A list whose bytes are no UTF-8."""

    def SerializeToString(self) -> bytes:  # noqa: N802 -- protobuf's name
        return b"\x0a\x04\x0a\x02\xff\xfe"


async def test_a_list_that_is_no_utf_8_ends_the_stream(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        plugin.send(Garbled())

        event = await rig.until_seen("disconnected")
        assert "code = Internal desc = grpc: failed to unmarshal" in event.text
        assert 4 == rig.kubelet.capacity(RESOURCE)


async def test_a_server_that_hangs_up_before_it_speaks_is_dialled_again(tmp_path):
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        dialled.append(asyncio.get_running_loop().time())

    dialled: list[float] = []
    plugin = ScriptedPlugin(tmp_path)
    rude = await asyncio.start_unix_server(hang_up, plugin.path)
    async with asyncio.TaskGroup() as group:
        dialling = group.create_task(dial(plugin.path))
        await asyncio.sleep(2)
        rude.close()
        await plugin.serve()

    assert [1.0] == [pytest.approx(b - a, abs=0.05) for a, b in pairwise(dialled)]
    dialling.result().close()
    await plugin.die()


async def test_a_pre_start_is_given_up_after_thirty_seconds(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        plugin.script.options = DevicePluginOptions(pre_start_required=True)
        plugin.script.pre_start_gate = asyncio.Event()
        await plugin.register()
        await rig.admit(a_pod_object())
        admitted = rig.seen("admitted")[0]

        waiting = await rig.until_seen("container_waiting")

        assert "code = DeadlineExceeded desc = " in waiting.text
        # the header carries whole seconds: a server that honours it gives up first
        assert 28.9 < waiting.elapsed - admitted.elapsed < 30.1


@pytest.mark.parametrize("prefers", [True, False])
async def test_a_stopped_endpoint_whose_ids_an_old_stream_revives_gives_nothing(tmp_path, prefers):
    async with (
        a_rig_with_plugin(tmp_path) as (rig, old),
        ScriptedPlugin(rig.plugins, name="new.sock") as new,
    ):
        new.script.options = DevicePluginOptions(get_preferred_allocation_available=prefers)
        await new.register()
        await rig.until_seen("listed", 2)
        new.end_streams()
        await rig.until_listed(0)
        old.publish(devices(3))
        await rig.until_listed(3)

        verdict = await rig.admit(a_pod_object())

        stopped = f"endpoint {RESOURCE} has been stopped"
        prefix = "device plugin GetPreferredAllocation rpc failed with err: " if prefers else ""
        text = f"Allocate failed due to {prefix}{stopped}, which is unexpected"
        assert f"Pod was rejected: {text}" == verdict.message


async def test_two_registers_and_the_end_of_both_streams_leave_the_kubelet_up(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, plugin):
        for _ in range(5):
            async with asyncio.TaskGroup() as group:
                group.create_task(plugin.register())
                group.create_task(plugin.register())
                plugin.end_streams()
        plugin.end_streams()
        await asyncio.sleep(5)
        assert rig.kubelet.is_up

        await plugin.register()
        await rig.until_listed(4)


# What the end of the stream does to the tables in time, and how long a list may be.

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


# PodResources as the agent meets it: the witness of an admission, and its rate limit.


async def test_the_rate_limit_is_a_burst_of_ten_then_a_hundred_a_second(tmp_path):
    async with a_rig_with_plugin(tmp_path) as (rig, _), rig.witness() as witness:
        answers: list[object] = []

        async def ask(times: int) -> int:
            answers.clear()
            for _ in range(times):
                try:
                    answers.append(await witness.list(ListPodResourcesRequest()))
                except GRPCError as error:
                    answers.append((error.status, error.message))
            return times - answers.count(refused)

        refused = (Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
        assert 10 == await ask(30)
        await asyncio.sleep(0.0501)
        assert 5 == await ask(30)
        await asyncio.sleep(10)
        assert 10 == await ask(30)
        assert [refused] * 20 == answers[10:]


# Registration as kubelet ≤ 1.36 serves it, its traps included.


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
