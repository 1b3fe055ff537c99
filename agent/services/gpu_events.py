"""GPUs that fall ill, recover, fall silent, come or go: Events for people."""

import asyncio
from collections.abc import Callable
from typing import Final

from agent.core.changes import NodeEvent
from agent.core.gpu import GpuFault, GpuUuid
from agent.core.gpu_events import believed, gpu_events, turning
from agent.core.inventory import Inventory
from agent.core.ledger import Ledger
from agent.kit.cell import Cell

CALM: Final = 30.0
"""Seconds for which good news of a silent GPU, and where an ill one is, must last to be said."""


class GpuEvents:
    """Says what differs from the inventory before. The first one is where it begins.

    So what a restarted agent remembers of a GPU is not said again. `left_out`: what LeftOut says.
    """

    def __init__(
        self,
        inventory: Cell[Inventory],
        ledger: Cell[Ledger],
        left_out: Cell[tuple[GpuFault, ...]],
        say: Callable[[NodeEvent], None],
    ) -> None:
        self._inventory = inventory
        self._ledger = ledger
        self._left_out = left_out
        self._say = say
        self._said: Inventory | None = None
        self._unsaid: dict[GpuUuid, float] = {}
        """Of whom news is held back, since when."""

    async def run(self) -> None:
        """Follow the inventory until the cell closes."""
        changes = self._inventory.follow()
        while True:
            try:
                async with asyncio.timeout_at(self._due()):
                    inventory = await anext(changes)
            except TimeoutError:
                inventory = self._inventory.value
            except StopAsyncIteration:
                return
            if inventory.generation > 0:  # else the driver was not asked yet
                self._tell(inventory)

    def _due(self) -> float | None:
        """When what is held back has lasted long enough."""
        return min(self._unsaid.values()) + CALM if self._unsaid else None

    def _tell(self, inventory: Inventory) -> None:
        said, now = self._said or inventory, asyncio.get_running_loop().time()
        began = {uuid: self._unsaid.get(uuid, now) for uuid in turning(said, inventory)}
        self._unsaid = {uuid: since for uuid, since in began.items() if now < since + CALM}
        self._said = believed(said, inventory, self._unsaid)
        left_out = {fault.gpu for fault in self._left_out.value}
        for event in gpu_events(said, self._said, self._ledger.value, left_out):
            self._say(event)
