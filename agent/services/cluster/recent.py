"""What each GPU had registered of late: a pod placed before a change keeps its right to fit."""

import asyncio
from collections import deque
from collections.abc import Mapping

from agent.core.allocation.room import GpuUse
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory
from agent.kit.cell import Cell

WINDOW = 60.0
"""Seconds for which the greater amount counts: the scheduler decided by what it had read."""

LIMIT = 256
"""Snapshots kept at most; a storm of changes forgets the oldest first."""

Amounts = Mapping[GpuUuid, GpuUse]


class RecentlyRegistered:
    """Remembers what was registered until a minute ago."""

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
        """By GPU, the greatest memory and compute that were registered in the window."""
        oldest = asyncio.get_running_loop().time() - WINDOW
        while self._before and self._before[0][0] < oldest:
            self._before.popleft()
        found = dict(_amounts(self._inventory.value))
        for _, amounts in self._before:
            for uuid, use in amounts.items():
                found[uuid] = found.get(uuid, GpuUse()).peak(use)
        return found


def _amounts(inventory: Inventory) -> Amounts:
    return {gpu.uuid: GpuUse(gpu.registered_mib, gpu.core_percent) for gpu in inventory.gpus}
