"""Writes Events when GPUs change or are left out, and the Node condition GpuDegraded."""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from agent.core.allocation.room import takes_room
from agent.core.cluster.changes import NodeCondition, NodeEvent
from agent.core.cluster.pods import PodTable
from agent.core.health.news import believed, gpu_degraded, gpu_events, turning
from agent.core.inventory.condition import Cause
from agent.core.inventory.gpu import GpuFault, GpuUuid, Trouble
from agent.core.inventory.inventory import Inventory
from agent.core.ports import Clock, NodeStatusApi
from agent.core.state.ledger import Ledger
from agent.kit.cell import Cell

CALM: Final = 30.0
"""Seconds that a change which may reverse (`turning`) must last before its Event."""

WAKING: Final = 30.0
"""Seconds without an answer before a GPU is reported as left out: it may be initialising."""


class GpuEvents:
    """Writes Events for the differences from one inventory to the next.

    The first inventory makes no Event, so a restarted agent does not repeat Events. `left_out`: the
    GPUs about which LeftOut writes Events.
    """

    def __init__(
        self,
        inventory: Cell[Inventory],
        ledger: Cell[Ledger],
        pods: Cell[PodTable],
        left_out: Cell[tuple[GpuFault, ...]],
        say: Callable[[NodeEvent], None],
    ) -> None:
        self._inventory = inventory
        self._ledger = ledger
        self._pods = pods
        self._left_out = left_out
        self._say = say
        self._said: Inventory | None = None
        self._unsaid: dict[GpuUuid, float] = {}
        """The GPUs whose Events are held back, and since when (loop time)."""

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
        """The loop time at which the next Event that is held back is due."""
        return min(self._unsaid.values()) + CALM if self._unsaid else None

    def _tell(self, inventory: Inventory) -> None:
        said, now = self._said or inventory, asyncio.get_running_loop().time()
        began = {uuid: self._unsaid.get(uuid, now) for uuid in turning(said, inventory)}
        self._unsaid = {uuid: since for uuid, since in began.items() if now < since + CALM}
        self._said = believed(said, inventory, self._unsaid)
        left_out = {fault.gpu for fault in self._left_out.value}
        # A row stays for a while after its pod has ended.
        rows, pods = self._ledger.value.rows, self._pods.value
        holding = Ledger(tuple(row for row in rows if takes_room(row, pods)))
        for event in gpu_events(said, self._said, holding, left_out):
            self._say(event)


class LeftOut:
    """Writes an Event for each GPU that is left out, and another when the reason changes.

    - For a GPU that does not answer, it waits WAKING seconds: GPUs take seconds to initialise.
    - A lost or unhealthy GPU that is still in the inventory gets no Event here, because GpuEvents
      has written one. Exception: health checks are off.
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


class GpuCondition:
    """Keeps the Node condition GpuDegraded up to date. Without an API it does nothing."""

    def __init__(self, api: NodeStatusApi | None, inventory: Cell[Inventory], clock: Clock) -> None:
        self._api = api
        self._inventory = inventory
        self._clock = clock
        self._written: NodeCondition | None = None

    async def run(self) -> None:
        """Follow the inventory until the cell closes. Raises ApiError; it can be started again.

        It does not write a condition that differs only in `since`.
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
        """`wanted` with the `since` of the written condition while the status stays the same."""
        if self._written is None or self._written.status != wanted.status:
            return wanted
        return msgspec.structs.replace(wanted, since=self._written.since)


def _says(condition: NodeCondition) -> tuple[bool, str]:
    return condition.status, condition.message
