"""From the inventory and the held ids to the list that the kubelet gets."""

import asyncio
from collections.abc import Mapping
from typing import TypeVar

import structlog

from agent.core.gpu import GpuUuid
from agent.core.inventory import Inventory, SharedGpu
from agent.core.slices import SliceGroup, SliceId, SliceList, listed_ids
from agent.kit.cell import Cell

T = TypeVar("T")

log = structlog.get_logger(__name__)


class Listing:
    """Publishes one SliceList per change: what came while it was busy is in the next one.

    Every GPU of the inventory is listed with all ids in use and the lowest free ones up to the
    split count; all slices of a GPU agree on health.
    """

    def __init__(
        self,
        inventory: Cell[Inventory],
        held: Cell[Mapping[GpuUuid, tuple[SliceId, ...]]],
        slices: Cell[SliceList],
    ) -> None:
        self._inventory = inventory
        self._held = held
        self._slices = slices
        self._ids: dict[GpuUuid, tuple[tuple[int, tuple[SliceId, ...]], tuple[SliceId, ...]]] = {}

    async def run(self) -> None:
        """Follow inventory and held ids until both cells close."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(self._inventory))
            tasks.create_task(self._follow(self._held))

    async def _follow(self, cell: Cell[T]) -> None:
        async for _ in cell.follow():
            self._publish()

    def _publish(self) -> None:
        inventory = self._inventory.value
        if inventory.generation == 0:
            return  # no scan yet: an empty list would take every slice from the kubelet
        groups = tuple(self._group(gpu) for gpu in inventory.gpus)
        self._ids = {uuid: entry for uuid, entry in self._ids.items() if inventory.find(uuid)}
        old = self._slices.value
        if old.generation and groups == old.groups:
            return
        self._slices.set(SliceList(old.generation + 1, groups))
        log.info(
            "list.changed",
            generation=old.generation + 1,
            slices=sum(len(group.ids) for group in groups),
            healthy=sum(len(group.ids) for group in groups if group.healthy),
        )

    def _group(self, gpu: SharedGpu) -> SliceGroup:
        held = self._held.value.get(gpu.uuid, ())
        wanted = (gpu.split_count, held)
        known = self._ids.get(gpu.uuid)
        if known is None or known[0] != wanted:
            known = wanted, listed_ids(gpu.uuid, gpu.split_count, held)
            self._ids[gpu.uuid] = known
        numa = gpu.gpu.numa if gpu.numa_hint else None
        return SliceGroup(gpu.uuid, known[1], gpu.serving, numa)
