"""The Node's view shows the lock before its watch does, and remembers those that went."""

import asyncio

from agent.cluster import NodeView
from agent.hami.pod import former_locks
from agent.kit.cell import Cell
from tests.fakes.apiserver import FakeApi
from tests.services.cluster.test_node_view import following

LOCK = "hami.io/mutex.lock"


def went(view: Cell[NodeView | None]) -> list[str]:
    """The owners of the locks that went and still prove a right."""
    return [lock.name for lock in former_locks(view.value, asyncio.get_running_loop().time())]


async def test_locks_that_went_are_remembered_for_a_minute_the_last_one_first():
    api = FakeApi()
    api.create_node()

    async with following(api) as (_, _, view):
        for name in ("a", "b"):
            api.edit_node({LOCK: f"2026-09-01T12:00:00Z,team-a,{name}"})
            await asyncio.sleep(1)
        assert ["a"] == went(view)
        api.edit_node({LOCK: None, "other": "change"})
        await asyncio.sleep(50)
        assert ["b", "a"] == went(view)

        await asyncio.sleep(9.5)
        assert ["b"] == went(view)
        await asyncio.sleep(2)
        assert [] == went(view)


async def test_a_get_shows_the_node_before_its_watch_does():
    api = FakeApi()
    api.create_node()

    async with following(api) as (_, node, view):
        api.lag = 60.0
        changed = api.edit_node({LOCK: "2026-09-01T12:00:00Z,team-a,a"})
        await node.refresh()

        assert changed == view.value
