"""Reports once for each container that it has filled its memory limit."""

import asyncio
from collections.abc import Callable
from typing import Final, NoReturn

from agent.core.cluster.changes import NodeEvent
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory
from agent.core.state.ledger import ContainerKey, Ledger
from agent.core.usage.pressure import full_gpus, limit_event
from agent.core.usage.use import ContainerUse
from agent.kit.cell import Cell
from agent.kit.ticks import until_tick

PERIOD: Final = 5.0


class MemoryPressure:
    """Looks at the newest use of each container.

    - A container that was full before the agent started gets no second Event.
    - In plain mode no pod is known, so there is no Event.
    """

    def __init__(
        self,
        newest: Callable[[ContainerKey], ContainerUse | None],
        ledger: Cell[Ledger],
        inventory: Cell[Inventory],
        say: Callable[[NodeEvent], None],
    ) -> None:
        self._newest = newest
        self._ledger = ledger
        self._inventory = inventory
        self._say = say
        self._unseen = {row.key for row in ledger.value.rows}
        """The containers of an earlier agent that were not looked at yet."""
        self._told = set[ContainerKey]()

    async def run(self) -> NoReturn:
        """Look at each tick of PERIOD, for ever."""
        while True:
            self._look()
            await asyncio.sleep(until_tick(PERIOD))

    def _look(self) -> None:
        rows = {row.key: row for row in self._ledger.value.rows if row.pod_uid}
        self._told &= rows.keys()
        for key in rows.keys() - self._told:
            use = self._newest(key)
            if use is None:
                continue
            full = next(full_gpus(use), None)
            if full is not None:
                self._told.add(key)
                if key not in self._unseen:
                    label = self._inventory.value.label(GpuUuid(full.uuid))
                    self._say(limit_event(rows[key], full, label))
            self._unseen.discard(key)
