"""Follows this Node with one WATCH, which is opened again whenever it ends."""

import asyncio
import contextlib
import random
from typing import NoReturn

import msgspec
import structlog

from agent.core.cluster.annotations import MUTEX_LOCK
from agent.core.cluster.changes import version_number
from agent.core.cluster.pods import NodeView
from agent.core.errors import ApiError
from agent.core.ports import NodeApi
from agent.kit.cell import Cell
from agent.kit.reopening import Reopening
from agent.kit.tally import Tally

log = structlog.get_logger(__name__)

LOOK_PAUSE = 0.2
"""The least seconds between watches opened by `look`: each Allocate may cause one."""

FORMER_LIFE = 60.0
"""Seconds for which a removed lock still proves the right of the pod that it named. A bind can wait
in the scheduler's queue for longer than the grace period of its lock."""

FORMER_LOCKS = 64
"""The most former locks that are kept: the scheduler takes fewer than two a second."""

UNSEEN_AFTER = 5.0
"""Seconds. A watch begins with the Node; if none comes within this time, there is no Node."""


class NodeWatch:
    """Sole writer of the view of the Node (None: not seen yet, or deleted).

    `restarts` counts the watches that ended, by reason. `returns` counts how often the view became
    current again after the API server was lost.
    """

    def __init__(self, api: NodeApi, node: Cell[NodeView | None], random: random.Random) -> None:
        self.restarts = Tally(
            "node_watch_restarts_total", "Watches of this Node that ended.", ("reason",)
        )
        self.returns = Cell(0)
        self._api = api
        self._node = node
        self._watch = Reopening(self.restarts, random)
        self._floor = 0
        """The version of the agent's last write since this watch began. Older frames are late."""
        self._failing = False
        self._is_stale = False
        """The API server answers again but has not sent the Node yet."""
        self._wanted = asyncio.Event()

    async def run(self) -> NoReturn:
        """Keep the view up to date for ever."""
        while True:
            self._floor = 0
            least = 0.0
            self._watch.opening()
            try:
                await self._follow()
            except ApiError as error:
                delay = self._give_up(error)
                least = error.retry_after or 0.0
            else:
                delay = self._watch.ended()
            await self._pause(least, delay)

    def look(self) -> None:
        """Open the watch now if it is down."""
        self._wanted.set()

    async def refresh(self) -> None:
        """Update the view by one GET. The caller sets the deadline. Raises ApiError."""
        node = await self._api.get_node()
        if node is not None:
            self.saw(node)

    def saw(self, node: NodeView) -> None:
        """Update the view from the answer to a request, unless the watch showed a newer Node."""
        held = self._node.value
        version = version_number(node.resource_version)
        if held is not None and 0 < version <= version_number(held.resource_version):
            return
        self._floor = version
        self._set(node)

    def _set(self, node: NodeView) -> None:
        """Set the view, with the locks that were removed lately."""
        held = self._node.value
        if held is not None:
            now = asyncio.get_running_loop().time()
            former = [(text, until) for text, until in held.former_locks if until > now]
            gone = held.annotations.get(MUTEX_LOCK, "")
            if gone and node.annotations.get(MUTEX_LOCK) != gone:
                former.insert(0, (gone, now + FORMER_LIFE))
            node = msgspec.structs.replace(node, former_locks=tuple(former[:FORMER_LOCKS]))
        self._node.set(node)

    async def _pause(self, least: float, most: float) -> None:
        """Wait `most` seconds; after `least` seconds a `look` ends the wait."""
        self._wanted.clear()
        least = max(least, min(LOOK_PAUSE, most))
        await asyncio.sleep(least)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most - least):
                await self._wanted.wait()

    async def _follow(self) -> None:
        """Follow one watch to its end. Frames come in order; only the agent's writes overtake."""
        loop = asyncio.get_running_loop()
        unseen: asyncio.TimerHandle | None = None
        try:
            async for change in self._api.watch_node():
                if change.opened:
                    self._opened()
                    unseen = loop.call_later(UNSEEN_AFTER, self._unseen)
                    continue
                if unseen is not None:
                    unseen.cancel()
                self._take(change.node)
        finally:
            if unseen is not None:
                unseen.cancel()

    def _opened(self) -> None:
        if self._failing:
            log.info("node.followed")
        self._is_stale = self._is_stale or self._failing
        self._failing = False

    def _take(self, node: NodeView | None) -> None:
        if node is None:
            log.warning("node.deleted")
            self._node.set(None)
        elif version_number(node.resource_version) >= self._floor:
            self._set(node)
        if self._is_stale:
            self._is_stale = False
            self.returns.set(self.returns.value + 1)

    def _unseen(self) -> None:
        """The open watch sends no Node: it was deleted while no watch was open."""
        if self._node.set(None):
            log.warning("node.deleted", unseen_for=UNSEEN_AFTER)

    def _give_up(self, error: ApiError) -> float:
        """Note a failed watch. Returns the seconds until the next try."""
        if not self._failing:
            log.warning("node.lost", err=str(error))
        self._failing = True
        return self._watch.broke(at_least=error.retry_after or 0.0)
