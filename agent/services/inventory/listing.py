"""Makes the slice lists for the kubelet from the inventory and the held ids."""

import asyncio
from typing import TypeVar

import structlog

from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory, SharedGpu
from agent.core.inventory.slices import Held, SliceGroup, SliceId, SliceList, listed_ids
from agent.kit.cell import Cell

T = TypeVar("T")

_Wanted = tuple[int, tuple[SliceId, ...]]
"""The split count of a GPU and its held ids, which decide its listed ids."""

log = structlog.get_logger(__name__)


class Listing:
    """Publishes a SliceList when the inventory or the held ids change.

    Every GPU of the inventory is listed with all ids in use and the lowest free ids up to the
    split count. All slices of a GPU have the same health.
    """

    def __init__(
        self, inventory: Cell[Inventory], held: Cell[Held], slices: Cell[SliceList]
    ) -> None:
        self._inventory = inventory
        self._held = held
        self._slices = slices
        self._basis: tuple[Inventory, Held] | None = None
        self._ids: dict[GpuUuid, tuple[_Wanted, tuple[SliceId, ...]]] = {}

    def refresh(self) -> None:
        """Publish a list if the inventory or the held ids changed since the last one."""
        if self._basis != (self._inventory.value, self._held.value):
            self._publish()

    async def run(self) -> None:
        """Follow inventory and held ids until both cells close."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(self._inventory))
            tasks.create_task(self._follow(self._held))

    async def _follow(self, cell: Cell[T]) -> None:
        async for _ in cell.follow():
            self.refresh()

    def _publish(self) -> None:
        inventory, old = self._inventory.value, self._slices.value
        if inventory.generation == 0:
            return  # no scan yet: an empty list would take every slice from the kubelet
        self._ids = {uuid: ids for uuid, ids in self._ids.items() if inventory.find(uuid)}
        self._basis = inventory, self._held.value
        groups = tuple(map(self._group, inventory.gpus))
        if old.generation > 0 and groups == old.groups:
            return
        self._slices.set(SliceList(old.generation + 1, groups))
        log.info(
            "list.changed",
            generation=old.generation + 1,
            slices=sum(len(group.ids) for group in groups),
            healthy=sum(len(group.ids) for group in groups if group.healthy),
        )

    def _group(self, gpu: SharedGpu) -> SliceGroup:
        numa = gpu.gpu.numa if gpu.numa_hint else None
        return SliceGroup(gpu.uuid, self._listed(gpu), self._inventory.value.offers(gpu), numa)

    def _listed(self, gpu: SharedGpu) -> tuple[SliceId, ...]:
        wanted = gpu.split_count, self._held.value.get(gpu.uuid, ())
        known = self._ids.get(gpu.uuid)
        if known is None or known[0] != wanted:
            known = self._ids[gpu.uuid] = wanted, listed_ids(gpu.uuid, *wanted)
        return known[1]
