"""Allocate, GetPreferredAllocation, PreStartContainer and options, from an independent client."""

import asyncio

import pytest

from agent.errors import AgentError, KubeletError, Refusal, RefusalReason, StateCorrupt, StateError
from agent.kubelet.door import grpc_error
from tests.fakes.door import FakeDoor, a_door, a_group, a_list, a_plugin
from tests.fakes.grpc_messages import GrpcPlugin, message, refused
from tests.fakes.raw_h2 import a_raw_call, messages, prefixed
from tests.unit.core.allocation.refusals import PASSING

pytestmark = pytest.mark.looptime(False)

OURS = "allocate failed in the agent (ZeroDivisionError); its log has the trace"
FORWARDS = ["GPU-a-0", "GPU-a-1", "GPU-b-0"]


def counts(door: FakeDoor) -> dict[tuple[str, ...], int]:
    return dict(door.server.calls.items())


async def test_an_allocate_is_answered_with_everything_that_the_edits_hold(tmp_path):
    async with a_plugin(tmp_path) as (_, plugin):
        assert not (await asyncio.to_thread(plugin.options)).pre_start_required
        answer = await asyncio.to_thread(plugin.allocate, FORWARDS)

        (container,) = answer.container_responses
        assert {"EMPTY": "", "IDS": "GPU-a-0,GPU-a-1,GPU-b-0"} == dict(container.envs)
        assert [("/usr/local/vgpu", "/usr/local/vgpu/lock", False)] == [
            (m.container_path, m.host_path, m.read_only) for m in container.mounts
        ]
        assert [("/dev/nvidia0", "/dev/nvidia0", "rwm")] == [
            (d.container_path, d.host_path, d.permissions) for d in container.devices
        ]
        assert {"a": "b"} == dict(container.annotations)
        assert ["vendor.com/gpu=0"] == [cdi.name for cdi in container.cdi_devices]


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        (Refusal(RefusalReason.OVERLAP, "busy"), "UNAVAILABLE", "busy [HA-2009]"),
        (StateError("the disk is full"), "UNAVAILABLE", "the disk is full"),
        (
            Refusal(RefusalReason.NO_LOCK, "100 \u2192"),
            "FAILED_PRECONDITION",
            "100 \u2192 [HA-2005]",
        ),
        # A fault of ours tells the kubelet nothing, and is logged once.
        (ZeroDivisionError("secret detail"), "INTERNAL", OURS),
    ],
)
async def test_an_error_becomes_its_status_with_its_sentence(tmp_path, capsys, failure, code, text):
    async with a_plugin(tmp_path) as (door, plugin):
        door.allocator.failure = failure

        assert (code, text) == await refused(plugin.allocate, ["a"])
        assert 1 == counts(door)[("allocate", code)]
        logged = capsys.readouterr().out.count("plugin.call_failed")
        assert logged == int(code == "INTERNAL")


def test_every_error_has_the_status_that_its_kind_deserves():
    invalid = {RefusalReason.EMPTY_REQUEST, RefusalReason.MALFORMED_REQUEST}
    for gate in RefusalReason:
        error = grpc_error(Refusal(gate, "this is why"))
        usual = "UNAVAILABLE" if gate in PASSING else "FAILED_PRECONDITION"
        expected = "INVALID_ARGUMENT" if gate in invalid else usual
        assert (expected, f"this is why [{gate.value}]") == (error.status.name, error.message)
    for unwritable in (StateError("full"), StateCorrupt("torn")):
        assert "UNAVAILABLE" == grpc_error(unwritable).status.name
    for other in (AgentError("odd"), KubeletError("gone")):
        assert ("INTERNAL", str(other)) == (
            grpc_error(other).status.name,
            grpc_error(other).message,
        )


async def test_with_a_fence_the_kubelet_asks_before_each_start_and_only_a_mismatch_is_refused(
    tmp_path,
):
    def fence(ids: tuple[str, ...]) -> None:
        if ids == ("wrong",):
            raise Refusal(RefusalReason.OTHER_GPU_BOOKED, "The kubelet booked another GPU.")

    async with a_door(tmp_path, fence=fence) as door:
        door.allocator.open.clear()
        plugin = GrpcPlugin(door.path)
        options = await asyncio.to_thread(plugin.options)
        assert options.pre_start_required
        assert options.get_preferred_allocation_available

        async with asyncio.TaskGroup() as group:
            hanging = group.create_task(asyncio.to_thread(plugin.allocate, ["right"]))
            for _ in range(2):
                assert (
                    "FAILED_PRECONDITION",
                    "The kubelet booked another GPU. [HA-4006]",
                ) == await refused(plugin.pre_start, ["wrong"])
                await asyncio.to_thread(plugin.pre_start, ["right"])
            assert not hanging.done()
            door.allocator.open.set()

        assert 2 == counts(door)["prestart", "OK"]
        plugin.close()


# ListAndWatch as an independent gRPC client sees it: what is sent, when, and what is not.


LIST_AND_WATCH = "/v1beta1.DevicePlugin/ListAndWatch"
FIRST_WINDOW = 65_535


def health(answer) -> set[str]:
    return {device.health for device in answer.devices}


async def next_of(stream):
    return await asyncio.to_thread(next, stream)


@pytest.mark.parametrize("authority", ["localhost", "/var/lib/x.sock", "%2Fvar%2Flib%2Fx.sock"])
async def test_the_whole_list_comes_at_once_on_every_new_stream(tmp_path, authority):
    async with a_door(tmp_path) as door:
        plugin = GrpcPlugin(door.path, authority)
        streams = [plugin.lists() for _ in range(3)]

        answers = [await next_of(stream) for stream in streams]

        ids = [text for group in door.lists.value.groups for text in group.ids]
        for answer in answers:
            assert ids == [device.ID for device in answer.devices]
            assert {"Healthy"} == health(answer)
        assert 3 == door.server.streams.value
        plugin.close()


async def test_a_new_generation_with_the_same_slices_sends_nothing(tmp_path):
    async with a_plugin(tmp_path, a_list(1, a_group())) as (door, plugin):
        stream = plugin.lists()
        await next_of(stream)

        door.lists.set(a_list(2, a_group()))
        await asyncio.to_thread(plugin.options)  # the server had its turn
        door.lists.set(a_list(3, a_group(healthy=False)))

        assert {"Unhealthy"} == health(await next_of(stream))


async def test_a_peer_that_does_not_read_finds_only_the_newest_list_waiting(tmp_path):
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


async def test_a_long_list_arrives_whole(tmp_path):
    groups = tuple(a_group(gpu, slices=1_000, numa=gpu % 2) for gpu in range(16))
    async with a_plugin(tmp_path, a_list(1, *groups)) as (_, plugin):
        answer = await next_of(plugin.lists())

        assert [(text, group.numa) for group in groups for text in group.ids] == [
            (device.ID, device.topology.nodes[0].ID) for device in answer.devices
        ]


async def test_a_list_that_the_kubelet_would_not_take_is_not_sent(tmp_path):
    async with a_plugin(tmp_path, a_list(1, a_group(slices=1))) as (door, plugin):
        stream = plugin.lists()
        await next_of(stream)

        door.lists.set(a_list(2, a_group(slices=80_000)))
        await asyncio.to_thread(plugin.options)
        door.lists.set(a_list(3, a_group(slices=2)))

        assert 2 == len((await next_of(stream)).devices)
