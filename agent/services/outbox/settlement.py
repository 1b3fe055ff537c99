"""Settlement: derives the effects that the pods and the node lock call for."""

import asyncio
import datetime as dt
from typing import NoReturn

import msgspec
import structlog

from agent.codec.nodelock import held_lock
from agent.core.cluster.pods import NodeLock, NodeView, PodTable
from agent.core.ports import Clock
from agent.core.reconcile.settlement import SettlementFacts, owed
from agent.core.state.ledger import Effect, Ledger
from agent.kit.cell import Cell, News

log = structlog.get_logger(__name__)

PERIOD = 1.0
"""Seconds between two runs while the node is locked: the grace period ends without an event."""


class _Sighting(msgspec.Struct, frozen=True):
    """A lock's text, and the loop time at which it was first seen with a current pod table."""

    value: str
    at: float


class Settlement:
    """Sole writer of `owed`: the effects that pods and lock call for, for the outbox to perform.

    They are derived from the views and not written to disk, so a full disk does not keep a lock.
    """

    def __init__(
        self,
        *,
        pods: Cell[PodTable],
        node: Cell[NodeView | None],
        ledger: Cell[Ledger],
        owed: Cell[tuple[Effect, ...]],
        clock: Clock,
    ) -> None:
        self._pods = pods
        self._node = node
        self._ledger = ledger
        self._owed = owed
        self._clock = clock
        self._sighting: _Sighting | None = None

    async def run(self) -> NoReturn:
        """Derive effects after each change of pods, Node or ledger; each second while locked."""
        news = News(self._pods, self._node, self._ledger)
        while True:
            self._look()
            locked = held_lock(self._node.value) is not None
            await news.wait(PERIOD if locked else None)

    def _look(self) -> None:
        before = {effect.identity: effect for effect in self._owed.value}
        # What was owed already keeps its due time.
        now = tuple(before.get(effect.identity, effect) for effect in owed(self._scene()))
        for effect in now:
            if effect.identity not in before:
                log.info(
                    "settlement.owed", kind=effect.kind.value, ns=effect.namespace, pod=effect.pod
                )
        self._owed.set(now)

    def _scene(self) -> SettlementFacts:
        table, lock = self._pods.value, held_lock(self._node.value)
        standing = self._standing(lock, table)
        return SettlementFacts(table, self._ledger.value, lock, self._clock.now(), standing)

    def _standing(self, lock: NodeLock | None, table: PodTable) -> dt.timedelta:
        """How long this lock has been seen. The time restarts after a gap in the pod watch.

        After the gap, an owner that was bound during it is not in the table at once.
        """
        if lock is None or table.stale or not table.synced:
            self._sighting = None
            return dt.timedelta(0)
        now = asyncio.get_running_loop().time()
        if self._sighting is None or self._sighting.value != lock.value:
            self._sighting = _Sighting(lock.value, now)
        return dt.timedelta(seconds=now - self._sighting.at)
