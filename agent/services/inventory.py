"""The sole writer of the inventory: what was found, how it is judged, what of it is held."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import structlog

from agent.core.condition import Condition, Health
from agent.core.gpu import NO_INDEX, Gpu, GpuFault, GpuUuid, Scan
from agent.core.inventory import Inventory, SharedGpu, diff
from agent.core.ports import Clock
from agent.core.slices import (
    MIG_MODE,
    Held,
    Served,
    SharingSettings,
    registered_core_percent,
    registered_mib,
    type_name,
)
from agent.kit.cell import Cell

log = structlog.get_logger(__name__)


class InventoryKeeper:
    """Keeps Cell[Inventory] true. Every method is synchronous: one change, one publication.

    `served` is published too, for whoever lists ids: what is held, by the names of our resource.
    `left_out` says which GPUs are not shared and why. A GPU stays as it was known while the driver
    lists it but cannot describe it; a GPU that is gone, filtered out or no longer shareable stays,
    as not present, while a slice of it is held.
    """

    def __init__(
        self,
        inventory: Cell[Inventory],
        settings: Cell[SharingSettings],
        clock: Clock,
        recalled: Mapping[GpuUuid, Health] | None = None,
    ) -> None:
        self.served: Cell[Served] = Cell(Served(settings.value.resource))
        self.left_out: Cell[tuple[GpuFault, ...]] = Cell(())
        self._inventory = inventory
        self._settings = settings
        self._clock = clock
        self._health: dict[GpuUuid, Health] = dict(recalled or {})
        self._facts: dict[GpuUuid, Gpu] = {}
        self._scan: Scan | None = None

    async def run(self) -> None:
        """Follow the settings for ever."""
        async for _ in self._settings.follow():
            self._publish()

    def refresh(self) -> None:
        """The settings are others: publish what follows from them at once."""
        self._publish()

    def found(self, scan: Scan) -> None:
        """The driver was asked: these GPUs are here."""
        self._scan = scan
        self._facts.update({gpu.uuid: gpu for gpu in scan.gpus})
        self._publish()

    def judged(self, health: Mapping[GpuUuid, Health]) -> None:
        """These GPUs are so; the others stay as they were."""
        self._health.update(health)
        self._publish()

    def hold(self, held: Mapping[str, Held]) -> None:
        """These slices are in use, by the names that they were asked by, and no others."""
        self.served.set(Served(self._settings.value.resource, held))
        self._publish()

    def _publish(self) -> None:
        """Compute everything anew; publish only what differs."""
        settings = self._settings.value
        self.served.set(dataclasses.replace(self.served.value, present=settings.resource))
        if self._scan is None:
            return
        offer = _Offer(self._scan, settings, self._facts)
        here = {
            *(gpu.uuid for gpu in self._scan.gpus),
            *(fault.gpu for fault in self._scan.faults if not fault.lost),
        }
        shared = {gpu.uuid: self._share(gpu, settings) for gpu in offer.shared()}
        shared |= {
            gpu.uuid: self._share(gpu, settings, present=False, there=gpu.uuid in here)
            for gpu in offer.absent(sorted(self.served.value.gpus - shared.keys()))
        }
        self._facts = {u: gpu for u, gpu in self._facts.items() if u in shared or u in here}
        old = self._inventory.value
        new = Inventory(
            generation=old.generation,
            gpus=tuple(sorted(shared.values(), key=_place)),
            driver_version=self._scan.driver_version,
        )
        self._tell(tuple(offer.faults))
        if new != old:
            change = diff(old, new)
            log.debug(
                "inventory.changed",
                generation=old.generation + 1,
                added=change.added,
                removed=change.removed,
                changed=change.changed,
            )
            self._inventory.set(dataclasses.replace(new, generation=old.generation + 1))

    def _share(
        self, gpu: Gpu, settings: SharingSettings, *, present: bool = True, there: bool = True
    ) -> SharedGpu:
        if gpu.uuid not in self._health:
            self._health[gpu.uuid] = Health(Condition.OK, since=self._clock.now())
        return SharedGpu(
            gpu=gpu,
            health=self._health[gpu.uuid],
            split_count=settings.split_count,
            registered_mib=registered_mib(gpu.memory_mib, settings) or 0,
            core_percent=registered_core_percent(settings),
            type_name=type_name(gpu.name),
            mode=settings.mode,
            present=present,
            there=there,
            numa_hint=settings.numa_topology,
        )

    def _tell(self, faults: tuple[GpuFault, ...]) -> None:
        before = self.left_out.value
        if self.left_out.set(faults):
            for fault in faults:
                if fault not in before:
                    log.warning("inventory.gpu_left_out", gpu=fault.gpu, err=fault.text)


def _place(shared: SharedGpu) -> tuple[bool, int, GpuUuid]:
    return shared.gpu.index == NO_INDEX, shared.gpu.index, shared.uuid


class _Offer:
    """Which GPUs of a scan are shared, and what keeps the others out."""

    def __init__(self, scan: Scan, settings: SharingSettings, facts: Mapping[GpuUuid, Gpu]) -> None:
        self._scan = scan
        self._settings = settings
        self._facts = facts
        self.faults: list[GpuFault] = []

    def shared(self) -> Iterator[Gpu]:
        """The GPUs to share; one that cannot be described just now is taken as last known."""
        for gpu in self._scan.gpus:
            reason = self._obstacle(gpu)
            if reason:
                self.faults.append(GpuFault(gpu.uuid, reason))
            elif not self._filtered(gpu):
                yield gpu
        for fault in self._scan.faults:
            known = self._facts.get(GpuUuid(fault.gpu))
            if fault.gpu in self._settings.filter_uuids or (known and self._filtered(known)):
                continue
            reason = self._obstacle(known) if known else ""
            if known and not fault.lost and not reason:
                yield known
            else:
                self.faults.append(GpuFault(fault.gpu, reason or fault.text, fault.lost))

    def absent(self, held: Iterable[GpuUuid]) -> Iterator[Gpu]:
        """The GPUs to list as not present: lost ones that the driver still lists, and held ones."""
        lost = [GpuUuid(fault.gpu) for fault in self._scan.faults if fault.lost]
        for uuid in dict.fromkeys((*lost, *held)):
            known = self._facts.get(uuid)
            if known is not None:
                if uuid in held or not (self._filtered(known) or self._obstacle(known)):
                    yield known
            elif uuid in held:
                # Held since before we started, and gone: nothing is known but its identity.
                yield Gpu(uuid, index=NO_INDEX, name="", memory_mib=None, pci="")

    def _filtered(self, gpu: Gpu) -> bool:
        return gpu.uuid in self._settings.filter_uuids or gpu.index in self._settings.filter_indexes

    def _obstacle(self, gpu: Gpu) -> str:
        """Why a GPU that the operator did not filter out cannot be shared; empty: it can."""
        if self._filtered(gpu):
            return ""
        if not gpu.name:
            return "the driver does not tell its name, by which schedulers know a GPU"
        if gpu.mig_enabled or self._settings.mode == MIG_MODE:
            return "it is in MIG mode, which is not shared yet; disable MIG or use another plugin"
        if registered_mib(gpu.memory_mib, self._settings) is None:
            return "the driver does not tell its memory; set sharing.preconfiguredMemoryMiB"
        return ""
