"""A disk that stalls costs no pod and no slice; one that fails or is silent takes the slices."""

import asyncio
import errno

import pytest

from agent.core.allocation.settings import UnlockedPods
from agent.core.allocation.steps import DISK_BUDGET
from agent.core.errors import Refusal, RefusalReason
from agent.core.state.state import State
from tests.app.front_node import FrontPlaces, joined, running
from tests.app.test_black_hole import offered, two_gpus
from tests.fakes.gated_disk import GatedDisk
from tests.services.allocation.allocating import Desk, ids, placed


class Node:
    """A node that can answer, beside what decides whether it offers slices."""

    def __init__(self):
        self.disk = GatedDisk()
        self.places = FrontPlaces(disk=self.disk)
        self.front = joined(two_gpus(), places=self.places)
        hooks = self.places.hooks
        self.desk = Desk(State(), self.disk, UnlockedPods.STRICT, self.front, hooks)
        self.changes = []
        """When the kubelet's list changed, and how many GPUs were on offer."""

    async def watch(self):
        async for _ in self.front.facts.slices.follow():
            groups = self.front.facts.slices.value.groups
            now = asyncio.get_running_loop().time()
            self.changes.append((now, sum(group.healthy for group in groups)))

    @property
    def gates(self):
        return {"state": self.disk.gate, "directory": self.places.hooks.gate}


@pytest.mark.parametrize("place", ["state", "directory"])
@pytest.mark.parametrize("seconds", [0.5, 1, 5, 9])
async def test_a_stall_is_waited_for_and_takes_no_slice(place, seconds):
    node = Node()
    async with running(node.front) as front, asyncio.TaskGroup() as group:
        watching = group.create_task(node.watch())
        pods = [node.desk.bind(placed(1))]
        gate = node.gates[place]
        gate.clear()
        asyncio.get_running_loop().call_later(seconds, gate.set)
        began = asyncio.get_running_loop().time()
        await node.desk.service.allocate(ids(0))

        assert seconds == pytest.approx(asyncio.get_running_loop().time() - began, abs=0.1)
        assert [pod.uid for pod in pods] == [row.key.pod_uid for row in node.desk.ledger.rows]
        await asyncio.sleep(60)
        watching.cancel()
        assert {2} == {count for _, count in node.changes}
        assert [] == front.told


@pytest.mark.parametrize("place", ["state", "directory"])
async def test_a_silent_disk_takes_the_slices_with_the_refusal_and_they_are_back_with_its_answer(
    place,
):
    node = Node()
    async with running(node.front) as front, asyncio.TaskGroup() as group:
        watching = group.create_task(node.watch())
        node.desk.bind(placed(1))
        gate, loop = node.gates[place], asyncio.get_running_loop()
        gate.clear()
        began = loop.time()
        with pytest.raises(Refusal, match="has not answered"):
            await node.desk.service.allocate(ids(0))
        refused = loop.time() - began
        await asyncio.sleep(0.05)
        assert ([], []) == offered(front)
        await asyncio.sleep(1 + 30 * (place == "state"))
        assert ([], []) == offered(front)
        gate.set()
        await asyncio.sleep(1)
        watching.cancel()

        assert DISK_BUDGET == pytest.approx(refused, abs=0.1)
        assert (2, 2) == tuple(map(len, offered(front)))
        assert ["NothingOffered"] == front.reasons
        assert [2, 0, 2] == [count for _, count in node.changes if count in {0, 2}][-3:]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
async def test_an_error_of_the_disk_takes_the_slices_until_it_is_over(code):
    node = Node()
    async with running(node.front) as front:
        node.desk.bind(placed(1))
        node.places.disk.faults.fail_at(0, code, times=1000)
        with pytest.raises(Refusal) as refused:
            await node.desk.service.allocate(ids(0))
        await asyncio.sleep(0.5)
        assert RefusalReason.STATE_UNWRITABLE is refused.value.gate
        assert ([], []) == offered(front)
        await asyncio.sleep(30)
        assert ([], []) == offered(front)
        node.places.disk.faults.revive()
        await asyncio.sleep(1.01)

        assert (2, 2) == tuple(map(len, offered(front)))


async def test_a_slow_disk_that_always_answers_never_takes_a_slice():
    node = Node()
    async with running(node.front), asyncio.TaskGroup() as group:
        watching = group.create_task(node.watch())
        loop, gate = asyncio.get_running_loop(), node.gates["state"]
        for number in range(20):
            pod = node.desk.bind(placed(number))
            gate.clear()
            loop.call_later(4, gate.set)
            await node.desk.service.allocate(ids(0))
            node.desk.witness.admit(pod, main=ids(0)[0])
            node.desk.bury(pod)
        watching.cancel()

        assert {2} == {count for _, count in node.changes}
