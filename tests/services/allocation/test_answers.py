"""Durable before answered, one pod per call; who was answered before gets the same bytes again."""

import asyncio

import msgspec
import pytest

from agent.cluster import Phase
from agent.errors import Refusal, RefusalReason
from agent.ledger import KubeletEpoch
from agent.reconcile import Adoption
from agent.state import CURRENT
from tests.builders import a_container
from tests.services.allocation.allocating import G1, G2, NEXT_EPOCH, a_desk, ids, placed


async def outcome(desk, *numbers):
    """What the kubelet gets for these ids: edits, or the gate that closed."""
    try:
        return await desk.service.allocate(ids(*numbers))
    except Refusal as refusal:
        return refusal.gate


@pytest.mark.parametrize(
    ("is_bound_then", "gate"),
    [(False, RefusalReason.NO_POD_ADMITTED), (True, RefusalReason.MEMORY_EXCEEDED)],
    ids=["it is no candidate for the next call", "it takes room already"],
)
async def test_until_a_row_is_on_disk_there_is_no_answer_and_its_pod_counts(is_bound_then, gate):
    text = f"{G1},NVIDIA,60000,10:;"
    async with a_desk() as desk:
        pod = desk.bind(placed(1, text))
        desk.disk.gate.clear()
        async with asyncio.TaskGroup() as group:
            answering = group.create_task(outcome(desk, 4))
            await asyncio.sleep(0.01)
            if is_bound_then:
                desk.bind(placed(2, text))
            assert gate is await outcome(desk, 5)
            assert (False, ()) == (answering.done(), desk.ledger.rows)
            # An Event on the Node tells a refusal that no pod can show.
            told = [] if is_bound_then else [("AllocationRefused", True, "")]
            assert told == [(one.reason, one.warning, one.pod) for one in desk.said]
            desk.disk.gate.set()

        assert [pod.uid] == [row.key.pod_uid for row in desk.ledger.rows]
        assert RefusalReason.OVERLAP is answering.result()


@pytest.mark.parametrize(
    "asked",
    [
        (f"{G1}-0", f"{G1}-0"),
        (f"{G2}-1", f"{G2}-2"),
        ("GPU-elsewhere-7", "no slice"),
        ("MIG-unknown", ""),
        (f"{G1}-99999999999999999999", f"{G1}--1"),
    ],
    ids=["twice the same, and held", "of another GPU", "unknown", "MIG and empty", "no numbers"],
)
async def test_odd_ids_are_only_counted_and_a_refusal_writes_nothing(asked):
    text = f"{G2},NVIDIA,100,1:{G1},NVIDIA,200,2:;"
    async with a_desk() as desk:
        desk.bind(placed(1))
        await desk.service.allocate(ids(0))
        desk.bind(placed(2, text, containers=(a_container(count=3),)))
        before = desk.ledger, dict(desk.hooks.made), await desk.disk.content(CURRENT)
        with pytest.raises(Refusal):
            await desk.service.allocate(asked)
        assert before == (desk.ledger, desk.hooks.made, await desk.disk.content(CURRENT))

        desk.bind(placed(2, text, containers=(a_container(count=2),)))
        envs = dict((await desk.service.allocate(asked)).envs)

        assert (f"{G1},{G2}", "200m") == (
            envs["NVIDIA_VISIBLE_DEVICES"],
            envs["CUDA_DEVICE_MEMORY_LIMIT_0"],
        )
        assert tuple(sorted(asked)) == desk.ledger.rows[-1].slice_ids


async def test_an_adopted_row_without_ids_is_answered_with_when_the_kubelet_asks():
    async with a_desk() as desk:
        pod = placed(1, phase=Phase.RUNNING)
        row = await desk.service.adopt(Adoption(pod, pod.containers[0], ()))
        assert row is not None
        await desk.state.commit(lambda ledger: ledger.put(row))
        desk.admit(pod)

        edits = await desk.service.allocate(ids(9))

        assert (False, KubeletEpoch()) == (row.confirmed, row.epoch)
        assert row.edits == edits
        assert {("replay", ""): 1} == desk.results


SHARE = f"{G1},NVIDIA,1,1:;"


@pytest.mark.parametrize(
    ("text", "container", "hanging"),
    [
        ("GPU-elsewhere,NVIDIA,1,1:;", "main", ""),
        (SHARE * 2, "main", ""),
        (SHARE, "main", "facts"),
        (SHARE, "other", ""),
    ],
    ids=["no GPU of this node", "other groups", "a hook path that hangs", "nothing was written"],
)
async def test_a_holder_that_cannot_be_understood_is_not_adopted_and_held_up_nobody(
    text, container, hanging
):
    async with a_desk() as desk:
        desk.hooks.hanging = hanging
        found = Adoption(placed(1, text), a_container(name=container), ids(3))

        async with asyncio.timeout(60):
            assert None is await desk.service.adopt(found)


async def test_a_holder_is_adopted_with_its_own_group():
    two = (a_container(name="a"), a_container(name="b"))
    pod = placed(1, SHARE + f"{G2},NVIDIA,2,2:;", containers=two)
    async with a_desk() as desk:
        row = await desk.service.adopt(Adoption(pod, two[1], ids(3)))
        assert row is not None
        assert (1, G2, True) == (row.group, row.shares[0].uuid, row.confirmed)


async def test_of_a_row_that_was_closed_nothing_counts_any_more():
    async with a_desk() as desk:
        desk.bind(placed(1))
        await desk.service.allocate(ids(0))
        assert frozenset(ids(0)) == desk.service.held()
        await desk.state.commit(lambda ledger: ledger.drop(row.key for row in ledger.rows))

        assert frozenset() == desk.service.held()


async def test_a_second_answer_is_equal_and_its_row_is_the_new_kubelets():
    """The kubelet lost its record and was restarted. The directory is left as it is."""
    async with a_desk() as desk:
        pod = desk.bind(placed(1))
        first = await desk.service.allocate(ids(4))
        booked = msgspec.structs.replace(desk.ledger.rows[0], confirmed=True)
        await desk.state.commit(lambda ledger: ledger.put(booked))
        desk.lock(None)
        desk.epoch = NEXT_EPOCH
        desk.hooks.missing = ("/usr/local/vgpu/libvgpu.so",)  # which refuses only new answers
        await asyncio.sleep(90)

        assert first == await desk.service.allocate(ids(9))

        (row,) = desk.ledger.rows
        assert (ids(9), NEXT_EPOCH, False) == (row.slice_ids, row.epoch, row.confirmed)
        assert desk.clock.now() == row.answered_at
        directory = f"{pod.uid}_main"
        assert (1, 2) == (desk.hooks.wiped[directory], desk.hooks.made[directory])
        assert {("ok", ""): 1, ("replay", ""): 1} == desk.results


async def test_a_container_runs_as_its_status_says_where_no_cgroup_tells():
    """Both lost their records, and the kubelet asks for the one that does not run."""
    two = tuple(a_container(name=name) for name in "ab")
    pod = placed(1, SHARE + f"{G2},NVIDIA,2,2:;", containers=two)
    async with a_desk() as desk:
        desk.bind(pod)
        await desk.service.allocate(ids(1))
        desk.witness.admit(pod, a=ids(1)[0])
        second = await desk.service.allocate(ids(2, gpu=1))
        desk.lock(None)
        desk.epoch = NEXT_EPOCH
        first, other = (msgspec.structs.replace(one, has_run=True) for one in two)
        ran = (msgspec.structs.replace(first, running_id="a"), other)
        desk.admit(msgspec.structs.replace(pod, phase=Phase.RUNNING, containers=ran))
        desk.containers.alive = None
        await asyncio.sleep(60)

        assert second == await desk.service.allocate(ids(9))
