"""The gates that the world closes, not the decision; and that no gate is without a scene."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

import pytest

from agent.allocate.service import DISK_BUDGET
from agent.cluster import Phase
from agent.errors import ApiError, KubeletError, Refusal, RefusalReason, StateError
from agent.ledger import mismatch
from tests.builders import a_container, a_row
from tests.machine.sides import VirtualLoop, starved
from tests.services.allocation.allocating import G1, NEXT_EPOCH, Desk, a_desk, ids, placed
from tests.unit.core.allocation.refusals import PASSING, check_refusal
from tests.unit.core.allocation.test_matching_gates import DECIDED
from tests.unit.core.allocation.test_plain import REFUSED as PLAIN

POD = "team-a/train-1"
Scene = Callable[[], Awaitable[Refusal]]
DOOR = frozenset(
    {RefusalReason.MALFORMED_REQUEST, RefusalReason.EMPTY_REQUEST, RefusalReason.STOPPING}
)
"""Closed by the door itself: tests/doors/test_plugin_bad_input.py and test_plugin_server.py."""


SCENES: list[tuple[Scene, RefusalReason, str, str, str]] = []


def closes(gate: RefusalReason, wrong: str, todo: str, pod: str = "") -> Callable[[Scene], Scene]:
    """The scene closes that gate, which says what is wrong and what to do, of which pod."""

    def noted(scene: Scene) -> Scene:
        SCENES.append((scene, gate, wrong, todo, pod))
        return scene

    return noted


async def refused(call: Awaitable[object]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await call
    return caught.value


@contextlib.asynccontextmanager
async def a_bound_pod() -> AsyncIterator[Desk]:
    async with a_desk() as desk:
        desk.bind(placed(1))
        yield desk


@closes(RefusalReason.WITNESS_SILENT, "no such socket", "controller starts it again")
async def the_kubelet_is_silent() -> Refusal:
    async with a_bound_pod() as desk:
        desk.witness.failures = [KubeletError("no such socket")] * 3
        return await refused(desk.service.allocate(ids(1)))


@closes(
    RefusalReason.OUT_OF_TIME,
    "the node's disk did not say in time which pod this is",
    "ask the operator to check both",
)
async def the_kubelets_file_cannot_be_read() -> Refusal:
    async with a_bound_pod() as desk:
        desk.witness.supported = False  # then it reads the file
        desk.records.delay = DISK_BUDGET + 1
        return await refused(desk.service.allocate(ids(1)))


@closes(RefusalReason.STARVED, "too little CPU", "raise its CPU request")
async def the_agent_is_starved() -> Refusal:
    async def ask() -> Refusal:
        async with a_desk() as desk, starved(0.01):
            desk.silent = asyncio.Event()
            return await refused(desk.service.allocate(ids(1)))

    return await _alone(ask)


@closes(RefusalReason.STARVED, "too little CPU", "raise its CPU request")
async def the_agent_is_starved_at_the_kubelets_file() -> Refusal:
    async def ask() -> Refusal:
        async with a_bound_pod() as desk, starved(0.01):
            desk.witness.supported = False  # then it reads the file
            desk.records.delay = 1000.0
            return await refused(desk.service.allocate(ids(1)))

    return await _alone(ask)


async def _alone(ask: Callable[[], Coroutine[object, object, Refusal]]) -> Refusal:
    """On a loop of its own, which starves alone."""

    def run() -> Refusal:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(ask())

    return await asyncio.to_thread(run)


@closes(RefusalReason.PODS_UNKNOWN, "could not ask the API server", "controller starts it again")
async def the_api_server_is_away() -> Refusal:
    async with a_desk() as desk:
        desk.refresh_error = ApiError("connection refused")
        return await refused(desk.service.allocate(ids(1)))


@closes(RefusalReason.OVERLAP, "several containers at once", "asks again in a few seconds", "")
async def two_calls_overlap() -> Refusal:
    async with a_bound_pod() as desk:
        await desk.service.allocate(ids(1))
        desk.see(placed(1, phase=Phase.RUNNING))
        desk.epoch = NEXT_EPOCH
        other = placed(
            2, f"{G1},NVIDIA,500,5:{G1},NVIDIA,500,5:;", containers=(a_container(count=2),)
        )
        desk.hooks.gate.clear()
        async with asyncio.TaskGroup() as group:
            replay = group.create_task(refused(desk.service.allocate(ids(9))))
            await asyncio.sleep(0.01)
            desk.bind(other)
            group.create_task(desk.service.allocate(ids(5, 6)))
            await asyncio.sleep(0.01)
            desk.hooks.gate.set()
        return replay.result()


@closes(RefusalReason.STATE_UNWRITABLE, "ENOSPC", "ask the operator to check the node's disk")
async def the_disk_is_full() -> Refusal:
    async with a_bound_pod() as desk:
        desk.disk.faults.fail_at(0, errno.ENOSPC, times=50)
        return await refused(desk.service.allocate(ids(1)))


@closes(RefusalReason.HOST_DIRECTORY, "read-only", "hook path")
async def a_directory_cannot_be_made() -> Refusal:
    async with a_bound_pod() as desk:
        desk.hooks.failure = StateError("/usr/local/vgpu is read-only")
        return await refused(desk.service.allocate(ids(1)))


@closes(
    RefusalReason.NO_LIBRARY, "/usr/local/vgpu/libvgpu.so missing", "ask the operator to install it"
)
async def the_library_is_missing() -> Refusal:
    async with a_bound_pod() as desk:
        desk.hooks.missing = ("/usr/local/vgpu/libvgpu.so",)
        return await refused(desk.service.allocate(ids(1)))


@closes(RefusalReason.OTHER_GPU_BOOKED, "booked slices of", "create the pod again")
async def the_kubelet_booked_another_gpu() -> Refusal:
    return mismatch(a_row(slice_ids=ids(0, gpu=1), offered=True))


@pytest.mark.parametrize(("ask", "gate", "wrong", "todo", "pod"), SCENES)
async def test_the_gate_closes_and_says_what_is_wrong_and_what_to_do(ask, gate, wrong, todo, pod):
    check_refusal(await ask(), gate, wrong=wrong, todo=todo, pod=pod)


def test_each_gate_has_a_scene_that_closes_it():
    scenes = {row[1] for row in (*SCENES, *PLAIN.values())}
    assert set(RefusalReason) == DECIDED | DOOR | scenes


def test_what_the_runbook_calls_passing_are_gates():
    assert (
        {RefusalReason.WITNESS_SILENT, RefusalReason.OVERLAP, RefusalReason.STOPPING}
        < PASSING
        < set(RefusalReason)
    )


# Without HAMi-core on the node no limit would be kept: such an answer is none.


LIBRARY = "/usr/local/vgpu/libvgpu.so"


async def refused_without_library(asked):
    with pytest.raises(Refusal) as caught:
        await asked
    assert RefusalReason.NO_LIBRARY is caught.value.gate
    assert caught.value.transient
    return caught.value.sentence


@pytest.mark.parametrize("disabled", [False, True])
async def test_a_container_is_refused_with_what_is_missing_and_nothing_is_written(disabled):
    """Also one that wants no HAMi-core: its mounts would stand in the way of the installation."""
    async with a_desk() as desk:
        desk.bind(placed(1, containers=(a_container(control_disabled=disabled),)))
        desk.hooks.missing = (LIBRARY,)

        sentence = await refused_without_library(desk.service.allocate(ids(1)))

        assert LIBRARY in sentence
        assert "ask the operator to install it" in sentence
        assert ((), set()) == (desk.ledger.rows, desk.hooks.names)


async def test_a_container_that_was_answered_before_is_answered_again():
    async with a_desk() as desk:
        desk.bind(placed(1))
        first = await desk.service.allocate(ids(1))
        desk.lock(None)
        desk.epoch = NEXT_EPOCH
        desk.hooks.missing = (LIBRARY,)

        assert first == await desk.service.allocate(ids(1))
