"""Settlement: sees what the pods and the lock show, and owes the effects that must follow."""

import asyncio
import dataclasses
import datetime as dt
from collections.abc import Awaitable, Callable
from typing import NoReturn

import structlog

from agent.codec.nodelock import held_lock
from agent.core.errors import StateError
from agent.core.ledger import Effect, EffectKind, Ledger
from agent.core.pods import NodeLock, NodeView, PodTable
from agent.core.ports import Clock
from agent.core.settlement import Scene, owed
from agent.kit.cell import Cell
from agent.kit.news import News

log = structlog.get_logger(__name__)

PERIOD = 1.0
"""Seconds between looks when nothing changes: a lock's grace ends without any news."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Sighting:
    """A lock's text, and when, on the loop's clock, it was first seen beside pods we follow."""

    value: str
    at: float


class Settlement:
    """Adds to the outbox. It remembers what it owed, so that a slow watch is not answered twice."""

    def __init__(
        self,
        *,
        pods: Cell[PodTable],
        node: Cell[NodeView | None],
        ledger: Cell[Ledger],
        commit: Callable[[Callable[[Ledger], Ledger]], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._pods = pods
        self._node = node
        self._ledger = ledger
        self._commit = commit
        self._clock = clock
        self._owed: dict[tuple[object, ...], Effect] = {}
        self._sighting: _Sighting | None = None

    async def run(self) -> NoReturn:
        """Look after every change of the pods or the Node, and once a second while locked."""
        news = News(self._pods, self._node)
        while True:
            settled = await self._settle()
            locked = held_lock(self._node.value) is not None
            await news.wait(PERIOD if locked or not settled else None)

    async def _settle(self) -> bool:
        """Owe what the present calls for; False: the disk did not take it."""
        scene = self._scene()
        self._forget(scene)
        new = [effect for effect in owed(scene) if effect.identity not in self._owed]
        if not new:
            return True
        try:
            await self._commit(lambda ledger: _owe(ledger, new))
        except StateError as error:
            log.warning("settlement.put_off", err=str(error))
            return False
        for effect in new:
            self._owed[effect.identity] = effect
            log.info("settlement.owed", kind=effect.kind.value, ns=effect.namespace, pod=effect.pod)
        return True

    def _scene(self) -> Scene:
        table, lock = self._pods.value, held_lock(self._node.value)
        standing = self._standing(lock, table)
        return Scene(table, self._ledger.value, lock, self._clock.now(), standing)

    def _standing(self, lock: NodeLock | None, table: PodTable) -> dt.timedelta:
        """How long this lock has been seen; from the start again after a gap in the pods' watch.

        An owner that was bound during the gap is not in the table at once when it ends.
        """
        if lock is None or table.stale or not table.synced:
            self._sighting = None
            return dt.timedelta(0)
        now = asyncio.get_running_loop().time()
        if self._sighting is None or self._sighting.value != lock.value:
            self._sighting = _Sighting(lock.value, now)
        return dt.timedelta(seconds=now - self._sighting.at)

    def _forget(self, scene: Scene) -> None:
        """What was owed for pods that are there no more cannot be owed again.

        A lock that was seen to be gone can come back with the same text: two pods of one name took
        it in one second.
        """
        known = {*scene.table.pods, *(stone.pod.uid for stone in scene.table.tombstones)}
        held = scene.lock.value if scene.lock else None

        def is_there(effect: Effect) -> bool:
            if effect.kind is EffectKind.RELEASE_LOCK:
                return effect.value == held
            return effect.pod_uid in known

        self._owed = {
            identity: effect for identity, effect in self._owed.items() if is_there(effect)
        }


def _owe(ledger: Ledger, effects: list[Effect]) -> Ledger:
    for effect in effects:
        ledger = ledger.owe(effect)
    return ledger
