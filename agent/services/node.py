"""This Node as the API server holds it: one WATCH, opened again whenever it ends."""

import asyncio
import random
from typing import NoReturn

import structlog

from agent.core.errors import ApiError
from agent.core.pods import NodeView
from agent.core.ports import NodeApi
from agent.kit.backoff import Backoff
from agent.kit.cell import Cell
from agent.kit.tally import Tally

log = structlog.get_logger(__name__)

DELAYS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
JITTER = 0.5
SHORTEST_WATCH = 1.0
"""A watch that ended sooner is no good one: the next waits its turn."""
HEALTHY_AFTER = 30.0
"""A watch that lasted so long clears the memory of earlier failures."""


class Node:
    """Sole writer of the Node's view (None: not seen yet, or deleted).

    `restarts` counts watches that ended, by reason.
    """

    def __init__(self, api: NodeApi, node: Cell[NodeView | None], random: random.Random) -> None:
        self.restarts = Tally(
            "node_watch_restarts_total", "Watches of this Node that ended.", ("reason",)
        )
        self._api = api
        self._node = node
        self._backoff = Backoff(DELAYS, JITTER, random)
        self._floor = 0
        """The version of our own last write since this watch began: older frames are late."""
        self._failing = False

    async def run(self) -> NoReturn:
        """Keep the view for ever."""
        loop = asyncio.get_running_loop()
        while True:
            began, self._floor = loop.time(), 0
            try:
                await self._follow()
            except ApiError as error:
                delay = self._give_up(error, lasted=loop.time() - began)
            else:
                delay = self._renew(lasted=loop.time() - began)
            await asyncio.sleep(delay)

    def saw(self, node: NodeView) -> None:
        """Take in the answer to a write of ours, unless the watch has shown something newer."""
        held = self._node.value
        version = _number(node.resource_version)
        if held is not None and 0 < version <= _number(held.resource_version):
            return
        self._floor = version
        self._node.set(node)

    async def _follow(self) -> None:
        """One watch to its end. Its frames come in order; only our writes may overtake them."""
        async for change in self._api.watch_node():
            if self._failing:
                log.info("node.followed")
                self._failing = False
            node = change.node
            if node is None:
                log.warning("node.deleted")
                self._node.set(None)
            elif _number(node.resource_version) >= self._floor:
                self._node.set(node)

    def _renew(self, lasted: float) -> float:
        """The watch ended as agreed: seconds until the next one."""
        self.restarts.add("ended")
        if lasted >= HEALTHY_AFTER:
            self._backoff.reset()
        return 0.0 if lasted >= SHORTEST_WATCH else self._backoff.next()

    def _give_up(self, error: ApiError, lasted: float) -> float:
        """No answer, or a bad one: seconds until the next try."""
        self.restarts.add("error")
        if lasted >= HEALTHY_AFTER:
            self._backoff.reset()
        if not self._failing:
            log.warning("node.lost", error=str(error))
        self._failing = True
        return max(self._backoff.next(), error.retry_after or 0.0)


def _number(version: str) -> int:
    """A resource version as a number; 0 where it is none."""
    return int(version) if version.isascii() and version.isdigit() else 0
