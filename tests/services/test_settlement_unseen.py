"""A lock that nobody of its name waits for goes once it has stood before our eyes for long."""

import asyncio
import contextlib
import dataclasses
import datetime as dt

from agent.core.cluster.pods import NodeView, PodTable
from agent.core.reconcile.settlement import UNCLAIMED
from agent.core.state.ledger import Effect, EffectKind, Ledger
from agent.kit.cell import Cell
from agent.services.outbox.settlement import Settlement
from tests.builders import NODE, NOON, a_lock, a_pod
from tests.fakes.clock import LoopClock
from tests.services.at_work import at_work

PATIENCE = UNCLAIMED.total_seconds()


class UnseenScene:
    """A lock, no pods, and what is owed."""

    def __init__(self) -> None:
        self.pods: Cell[PodTable] = Cell(PodTable(synced=True))
        self.node: Cell[NodeView | None] = Cell(None)
        self.owed: Cell[tuple[Effect, ...]] = Cell(())
        self.settlement = Settlement(
            pods=self.pods,
            node=self.node,
            ledger=Cell(Ledger()),
            owed=self.owed,
            clock=LoopClock(NOON),
        )

    def lock(self, stamp: dt.datetime = NOON) -> str:
        value = a_lock(stamp=stamp).value
        self.node.set(NodeView(NODE, "uid", "2", {"hami.io/mutex.lock": value}))
        return value

    def follow(self, **changes: object) -> None:
        self.pods.set(dataclasses.replace(self.pods.value, **changes))  # type: ignore[arg-type]

    @property
    def released(self) -> list[str]:
        owed = self.owed.value
        return [effect.value for effect in owed if effect.kind is EffectKind.RELEASE_LOCK]


@contextlib.asynccontextmanager
async def a_scene():
    scene = UnseenScene()
    async with at_work(scene.settlement.run):
        yield scene


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
