"""Remembers what each GPU registered lately, for pods that were placed before a change."""

import asyncio
from collections import deque
from collections.abc import Mapping

from agent.core.allocation.room import GpuUse
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory
from agent.kit.cell import Cell

WINDOW = 60.0
"""Seconds for which a former amount counts, because the scheduler may have decided by it."""

LIMIT = 256
"""The most snapshots that are kept; the oldest are dropped first."""

Amounts = Mapping[GpuUuid, GpuUse]


class RecentlyRegistered:
    """Remembers what was registered in the last 60 s."""

    def __init__(self, inventory: Cell[Inventory]) -> None:
        self._inventory = inventory
        self._now = _amounts(inventory.value)
        self._before: deque[tuple[float, Amounts]] = deque(maxlen=LIMIT)

    async def run(self) -> None:
        """Follow the inventory until its cell closes."""
        async for inventory in self._inventory.follow():
            amounts = _amounts(inventory)
            if amounts != self._now:
                self._before.append((asyncio.get_running_loop().time(), self._now))
                self._now = amounts

    def greatest(self) -> Amounts:
        """By GPU, the greatest memory (MiB) and compute (percent) registered in the window."""
        oldest = asyncio.get_running_loop().time() - WINDOW
        while self._before and self._before[0][0] < oldest:
            self._before.popleft()
        greatest = dict(_amounts(self._inventory.value))
        for _, amounts in self._before:
            for uuid, use in amounts.items():
                greatest[uuid] = greatest.get(uuid, GpuUse()).peak(use)
        return greatest


def _amounts(inventory: Inventory) -> Amounts:
    return {gpu.uuid: GpuUse(gpu.registered_mib, gpu.core_percent) for gpu in inventory.gpus}
