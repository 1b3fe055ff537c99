"""An agent restarted while the API server is away says so, and answers nobody."""

import asyncio

import pytest

from agent.cluster import PodTable
from agent.errors import ApiError, Refusal, RefusalReason
from agent.ledger import State
from tests.services.allocation.allocating import NEXT_EPOCH, a_desk, ids, placed


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


@pytest.mark.parametrize("number", [1, 2], ids=["it was answered", "another pod"])
async def test_whoever_asks_is_refused_for_the_moment_with_the_true_reason(number):
    _, _, ledger, disk = await answered()
    async with a_desk(State(generation=1, ledger=ledger), disk) as desk:
        cut_off(desk)
        desk.witness.admit(placed(number))

        with pytest.raises(Refusal) as caught:
            await desk.service.allocate(ids(5))

        assert (RefusalReason.PODS_UNKNOWN, True) == (caught.value.gate, caught.value.transient)
        assert "could not ask the API server" in caught.value.sentence
        assert ledger == desk.ledger


async def test_a_list_that_comes_in_time_is_what_decides():
    pod, first, ledger, disk = await answered()
    async with a_desk(State(generation=1, ledger=ledger), disk) as desk:
        cut_off(desk)
        desk.witness.admit(pod)
        desk.refresh_error, desk.unseen = None, [pod]
        silence = desk.silent = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, silence.set)

        assert first == await desk.service.allocate(ids(9))
