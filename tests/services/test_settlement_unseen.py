"""An owner deleted while the agent was down: its lock goes, once, when it has stood long enough."""

import asyncio
import contextlib
import dataclasses
import datetime as dt

from agent.core.ledger import EffectKind
from agent.core.pods import NodeView, PodTable
from agent.core.settlement import BIND_PATIENCE, LOCK_TIMEOUT, OVERDUE_PATIENCE
from agent.core.state import State
from agent.kit.cell import Cell
from agent.services.settlement import Settlement
from agent.services.state import StateService
from tests.builders import NODE, NOON, a_lock, a_pod
from tests.fakes.clock import LoopClock
from tests.fakes.disk import MemoryDisk
from tests.services.at_work import at_work

PATIENCE = BIND_PATIENCE.total_seconds()
OVERDUE = NOON - LOCK_TIMEOUT


class Scene:
    """A lock, no pods, and what is owed."""

    def __init__(self) -> None:
        self.state = StateService(disk=MemoryDisk(), recovered=State(), boot_id="b")
        self.pods: Cell[PodTable] = Cell(PodTable(synced=True))
        self.node: Cell[NodeView | None] = Cell(None)
        self.settlement = Settlement(
            pods=self.pods,
            node=self.node,
            ledger=self.state.ledger,
            commit=self.state.commit,
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
        outbox = self.state.ledger.value.outbox
        return [effect.value for effect in outbox if effect.kind is EffectKind.RELEASE_LOCK]


@contextlib.asynccontextmanager
async def a_scene():
    scene = Scene()
    async with at_work(scene.state.run, scene.settlement.run):
        yield scene


async def test_the_lock_is_released_when_it_stood_longer_than_any_bind():
    async with a_scene() as scene:
        value = scene.lock()
        await asyncio.sleep(PATIENCE - 2)
        assert [] == scene.released

        await asyncio.sleep(4)

        assert [value] == scene.released


async def test_an_overdue_lock_is_released_after_seconds():
    async with a_scene() as scene:
        value = scene.lock(OVERDUE)
        await asyncio.sleep(OVERDUE_PATIENCE.total_seconds() - 2)
        assert [] == scene.released

        await asyncio.sleep(4)

        assert [value] == scene.released


async def test_it_is_owed_once_while_the_watch_of_the_node_is_late():
    async with a_scene() as scene:
        scene.lock(OVERDUE)
        await asyncio.sleep(15)
        await scene.state.commit(lambda ledger: dataclasses.replace(ledger, outbox=()))

        await asyncio.sleep(60)

        assert [] == scene.released


async def test_each_new_lock_is_given_the_whole_time():
    async with a_scene() as scene:
        for step in range(6):
            scene.lock(NOON + step * BIND_PATIENCE / 2)
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
        scene.lock(OVERDUE)
        await asyncio.sleep(100)
        scene.follow(synced=True)
        await asyncio.sleep(2)
        assert [] == scene.released

        await asyncio.sleep(OVERDUE_PATIENCE.total_seconds())

        assert 1 == len(scene.released)
