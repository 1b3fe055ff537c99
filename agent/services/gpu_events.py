"""GPUs that fall ill, recover, fall silent, come or go: Events for people."""

from collections.abc import Callable

from agent.core.changes import NodeEvent
from agent.core.gpu_events import gpu_events
from agent.core.inventory import Inventory
from agent.core.ledger import Ledger
from agent.kit.cell import Cell


class GpuEvents:
    """Says what differs from the inventory before. The first one is where it begins.

    So what a restarted agent remembers of a GPU is not said again.
    """

    def __init__(
        self,
        inventory: Cell[Inventory],
        ledger: Cell[Ledger],
        say: Callable[[NodeEvent], None],
    ) -> None:
        self._inventory = inventory
        self._ledger = ledger
        self._say = say
        self._said: Inventory | None = None

    async def run(self) -> None:
        """Follow the inventory until the cell closes."""
        async for inventory in self._inventory.follow():
            if inventory.generation == 0:
                continue  # the driver was not asked yet
            said, self._said = self._said, inventory
            if said is not None:
                for event in gpu_events(said, inventory, self._ledger.value):
                    self._say(event)
