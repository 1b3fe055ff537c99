"""Settlement owes what the pods and the lock call for, once, and after a failure again."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import errno

import pytest

from agent.core.ledger import EffectKind
from agent.core.pods import NodeView, Phase, PodTable, Tombstone
from agent.core.state import State
from agent.kit.cell import Cell
from agent.services.settlement import Settlement
from agent.services.state import StateService
from tests.builders import NODE, NOON, a_lock, a_pod, a_pod_uid, a_row
from tests.fakes.clock import LoopClock
from tests.fakes.gated_disk import GatedDisk
from tests.services.at_work import at_work

BOUND = {
    "hami.io/vgpu-node": NODE,
    "hami.io/bind-phase": "allocating",
    "hami.io/bind-time": str(int(NOON.timestamp())),
}
MESSAGE = "Allocate failed due to rpc error: desc = No. [HA-2004], which is unexpected"
POD = a_pod(annotations=BOUND)
REJECTED = dataclasses.replace(
    POD, phase=Phase.FAILED, reason="UnexpectedAdmissionError", message=MESSAGE
)


class Scene:
    """What a test of the settlement holds in its hands."""

    def __init__(self) -> None:
        self.disk = GatedDisk()
        self.state = StateService(disk=self.disk, recovered=State(), boot_id="b")
        self.pods: Cell[PodTable] = Cell(PodTable(synced=True))
        self.node: Cell[NodeView | None] = Cell(NodeView(NODE, "uid", "1"))
        self.settlement = Settlement(
            pods=self.pods,
            node=self.node,
            ledger=self.state.ledger,
            commit=self.state.commit,
            clock=LoopClock(NOON),
        )

    def see(self, *pods, gone=()):
        table = {pod.uid: pod for pod in pods}
        self.pods.set(PodTable(table, tuple(Tombstone(p, NOON) for p in gone), synced=True))

    def lock(self, stamp=NOON):
        annotations = {"hami.io/mutex.lock": a_lock(stamp=stamp).value}
        self.node.set(NodeView(NODE, "uid", "2", annotations))

    def unlock(self):
        self.node.set(NodeView(NODE, "uid", "3"))

    @property
    def owed(self):
        return [(effect.kind, effect.pod_uid) for effect in self.state.ledger.value.outbox]

    async def forget(self):
        """The outbox has done everything; the views do not show it yet."""
        await self.state.commit(lambda ledger: dataclasses.replace(ledger, outbox=()))


@contextlib.asynccontextmanager
async def a_scene():
    scene = Scene()
    async with at_work(scene.state.run, scene.settlement.run):
        await asyncio.sleep(0.01)
        yield scene


async def test_a_rejected_pod_is_owed_its_settlement_its_event_and_its_lock():
    async with a_scene() as scene:
        scene.lock()
        scene.see(REJECTED, a_pod(uid=a_pod_uid(5), name="other", annotations=BOUND))
        await asyncio.sleep(0.1)

        assert {
            (EffectKind.SETTLE_POD, POD.uid),
            (EffectKind.POST_EVENT, POD.uid),
            (EffectKind.RELEASE_LOCK, POD.uid),
        } == set(scene.owed)


async def test_nothing_is_owed_twice_while_a_watch_is_late():
    async with a_scene() as scene:
        scene.lock()
        scene.see(REJECTED)
        await asyncio.sleep(0.1)
        await scene.forget()

        scene.see(dataclasses.replace(REJECTED, resource_version="9"))
        await asyncio.sleep(30)

        assert [] == scene.owed


async def test_the_lock_of_a_deleted_pod_is_owed_once_too():
    async with a_scene() as scene:
        scene.lock()
        scene.see(gone=(POD,))
        await asyncio.sleep(3)
        assert [(EffectKind.RELEASE_LOCK, POD.uid)] == scene.owed

        await scene.forget()
        await asyncio.sleep(30)

        assert [] == scene.owed


async def test_a_lock_that_was_taken_again_with_the_same_text_is_owed_again():
    async with a_scene() as scene:
        scene.lock()
        scene.see(gone=(POD,))
        await asyncio.sleep(3)
        await scene.forget()
        scene.unlock()
        await asyncio.sleep(0.1)
        scene.lock()
        await asyncio.sleep(1)
        assert [] == scene.owed

        await asyncio.sleep(2)

        assert [(EffectKind.RELEASE_LOCK, POD.uid)] == scene.owed


async def test_a_younger_lock_of_the_same_pod_is_owed_anew():
    async with a_scene() as scene:
        scene.lock()
        scene.see(dataclasses.replace(POD, phase=Phase.FAILED))
        await asyncio.sleep(0.1)
        await scene.forget()
        later = NOON + dt.timedelta(seconds=5)
        bound = {**BOUND, "hami.io/bind-time": str(int(later.timestamp()))}

        scene.lock(later)
        scene.see(dataclasses.replace(POD, phase=Phase.FAILED, annotations=bound))
        await asyncio.sleep(0.1)

        assert [(EffectKind.RELEASE_LOCK, POD.uid)] == scene.owed


async def test_the_lock_of_a_pod_answered_in_full_is_released_after_two_seconds_without_news():
    async with a_scene() as scene:
        scene.lock()
        scene.see(POD)
        await scene.state.commit(lambda ledger: ledger.put(a_row(answered_at=NOON)))
        await asyncio.sleep(1.5)
        assert [] == scene.owed

        await asyncio.sleep(2)

        assert [(EffectKind.RELEASE_LOCK, POD.uid)] == scene.owed


@pytest.mark.parametrize("locked", [True, False])
async def test_a_disk_that_took_nothing_is_tried_again_without_any_news(locked):
    async with a_scene() as scene:
        if locked:
            scene.lock()
        scene.disk.faults.fail_at(0, errno.ENOSPC, times=9)
        scene.see(REJECTED)
        await asyncio.sleep(0.1)
        assert [] == scene.owed
        scene.disk.faults.revive()

        await asyncio.sleep(2)

        assert 2 + locked == len(scene.owed)


async def test_what_changes_while_the_disk_is_busy_is_not_missed():
    async with a_scene() as scene:
        scene.disk.gate.clear()
        scene.see(REJECTED)
        await asyncio.sleep(1)
        other = dataclasses.replace(REJECTED, uid=a_pod_uid(5), name="other")
        scene.see(REJECTED, other)
        await asyncio.sleep(1)
        scene.disk.gate.set()
        await asyncio.sleep(1)

        assert {POD.uid, other.uid} == {uid for _, uid in scene.owed}
