"""GPUs that are not shared although nobody filtered them out: one Event each, with the reason."""

import asyncio
from collections.abc import Callable
from typing import Final

from agent.core.changes import NodeEvent
from agent.core.condition import Cause
from agent.core.gpu import GpuFault, GpuUuid, Trouble
from agent.core.inventory import Inventory
from agent.kit.cell import Cell

WAKING: Final = 30.0
"""Seconds for which a GPU that does not answer is taken for one that is waking."""


class LeftOut:
    """Says which GPUs are left out, and why; again when the reason is another one.

    Of one that does not answer only when that lasts: GPUs take seconds to wake.

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
        seen: frozenset[GpuFault] = frozenset()
        async with asyncio.TaskGroup() as tasks:
            waiting: set[asyncio.Task[None]] = set()
            async for faults in self._left_out.follow():
                for fault in faults:
                    if fault in seen:
                        continue
                    if fault.trouble is Trouble.SILENT:
                        waiting.add(task := tasks.create_task(self._tell_later(fault)))
                        task.add_done_callback(waiting.discard)
                    else:
                        self._tell(fault)
                seen = frozenset(faults)
            for task in waiting:
                task.cancel()

    async def _tell_later(self, fault: GpuFault) -> None:
        await asyncio.sleep(WAKING)
        if fault in self._left_out.value:
            self._tell(fault)

    def _tell(self, fault: GpuFault) -> None:
        if not self._is_told(fault):
            text = f"GPU {fault.gpu} is not shared: {fault.text} [GpuLeftOut]"
            self._say(NodeEvent("GpuLeftOut", text, warning=True))

    def _is_told(self, fault: GpuFault) -> bool:
        known = self._inventory.value.find(GpuUuid(fault.gpu))
        if known is None or known.health.cause == Cause.OFF:
            return False
        return fault.lost or not known.health.serving
