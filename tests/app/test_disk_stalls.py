"""A disk that stalls costs no pod and no slice; one that fails or is silent takes the slices."""

import asyncio
import errno

import pytest

from agent import inventory as withholding
from agent import state
from agent.allocate import service
from agent.allocate.candidates import UnlockedPods
from agent.allocate.service import DISK_BUDGET
from agent.errors import Refusal, RefusalReason
from agent.ledger import State
from tests.app.front_node import FrontPlaces, joined, running
from tests.app.test_black_hole import offered, two_gpus
from tests.fakes.gated_disk import GatedDisk
from tests.services.allocation.allocating import Desk, ids, placed
from tests.services.at_work import at_work


class StallingNode:
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


async def stalled(place, seconds):
    """A disk that stalls: the pod waits for it, and nothing else happens."""
    node = StallingNode()
    async with running(node.front) as front, at_work(node.watch):
        pod = node.desk.bind(placed(1))
        gate, loop = node.gates[place], asyncio.get_running_loop()
        gate.clear()
        loop.call_later(seconds, gate.set)
        began = loop.time()
        await node.desk.service.allocate(ids(0))

        assert seconds == pytest.approx(loop.time() - began, abs=0.1)
        assert [pod.uid] == [row.key.pod_uid for row in node.desk.ledger.rows]
        await asyncio.sleep(60)
        assert {2} == {count for _, count in node.changes}
        assert [] == front.told


async def silent(place):
    """A disk that does not answer, until it does: refusal and slices go together."""
    node = StallingNode()
    async with running(node.front) as front, at_work(node.watch):
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

        assert DISK_BUDGET == pytest.approx(refused, abs=0.1)
        assert (2, 2) == tuple(map(len, offered(front)))
        assert ["NothingOffered"] == front.reasons
        assert [2, 0, 2] == [count for _, count in node.changes][-3:]


@pytest.mark.parametrize("place", ["state", "directory"])
@pytest.mark.parametrize("seconds", [0.5, 1, 5, 9])
async def test_a_stall_is_waited_for_and_takes_no_slice(place, seconds):
    await stalled(place, seconds)


@pytest.mark.parametrize("place", ["state", "directory"])
async def test_a_silent_disk_takes_the_slices_with_the_refusal_and_they_are_back_with_its_answer(
    place,
):
    await silent(place)


@pytest.mark.parametrize(
    ("module", "name", "seconds"),
    [(state, "COMMIT_DEADLINE", 1.0), (service, "DISK_BUDGET", 0.8)],
    ids=["silent after a second", "an Allocate has no time for the disk"],
)
async def test_a_planted_bug_that_gives_up_a_stalling_disk_is_found(
    module, name, seconds, monkeypatch
):
    monkeypatch.setattr(module, name, seconds)
    with pytest.raises((AssertionError, ExceptionGroup)):
        await stalled("state", 5)


@pytest.mark.parametrize(
    ("place", "module", "name", "value"),
    [
        ("state", withholding, "LEAST", 5.0),
        ("directory", withholding.Withholder, "refused", lambda self, _: self.look()),
        ("directory", withholding.Withholder, "refused", lambda *_: None),
    ],
    ids=["back late", "the slices go later than the refusal", "the slices stay"],
)
async def test_a_planted_bug_that_parts_the_slices_from_the_refusal_is_found(
    place, module, name, value, monkeypatch
):
    monkeypatch.setattr(module, name, value)
    with pytest.raises((AssertionError, ExceptionGroup)):
        await silent(place)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
async def test_an_error_of_the_disk_takes_the_slices_until_it_is_over(code):
    node = StallingNode()
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
    node = StallingNode()
    async with running(node.front), at_work(node.watch):
        loop, gate = asyncio.get_running_loop(), node.gates["state"]
        for number in range(20):
            pod = node.desk.bind(placed(number))
            gate.clear()
            loop.call_later(4, gate.set)
            await node.desk.service.allocate(ids(0))
            node.desk.witness.admit(pod, main=ids(0)[0])
            node.desk.bury(pod)

        assert {2} == {count for _, count in node.changes}
