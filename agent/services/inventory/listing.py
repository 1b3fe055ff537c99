"""From the inventory and the held ids to the lists that the kubelet gets."""

import asyncio
from collections.abc import Iterator
from typing import TypeVar

import structlog

from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory, SharedGpu
from agent.core.inventory.slices import Served, SliceGroup, SliceId, SliceList
from agent.kit.cell import Cell

T = TypeVar("T")

_Wanted = tuple[str, int, tuple[tuple[SliceId, ...], ...]]
"""What the ids of a GPU follow from: present name, split count, and what is held by each name."""

log = structlog.get_logger(__name__)


class Listing:
    """Publishes one SliceList per change: what came while it was busy is in the next one.

    Every GPU of the inventory is listed with all ids in use and the lowest free ones up to the
    split count; all slices of a GPU agree on health. Each name of our resource has a list of its
    own, see `of`; `slices` is the one of the present name. A former name has only its held ids.
    """

    def __init__(
        self,
        inventory: Cell[Inventory],
        served: Cell[Served],
        slices: Cell[SliceList],
    ) -> None:
        self._inventory = inventory
        self._served = served
        self._slices = slices
        self._basis: tuple[Inventory, Served] | None = None
        self._lists: dict[str, Cell[SliceList]] = {}
        self._ids: dict[tuple[GpuUuid, str], tuple[_Wanted, tuple[SliceId, ...]]] = {}

    def of(self, resource: str) -> Cell[SliceList]:
        """The list under that name, until it is forgotten."""
        if resource not in self._lists:
            self._lists[resource] = Cell(SliceList())
            self._publish()
        return self._lists[resource]

    def forget(self, resource: str) -> None:
        """Nobody serves that name any more."""
        self._lists.pop(resource, None)

    def refresh(self) -> None:
        """Publish what follows from inventory and held ids, unless it was from these."""
        if self._basis != (self._inventory.value, self._served.value):
            self._publish()

    async def run(self) -> None:
        """Follow inventory and held ids until both cells close."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(self._inventory))
            tasks.create_task(self._follow(self._served))

    async def _follow(self, cell: Cell[T]) -> None:
        async for _ in cell.follow():
            self.refresh()

    def _publish(self) -> None:
        inventory = self._inventory.value
        if inventory.generation == 0:
            return  # no scan yet: an empty list would take every slice from the kubelet
        served = self._served.value
        self._ids = {
            (uuid, name): entry
            for (uuid, name), entry in self._ids.items()
            if inventory.find(uuid) and name in served.names
        }
        self._lists.setdefault(served.present, Cell(SliceList()))
        for name, cell in self._lists.items():
            if name in served.names:
                _update(cell, name, tuple(self._groups(name)))
        self._slices.set(self._lists[served.present].value)
        self._basis = inventory, served

    def _groups(self, name: str) -> Iterator[SliceGroup]:
        for gpu in self._inventory.value.gpus:
            ids = self._listed(gpu, name)
            if ids or name == self._served.value.present:
                numa = gpu.gpu.numa if gpu.numa_hint else None
                yield SliceGroup(gpu.uuid, ids, self._inventory.value.offers(gpu), numa)

    def _listed(self, gpu: SharedGpu, name: str) -> tuple[SliceId, ...]:
        served = self._served.value
        held = tuple(served.ids_of(gpu.uuid, one) for one in served.names)
        wanted = served.present, gpu.split_count, held
        known = self._ids.get((gpu.uuid, name))
        if known is None or known[0] != wanted:
            known = wanted, served.listed(gpu.uuid, gpu.split_count, name)
            self._ids[gpu.uuid, name] = known
        return known[1]


def _update(cell: Cell[SliceList], name: str, groups: tuple[SliceGroup, ...]) -> None:
    """Publish the list if it is another one than before."""
    old = cell.value
    if old.generation == 0 or groups != old.groups:
        cell.set(SliceList(old.generation + 1, groups))
        log.info(
            "list.changed",
            resource=name,
            generation=old.generation + 1,
            slices=sum(len(group.ids) for group in groups),
            healthy=sum(len(group.ids) for group in groups if group.healthy),
        )
