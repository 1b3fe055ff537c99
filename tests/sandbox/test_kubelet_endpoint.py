"""The kubelet's connection to a plugin when the plugin, or the way to it, is broken."""

import asyncio
from itertools import pairwise

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from agent.sandbox.kubelet.endpoint import dial, go_text
from agent.wire.v1beta1 import DevicePluginOptions, ListAndWatchResponse
from tests.fakes.kubelet_rig import a_pod_object, a_rig_with_plugin
from tests.fakes.plugin import RESOURCE, ScriptedPlugin, devices


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
