"""Writes an Event when a GPU of this Node is cordoned or uncordoned, by whatever program."""

from collections.abc import Callable

from agent.core.cluster.annotations import CORDON
from agent.core.cluster.changes import NodeEvent
from agent.core.cluster.pods import NodeView
from agent.core.inventory.inventory import Inventory
from agent.core.node.cordon import cordon_events, read_cordon
from agent.kit.cell import Cell


class CordonEvents:
    """Follows the cordon annotation of the Node. What it is at the first look makes no Event."""

    def __init__(
        self,
        node: Cell[NodeView | None],
        inventory: Cell[Inventory],
        say: Callable[[NodeEvent], None],
    ) -> None:
        self._node = node
        self._inventory = inventory
        self._say = say

    async def run(self) -> None:
        """Follow the Node until the cell closes."""
        before: frozenset[str] | None = None
        async for node in self._node.follow():
            if node is None:
                continue
            now = frozenset(read_cordon(node.annotations.get(CORDON)))
            for event in cordon_events(
                now if before is None else before, now, self._inventory.value.gpus
            ):
                self._say(event)
            before = now
