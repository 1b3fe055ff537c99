"""The Node's condition GpuDegraded, for those who want it: written when it changes."""

import asyncio
import dataclasses

from agent.core.inventory import Inventory
from agent.core.node_condition import NodeCondition, gpu_degraded
from agent.core.ports import Clock, NodeStatusApi
from agent.kit.cell import Cell


class GpuCondition:
    """Keeps the condition true; None in the place of the API: nobody wants it."""

    def __init__(self, api: NodeStatusApi | None, inventory: Cell[Inventory], clock: Clock) -> None:
        self._api = api
        self._inventory = inventory
        self._clock = clock
        self._written: NodeCondition | None = None

    async def run(self) -> None:
        """Follow the inventory until the cell closes. Raises ApiError; started again, it goes on.

        A condition that says the same with another `since` is left as it is.
        """
        if self._api is None:
            await asyncio.Event().wait()
            return
        async for inventory in self._inventory.follow():
            if inventory.generation == 0:
                continue
            wanted = self._continued(gpu_degraded(inventory, self._clock.now()))
            if self._written is None or _says(wanted) != _says(self._written):
                await self._api.set_condition(wanted)
                self._written = wanted

    def _continued(self, wanted: NodeCondition) -> NodeCondition:
        """It has been so since it was first so; what it says of whom may have changed since."""
        if self._written is None or self._written.status != wanted.status:
            return wanted
        return dataclasses.replace(wanted, since=self._written.since)


def _says(condition: NodeCondition) -> tuple[bool, str]:
    return condition.status, condition.message
