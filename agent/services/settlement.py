"""Settlement: sees what the pods and the lock show, and owes the effects that must follow."""

from collections.abc import Awaitable, Callable
from typing import NoReturn

import structlog

from agent.codec.nodelock import held_lock
from agent.core.errors import StateError
from agent.core.ledger import Effect, Ledger
from agent.core.pods import NodeView, PodTable, PodUid
from agent.core.ports import Clock
from agent.core.settlement import Scene, owed
from agent.kit.cell import Cell
from agent.kit.news import News

log = structlog.get_logger(__name__)

PERIOD = 1.0
"""Seconds between looks when nothing changes: a lock's grace ends without any news."""


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
        self._owed: dict[tuple[object, ...], PodUid] = {}

    async def run(self) -> NoReturn:
        """Look after every change of the pods or the Node, and once a second while locked."""
        news = News(self._pods, self._node)
        while True:
            settled = await self._settle()
            locked = held_lock(self._node.value) is not None
            await news.wait(PERIOD if locked or not settled else None)

    async def _settle(self) -> bool:
        """Owe what the present calls for; False: the disk did not take it."""
        table = self._pods.value
        known = {*table.pods, *(stone.pod.uid for stone in table.tombstones)}
        self._owed = {key: uid for key, uid in self._owed.items() if uid in known}
        scene = Scene(table, self._ledger.value, held_lock(self._node.value), self._clock.now())
        new = [effect for effect in owed(scene) if effect.identity not in self._owed]
        if not new:
            return True
        try:
            await self._commit(lambda ledger: _owe(ledger, new))
        except StateError as error:
            log.warning("settlement.put_off", err=str(error))
            return False
        for effect in new:
            self._owed[effect.identity] = effect.pod_uid
            log.info("settlement.owed", kind=effect.kind.value, ns=effect.namespace, pod=effect.pod)
        return True


def _owe(ledger: Ledger, effects: list[Effect]) -> Ledger:
    for effect in effects:
        ledger = ledger.owe(effect)
    return ledger
