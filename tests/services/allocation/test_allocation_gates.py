"""The gates that the world closes, not the decision; and that no gate is without a scene."""

import asyncio
import errno

import pytest
from structlog.testing import capture_logs

from agent.allocate.service import DISK_BUDGET, KUBELET_BUDGET
from agent.cluster import Phase
from agent.errors import ApiError, KubeletError, Refusal, RefusalReason, StateError
from agent.ledger import mismatch
from tests.builders import a_container, a_row
from tests.machine.sides import starved, virtual
from tests.services.allocation.allocating import G1, NEXT_EPOCH, a_desk, ids, placed
from tests.unit.core.allocation.refusals import check_refusal
from tests.unit.core.allocation.test_matching_gates import DECIDED
from tests.unit.core.allocation.test_plain import REFUSED as PLAIN

LIBRARY = "/usr/local/vgpu/libvgpu.so"
CHECK_BOTH = "ask the operator to check both"
CHECK_DISK = "ask the operator to check the node's disk"


def hang_records(desk) -> None:
    """The kubelet has no Get, and its checkpoint file cannot be read."""
    desk.witness.supported = False
    desk.records.delay = 1000.0


CLOSED = {
    "a silent kubelet": (
        lambda desk: setattr(desk.witness, "failures", [KubeletError("no such socket")] * 3),
        (RefusalReason.WITNESS_SILENT, "no such socket", "controller starts it again"),
        ("find-pod", False),
    ),
    "a kubelet that hangs": (
        lambda desk: setattr(desk.witness, "hung", True),
        (RefusalReason.OUT_OF_TIME, "which pod", CHECK_BOTH),
        ("find-pod", False),
    ),
    "its file hangs": (
        hang_records,
        (RefusalReason.OUT_OF_TIME, "disk did not say in time which pod this is", CHECK_BOTH),
        ("find-pod", False),
    ),
    "a full disk": (
        lambda desk: desk.disk.faults.fail_at(0, errno.ENOSPC, times=50),
        (RefusalReason.STATE_UNWRITABLE, "ENOSPC", CHECK_DISK),
        ("disk", True),
    ),
    "a disk that hangs": (
        lambda desk: desk.disk.gate.clear(),
        (RefusalReason.STATE_UNWRITABLE, "the disk has not answered", CHECK_DISK),
        ("disk", True),
    ),
    "no directory": (
        lambda desk: setattr(desk.hooks, "failure", StateError("/usr/local/vgpu is read-only")),
        (RefusalReason.HOST_DIRECTORY, "read-only", "hook path"),
        ("directory", True),
    ),
    "a directory that hangs": (
        lambda desk: desk.hooks.gate.clear(),
        (RefusalReason.HOST_DIRECTORY, "the disk has not answered", "hook path"),
        ("directory", True),
    ),
    "a hook path that hangs": (
        lambda desk: setattr(desk.hooks, "hanging", "facts"),
        (RefusalReason.HOST_DIRECTORY, "hook path", "hook path"),
        ("hook-path", False),
    ),
    "no library": (
        lambda desk: setattr(desk.hooks, "missing", (LIBRARY,)),
        (RefusalReason.NO_LIBRARY, f"{LIBRARY} missing", "ask the operator to install it"),
        ("find-pod", True),
    ),
}
"""What is wrong; gate, what is wrong and what to do in words; the step, and if the pod is known."""


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize(("break_it", "refusal", "logged"), CLOSED.values(), ids=CLOSED)
async def test_what_fails_or_hangs_is_named_and_what_to_do(break_it, refusal, logged, disabled):
    """Also for a container that wants no HAMi-core: its mounts would hinder an installation."""
    gate, wrong, todo = refusal
    async with a_desk() as desk:
        pod = desk.bind(placed(1, containers=(a_container(control_disabled=disabled),)))
        break_it(desk)
        began = asyncio.get_running_loop().time()
        with capture_logs() as logs, pytest.raises(Refusal) as caught:
            await desk.service.allocate(ids(1))
        took = asyncio.get_running_loop().time() - began
        desk.disk.gate.set()
        assert gate is not RefusalReason.NO_LIBRARY or set() == desk.hooks.names

    check_refusal(caught.value, gate, wrong=wrong, todo=todo)
    assert caught.value.transient
    assert {("refused", gate.name.lower()): 1} == desk.results
    assert [] == desk.said  # the pod's own status shows it
    (line,) = [entry for entry in logs if entry["event"] == "alloc.refused"]
    step, is_known = logged
    told = ("team-a", pod.name, "main") if is_known else (None, None, None)
    keys = ("gate", "step", "ns", "pod", "ctr")
    assert (gate.value, step, *told) == tuple(line.get(key) for key in keys)
    assert took <= KUBELET_BUDGET + DISK_BUDGET


@pytest.mark.parametrize("is_bound", [True, False], ids=["the kubelet's file", "the API server"])
def test_an_agent_that_is_starved_blames_nobody_else(is_bound):
    @virtual
    async def ask():
        async with a_desk() as desk, starved(0.01):
            desk.silent = asyncio.Event()
            if is_bound:
                desk.bind(placed(1))
                hang_records(desk)
            with pytest.raises(Refusal) as caught:
                await desk.service.allocate(ids(1))
        gate = RefusalReason.STARVED
        check_refusal(caught.value, gate, wrong="too little CPU", todo="raise its CPU request")

    ask()


async def test_without_an_api_server_nobody_knows_the_pod():
    async with a_desk() as desk:
        desk.refresh_error = ApiError("connection refused")
        with pytest.raises(Refusal) as caught:
            await desk.service.allocate(ids(1))
    check_refusal(
        caught.value,
        RefusalReason.PODS_UNKNOWN,
        wrong="could not ask the API server",
        todo="controller starts it again",
    )


async def test_of_two_calls_that_overlap_the_older_one_is_refused():
    async with a_desk() as desk:
        desk.bind(placed(1))
        await desk.service.allocate(ids(1))
        desk.see(placed(1, phase=Phase.RUNNING))
        desk.epoch = NEXT_EPOCH
        text = f"{G1},NVIDIA,500,5:{G1},NVIDIA,500,5:;"
        other = placed(2, text, containers=(a_container(count=2),))
        desk.hooks.gate.clear()
        async with asyncio.TaskGroup() as group:
            replay = group.create_task(_refused(desk.service.allocate(ids(9))))
            await asyncio.sleep(0.01)
            desk.bind(other)
            group.create_task(desk.service.allocate(ids(5, 6)))
            await asyncio.sleep(0.01)
            desk.hooks.gate.set()
    check_refusal(
        replay.result(),
        RefusalReason.OVERLAP,
        wrong="several containers at once",
        todo="asks again in a few seconds",
    )


async def _refused(call) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await call
    return caught.value


def test_a_row_of_another_gpu_is_a_refusal_of_its_start():
    check_refusal(
        mismatch(a_row(slice_ids=ids(0, gpu=1), offered=True)),
        RefusalReason.OTHER_GPU_BOOKED,
        wrong="booked slices of",
        todo="create the pod again",
    )


DOOR = {RefusalReason.MALFORMED_REQUEST, RefusalReason.EMPTY_REQUEST, RefusalReason.STOPPING}
"""Closed by the door itself: tests/doors/test_plugin_bad_input.py and test_plugin_server.py."""
ALONE = {
    RefusalReason.STARVED,
    RefusalReason.PODS_UNKNOWN,
    RefusalReason.OVERLAP,
    RefusalReason.OTHER_GPU_BOOKED,
}
"""Those with a test of their own above."""


def test_each_gate_has_a_scene_that_closes_it():
    scenes = {row[1] for row in PLAIN.values()} | {row[1][0] for row in CLOSED.values()}
    assert set(RefusalReason) == DECIDED | DOOR | ALONE | scenes
