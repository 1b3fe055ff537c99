"""A pod that our watch has not shown yet is never taken for one that waits for its old answer."""

import dataclasses
import datetime as dt

import pytest

from agent.core.errors import ApiError, Gate, Refusal
from agent.core.holdings import KubeletEpoch
from agent.core.ledger import Ledger
from agent.core.state import State
from tests.builders import NOON, a_row, a_share
from tests.services.allocating import G1, a_desk, ids, placed

OLD = placed(1, f"{G1},NVIDIA,6000,20:;")
NEW = placed(2, f"{G1},NVIDIA,2000,20:;")
BEFORE = KubeletEpoch(inode=7, ctime_ns=1)
ROW = a_row(pod_uid=OLD.uid, pod=OLD.name, shares=[a_share(uuid=G1)], epoch=BEFORE)
LOST = State(ledger=Ledger((ROW,)))
"""The kubelet that was answered is gone, and so is its record."""


async def test_a_pod_that_comes_while_another_waits_for_its_old_answer_gets_no_answer_of_that_one():
    async with a_desk(LOST) as desk:
        desk.see(OLD)
        desk.lock(NEW)
        desk.witness.admit(OLD)
        desk.witness.admit(NEW)
        desk.unseen = [NEW]

        with pytest.raises(Refusal) as refused:
            await desk.service.allocate(ids(0))

    assert (Gate.MANY_PODS_ADMITTED, 1) == (refused.value.gate, desk.refreshes)


async def test_an_old_answer_is_given_again_after_one_look_at_the_api_server():
    async with a_desk(LOST) as desk:
        desk.see(OLD)
        desk.witness.admit(OLD)

        await desk.service.allocate(ids(0))

        assert ({("replay", ""): 1}, 1) == (desk.results, desk.refreshes)


async def test_an_old_answer_is_given_again_without_the_api_server():
    async with a_desk(LOST) as desk:
        desk.see(OLD)
        desk.witness.admit(OLD)
        desk.refresh_error = ApiError("away")

        await desk.service.allocate(ids(0))

        assert {("replay", ""): 1} == desk.results


async def test_a_preference_for_an_old_answer_asks_nobody_but_the_kubelet():
    async with a_desk(LOST) as desk:
        desk.see(OLD)
        desk.witness.admit(OLD)

        await desk.service.prefer(ids(0, 1), (), 1)

        assert 0 == desk.refreshes


async def test_a_lock_younger_than_its_owner_in_our_view_is_looked_up_at_the_api_server():
    async with a_desk() as desk:
        desk.bind(OLD)
        desk.lock(OLD, NOON + dt.timedelta(seconds=5))
        desk.unseen = [stamped(OLD, 5)]

        await desk.service.allocate(ids(0))

        assert 1 == desk.refreshes


async def test_a_pod_that_was_bound_before_the_lock_of_its_name_was_taken_is_refused():
    async with a_desk() as desk:
        desk.bind(OLD)
        desk.lock(OLD, NOON + dt.timedelta(seconds=5))

        with pytest.raises(Refusal) as refused:
            await desk.service.allocate(ids(0))

        assert (Gate.NO_RIGHT, 1) == (refused.value.gate, desk.refreshes)
        assert () == desk.ledger.rows


def stamped(pod, seconds):
    """The pod as a bind that was tried again stamps it."""
    noted = {**pod.annotations, "hami.io/bind-time": str(int(NOON.timestamp()) + seconds)}
    return dataclasses.replace(pod, annotations=noted)


async def test_a_lock_as_old_as_its_owner_needs_no_look_at_the_api_server():
    async with a_desk() as desk:
        desk.bind(OLD)

        await desk.service.allocate(ids(0))

        assert 0 == desk.refreshes
