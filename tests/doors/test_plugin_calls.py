"""Allocate, GetPreferredAllocation, PreStartContainer and options, from an independent client."""

import asyncio
from pathlib import Path

import grpc
import pytest

from agent.errors import AgentError, KubeletError, Refusal, RefusalReason, StateCorrupt, StateError
from agent.kubelet.door import grpc_error
from tests.fakes.door import FakeDoor, a_door, a_plugin
from tests.fakes.grpc_messages import GrpcPlugin

pytestmark = pytest.mark.looptime(False)

FORWARDS = ["GPU-a-0", "GPU-a-1", "GPU-b-0"]


async def refused(call, *arguments) -> tuple[str, str]:
    """Code and text of the status that the call ends in."""
    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.to_thread(call, *arguments)
    return caught.value.code().name, caught.value.details()


def counts(door: FakeDoor) -> dict[tuple[str, ...], int]:
    return dict(door.server.traffic.calls.items())


async def test_options_offer_preferences_and_nothing_before_a_start(tmp_path: Path):
    async with a_plugin(tmp_path) as (_, plugin):
        answers = [await asyncio.to_thread(plugin.options) for _ in range(2)]

        assert [True, True] == [a.get_preferred_allocation_available for a in answers]
        assert [False, False] == [a.pre_start_required for a in answers]


async def test_an_allocate_is_answered_with_everything_that_the_edits_hold(tmp_path: Path):
    async with a_plugin(tmp_path) as (_, plugin):
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


async def test_ids_in_any_order_and_asked_twice_get_the_same_answer(tmp_path: Path):
    async with a_plugin(tmp_path) as (door, plugin):
        answers = [
            await asyncio.to_thread(plugin.allocate, ids)
            for ids in (FORWARDS, FORWARDS, FORWARDS[::-1])
        ]

        assert answers[0] == answers[1] == answers[2]
        assert [tuple(FORWARDS)] * 2 + [tuple(FORWARDS[::-1])] == door.allocator.asked


async def test_several_containers_are_answered_in_order(tmp_path: Path):
    async with a_plugin(tmp_path) as (_, plugin):
        answer = await asyncio.to_thread(plugin.allocate, ["b"], ["a"], ["c", "d"])

        assert ["b", "a", "c,d"] == [c.envs["IDS"] for c in answer.container_responses]


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        (Refusal(RefusalReason.OVERLAP, "busy", transient=True), "UNAVAILABLE", "busy [HA-2009]"),
        (StateError("the disk is full"), "UNAVAILABLE", "the disk is full"),
        (
            Refusal(RefusalReason.NO_LOCK, "zu groß → 100 %"),
            "FAILED_PRECONDITION",
            "zu groß → 100 % [HA-2005]",
        ),
    ],
)
async def test_an_error_becomes_its_status_with_its_sentence(
    tmp_path: Path, failure: Exception, code: str, text: str
):
    async with a_door(tmp_path) as door:
        door.allocator.failure = failure
        plugin = GrpcPlugin(door.path)

        assert (code, text) == await refused(plugin.allocate, ["a"])
        assert 1 == counts(door)[("allocate", code)]
        plugin.close()


def test_every_error_has_the_status_that_its_kind_deserves():
    invalid = {RefusalReason.EMPTY_REQUEST, RefusalReason.MALFORMED_REQUEST}
    for gate in RefusalReason:
        for transient, usual in ((False, "FAILED_PRECONDITION"), (True, "UNAVAILABLE")):
            error = grpc_error(Refusal(gate, "this is why", transient=transient))
            expected = "INVALID_ARGUMENT" if gate in invalid else usual
            assert (expected, f"this is why [{gate.value}]") == (error.status.name, error.message)
    for unwritable in (StateError("full"), StateCorrupt("torn")):
        assert "UNAVAILABLE" == grpc_error(unwritable).status.name
    for other in (AgentError("odd"), KubeletError("gone")):
        assert ("INTERNAL", str(other)) == (
            grpc_error(other).status.name,
            grpc_error(other).message,
        )


async def test_a_fault_of_ours_is_internal_and_logged_once(tmp_path: Path, capsys):
    async with a_door(tmp_path) as door:
        door.allocator.failure = ZeroDivisionError("secret detail")
        plugin = GrpcPlugin(door.path)

        code, text = await refused(plugin.allocate, ["a"])

        assert "INTERNAL" == code
        assert "secret" not in text
        assert 1 == capsys.readouterr().out.count("plugin.call_failed")
        plugin.close()


async def test_while_an_allocate_waits_other_calls_go_on(tmp_path: Path):
    async with a_door(tmp_path) as door:
        door.allocator.open.clear()
        plugin = GrpcPlugin(door.path)

        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(asyncio.to_thread(plugin.allocate, ["a"]))
            await asyncio.to_thread(plugin.pre_start, ["a"])
            assert 1 == len((await asyncio.to_thread(next, plugin.lists())).devices) // 20
            assert not waiting.done()
            door.allocator.open.set()

        assert "a" == waiting.result().container_responses[0].envs["IDS"]
        plugin.close()


async def test_a_preference_is_passed_on(tmp_path: Path):
    async with a_plugin(tmp_path) as (_, plugin):
        assert ["c", "b"] == await asyncio.to_thread(plugin.prefer, ["a", "b", "c"], [], 2)


@pytest.mark.parametrize(
    ("available", "must_include", "size", "expected"),
    [
        (["c", "a", "b"], [], 2, ["a", "b"]),
        (["c", "a", "b"], ["c"], 2, ["c", "a"]),
        (["a"], [], 5, ["a"]),
        (["a", "b"], ["z"], 1, ["a"]),
        (["a", "b"], ["a", "b"], 1, ["a"]),
        (["a"], [], 0, []),
        (["a"], [], -3, []),
        ([], [], 1, []),
    ],
)
async def test_a_preference_that_fails_never_fails_the_call(
    tmp_path: Path, available: list[str], must_include: list[str], size: int, expected: list[str]
):
    async with a_door(tmp_path) as door:
        door.allocator.failure = Refusal(RefusalReason.NO_POD_ADMITTED, "nobody asks")
        plugin = GrpcPlugin(door.path)

        assert expected == await asyncio.to_thread(plugin.prefer, available, must_include, size)
        plugin.close()


async def test_a_preference_that_hangs_is_answered_all_the_same(tmp_path: Path):
    async with a_door(tmp_path) as door:
        door.allocator.open.clear()
        plugin = GrpcPlugin(door.path)

        assert ["a"] == await asyncio.to_thread(plugin.prefer, ["b", "a"], [], 1)
        plugin.close()


async def test_with_a_fence_the_kubelet_asks_before_each_start_and_only_a_mismatch_is_refused(
    tmp_path: Path,
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
