"""GPUs that are not shared although nobody filtered them out: one Event each, with the reason."""

from collections.abc import Callable

from agent.core.changes import NodeEvent
from agent.core.condition import Cause
from agent.core.gpu import GpuFault, GpuUuid
from agent.core.inventory import Inventory
from agent.kit.cell import Cell


class LeftOut:
    """Says which GPUs are left out, and why; again when the reason is another one.

    A GPU that is kept in view and is lost or ill is its health's to tell, where that is looked
    after: it was told when it became so.
    """

    def __init__(
        self,
        left_out: Cell[tuple[GpuFault, ...]],
        inventory: Cell[Inventory],
        say: Callable[[NodeEvent], None],
    ) -> None:
        self._left_out = left_out
        self._inventory = inventory
        self._say = say

    async def run(self) -> None:
        """Follow what is left out until the cell closes."""
        said: frozenset[GpuFault] = frozenset()
        async for faults in self._left_out.follow():
            for fault in faults:
                if fault not in said and not self._is_told(fault):
                    text = f"GPU {fault.gpu} is not shared: {fault.text} [GpuLeftOut]"
                    self._say(NodeEvent("GpuLeftOut", text, warning=True))
            said = frozenset(faults)

    def _is_told(self, fault: GpuFault) -> bool:
        known = self._inventory.value.find(GpuUuid(fault.gpu))
        if known is None or known.health.cause == Cause.OFF:
            return False
        return fault.lost or not known.health.serving
