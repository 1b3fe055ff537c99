"""An agent restarted while the API server is away says so, and repeats what it can."""

import asyncio

import pytest

from agent.core.errors import ApiError, Gate, Refusal
from agent.core.pods import PodTable
from agent.core.state import State
from tests.services.allocating import EPOCH, NEXT_EPOCH, a_desk, ids, placed


async def answered():
    """The ledger of an agent that answered a pod, on disk; then kubelet and agent died."""
    async with a_desk() as desk:
        pod = desk.bind(placed(1))
        edits = await desk.service.allocate(ids(4))
        return pod, edits, desk.ledger, desk.disk


def cut_off(desk):
    desk.pods.set(PodTable())
    desk.node.set(None)
    desk.refresh_error = ApiError("connection refused")
    desk.epoch = NEXT_EPOCH


async def test_the_answer_is_equal_before_the_first_list():
    pod, first, ledger, disk = await answered()
    async with a_desk(State(generation=1, ledger=ledger), disk) as desk:
        cut_off(desk)
        desk.witness.admit(pod)
        owed = desk.ledger.outbox

        assert first == await desk.service.allocate(ids(9))

        assert {("replay", ""): 1} == desk.results
        assert (owed, 0) == (desk.ledger.outbox, desk.hooks.wiped[f"{pod.uid}_main"])
        (row,) = desk.ledger.rows
        assert (ids(9), NEXT_EPOCH) == (row.slice_ids, row.epoch)


async def test_another_pod_is_refused_for_the_moment_with_the_true_reason():
    _, _, ledger, disk = await answered()
    async with a_desk(State(generation=1, ledger=ledger), disk) as desk:
        cut_off(desk)
        desk.witness.admit(placed(2))

        with pytest.raises(Refusal) as caught:
            await desk.service.allocate(ids(5))

        assert (Gate.PODS_UNKNOWN, True) == (caught.value.gate, caught.value.transient)
        assert "API server cannot be asked" in caught.value.sentence
        assert ledger == desk.ledger


async def test_the_kubelet_that_was_answered_and_has_no_record_is_answered_again():
    pod, first, ledger, disk = await answered()
    async with a_desk(State(generation=1, ledger=ledger), disk) as desk:
        cut_off(desk)
        desk.epoch = EPOCH
        desk.witness.admit(pod)

        assert first == await desk.service.allocate(ids(4))


async def test_a_list_that_comes_in_time_is_what_decides():
    pod, first, ledger, disk = await answered()
    async with a_desk(State(generation=1, ledger=ledger), disk) as desk:
        cut_off(desk)
        desk.witness.admit(pod)

        async def refresh():
            await asyncio.sleep(0.1)
            desk.pods.set(PodTable({pod.uid: pod}, synced=True))
            return desk.pods.value

        object.__setattr__(desk.service._peers, "refresh", refresh)

        assert first == await desk.service.allocate(ids(9))
