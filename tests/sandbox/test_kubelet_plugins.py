"""What the kubelet model says of errors, how long it waits, and how often it may be asked."""

import asyncio

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from agent.sandbox.kubelet.endpoint import go_text
from agent.wire.v1 import ListPodResourcesRequest
from agent.wire.v1beta1 import DevicePluginOptions
from tests.fakes.kubelet_rig import a_pod_object, a_rig_with_plugin

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
