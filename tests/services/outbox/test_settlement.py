"""Settlement says what the pods and the lock call for, as long and as soon as they do."""

import asyncio
import contextlib
import datetime as dt

import msgspec

from agent.cluster import NodeView, Phase, PodTable
from agent.kit.cell import Cell
from agent.ledger import Effect, EffectKind, Ledger
from agent.settle import UNCLAIMED, Settlement
from tests.builders import NODE, NOON, a_lock, a_pod, a_row
from tests.fakes.clock import LoopClock
from tests.services.at_work import at_work

BOUND = {"hami.io/vgpu-node": NODE, "hami.io/bind-phase": "allocating"}
PATIENCE = UNCLAIMED.total_seconds()
MESSAGE = "Allocate failed due to rpc error: desc = No. [HA-2004], which is unexpected"
POD = a_pod(annotations=BOUND)
REJECTED = msgspec.structs.replace(
    POD, phase=Phase.FAILED, reason="UnexpectedAdmissionError", message=MESSAGE
)


class OwedScene:
    """What a test of the settlement holds in its hands."""

    def __init__(self) -> None:
        self.ledger: Cell[Ledger] = Cell(Ledger())
        self.pods: Cell[PodTable] = Cell(PodTable(synced=True))
        self.node: Cell[NodeView | None] = Cell(NodeView(NODE, "uid", "1"))
        self.effects: Cell[tuple[Effect, ...]] = Cell(())
        self.settlement = Settlement(
            pods=self.pods,
            node=self.node,
            ledger=self.ledger,
            owed=self.effects,
            clock=LoopClock(NOON),
        )

    def see(self, *pods):
        self.pods.set(PodTable({pod.uid: pod for pod in pods}, synced=True))

    def follow(self, **changes: object) -> None:
        self.pods.set(msgspec.structs.replace(self.pods.value, **changes))

    def lock(self, stamp=NOON):
        value = a_lock(stamp=stamp).value
        self.node.set(NodeView(NODE, "uid", "2", {"hami.io/mutex.lock": value}))
        return value

    def unlock(self):
        self.node.set(NodeView(NODE, "uid", "3"))

    @property
    def released(self):
        owed = self.effects.value
        return [effect.value for effect in owed if effect.kind is EffectKind.RELEASE_LOCK]

    @property
    def owed(self):
        return [(effect.kind, effect.pod_uid) for effect in self.effects.value]


@contextlib.asynccontextmanager
async def a_scene():
    scene = OwedScene()
    async with at_work(scene.settlement.run):
        await asyncio.sleep(0.01)
        yield scene


async def test_it_is_owed_until_the_views_show_it_and_due_since_it_was_first_seen():
    async with a_scene() as scene:
        scene.lock()
        scene.see(REJECTED)
        await asyncio.sleep(0.1)
        first = scene.effects.value

        scene.see(msgspec.structs.replace(REJECTED, resource_version="9"))
        await asyncio.sleep(30)
        assert first == scene.effects.value

        settled = {**BOUND, "hami.io/bind-phase": "failed"}
        scene.see(msgspec.structs.replace(REJECTED, annotations=settled))
        scene.unlock()
        await asyncio.sleep(0.1)
        assert [] == scene.owed


async def test_a_lock_that_was_taken_again_with_the_same_text_is_given_its_time_again():
    async with a_scene() as scene:
        scene.lock()
        await asyncio.sleep(PATIENCE + 2)
        assert 1 == len(scene.owed)
        scene.unlock()
        await asyncio.sleep(0.1)
        scene.lock()

        await asyncio.sleep(1)

        assert [] == scene.owed


async def test_a_younger_lock_of_the_same_pod_is_owed_anew():
    async with a_scene() as scene:
        scene.lock()
        scene.see(msgspec.structs.replace(POD, phase=Phase.FAILED))
        await asyncio.sleep(0.1)
        (before,) = scene.effects.value
        later = NOON + dt.timedelta(seconds=5)

        scene.lock(later)
        await asyncio.sleep(0.1)

        (effect,) = scene.effects.value
        assert a_lock(stamp=later).value == effect.value
        assert before.identity != effect.identity


async def test_the_lock_of_a_pod_answered_in_full_is_released_after_two_seconds_without_news():
    async with a_scene() as scene:
        scene.lock()
        scene.see(POD)
        row = a_row(answered_at=NOON, lock=a_lock().value)
        scene.ledger.set(scene.ledger.value.put(row))
        await asyncio.sleep(1.5)
        assert [] == scene.owed

        await asyncio.sleep(2)

        assert [(EffectKind.RELEASE_LOCK, POD.uid)] == scene.owed


async def test_the_lock_is_released_when_it_stood_longer_than_a_bind():
    async with a_scene() as scene:
        value = scene.lock()
        await asyncio.sleep(PATIENCE - 2)
        assert [] == scene.released

        await asyncio.sleep(4)

        assert [value] == scene.released


async def test_each_new_lock_is_given_the_whole_time():
    async with a_scene() as scene:
        for step in range(6):
            scene.lock(NOON + step * UNCLAIMED / 2)
            await asyncio.sleep(PATIENCE / 2)

        assert [] == scene.released


async def test_a_gap_in_the_watch_of_the_pods_starts_the_time_again():
    async with a_scene() as scene:
        scene.lock()
        await asyncio.sleep(PATIENCE - 10)
        scene.follow(stale=True)
        await asyncio.sleep(100)
        scene.follow(stale=False)
        await asyncio.sleep(1)
        assert [] == scene.released

        owner = a_pod()
        scene.follow(pods={owner.uid: owner})
        await asyncio.sleep(2 * PATIENCE)

        assert [] == scene.released


async def test_nothing_is_counted_before_the_pods_are_known():
    async with a_scene() as scene:
        scene.follow(synced=False)
        scene.lock()
        await asyncio.sleep(100)
        scene.follow(synced=True)
        await asyncio.sleep(2)
        assert [] == scene.released

        await asyncio.sleep(PATIENCE)

        assert 1 == len(scene.released)
