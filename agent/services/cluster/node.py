"""This Node as the API server holds it: one WATCH, opened again whenever it ends."""

import asyncio
import contextlib
import dataclasses
import random
from typing import NoReturn

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
"""Seconds between watches that a `look` opens: each Allocate may ask for one."""

FORMER_LIFE = 60.0
"""Seconds for which a lock that went still proves the right of the pod that it named: a bind can
wait in the scheduler's queue for longer than a lock may stand that nobody here waits for."""

FORMER_LOCKS = 64
"""So many at most: the scheduler takes fewer than two a second."""

UNSEEN_AFTER = 5.0
"""Seconds: a watch begins with the Node as it is, so one that stays silent has none to show."""


class NodeWatch:
    """Sole writer of the Node's view (None: not seen yet, or deleted).

    `restarts` counts watches that ended, by reason; `returns`, how often the view was fresh again
    after the API server had been lost.
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
        """The version of our own last write since this watch began: older frames are late."""
        self._failing = False
        self._is_stale = False
        """The server answers again, but has not shown the Node yet."""
        self._wanted = asyncio.Event()

    async def run(self) -> NoReturn:
        """Keep the view for ever."""
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
        """Open the watch now if it is down: somebody has to know the Node as it is."""
        self._wanted.set()

    async def refresh(self) -> None:
        """Take in the Node as one GET shows it; the deadline is the caller's. Raises ApiError."""
        node = await self._api.get_node()
        if node is not None:
            self.saw(node)

    def saw(self, node: NodeView) -> None:
        """Take in an answer to us, unless the watch has shown something newer."""
        held = self._node.value
        version = version_number(node.resource_version)
        if held is not None and 0 < version <= version_number(held.resource_version):
            return
        self._floor = version
        self._set(node)

    def _set(self, node: NodeView) -> None:
        """The new view, which remembers the locks that it shows no more."""
        held = self._node.value
        if held is not None:
            now = asyncio.get_running_loop().time()
            former = [one for one in held.former_locks if one[1] > now]
            gone = held.annotations.get(MUTEX_LOCK, "")
            if gone and node.annotations.get(MUTEX_LOCK) != gone:
                former.insert(0, (gone, now + FORMER_LIFE))
            node = dataclasses.replace(node, former_locks=tuple(former[:FORMER_LOCKS]))
        self._node.set(node)

    async def _pause(self, least: float, most: float) -> None:
        """Wait for `most` seconds, or from `least` on, which the server asked for, for a `look`."""
        self._wanted.clear()
        least = max(least, min(LOOK_PAUSE, most))
        await asyncio.sleep(least)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most - least):
                await self._wanted.wait()

    async def _follow(self) -> None:
        """One watch to its end. Its frames come in order; only our writes may overtake them."""
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
        """The open watch shows no Node: it was deleted while nobody looked."""
        if self._node.set(None):
            log.warning("node.deleted", unseen_for=UNSEEN_AFTER)

    def _give_up(self, error: ApiError) -> float:
        """No answer, or a bad one: seconds until the next try."""
        if not self._failing:
            log.warning("node.lost", err=str(error))
        self._failing = True
        return self._watch.broke(at_least=error.retry_after or 0.0)
