"""The sole writer of the inventory: what was found, how it is judged, what of it is held."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

import structlog

from agent.core.health.nameless import named
from agent.core.inventory.condition import Cause, Condition, Health
from agent.core.inventory.gpu import NO_INDEX, Gpu, GpuFault, GpuUuid, Scan
from agent.core.inventory.inventory import Inventory, SharedGpu, diff
from agent.core.inventory.slices import (
    MIG_MODE,
    Held,
    SharingSettings,
    registered_core_percent,
    registered_mib,
    type_name,
)
from agent.core.node.troubles import remedy
from agent.core.node.withholding import Withholding
from agent.core.ports import Clock
from agent.kit.cell import Cell

MOST_GONE: Final = 64
"""GPUs that left are known for as long as no more than these left after them."""

IN_MIG_MODE: Final = "it is in MIG mode, which is not shared yet; disable MIG or use another plugin"
NODE_OF_MIG: Final = (
    "the settings name mig as this node's operating mode, which is not shared yet; set "
    "sharing.operatingMode to hami-core or mps, or use another plugin"
)

log = structlog.get_logger(__name__)


class InventoryKeeper:
    """Keeps Cell[Inventory] true. Every method is synchronous: one change, one publication.

    `held` is published too, for whoever lists ids: the slices in use.
    `left_out` says which GPUs are not shared and why. A GPU stays as it was known while the driver
    lists it but cannot describe it; a GPU that is gone, filtered out or no longer shareable stays,
    as not present, while a slice of it is held. So does one that is remembered as not well, and
    that the driver lists but has not described since we started.
    """

    def __init__(
        self,
        inventory: Cell[Inventory],
        settings: Cell[SharingSettings],
        clock: Clock,
        recalled: Mapping[GpuUuid, Health] | None = None,
    ) -> None:
        self.held: Cell[Held] = Cell({})
        self.left_out: Cell[tuple[GpuFault, ...]] = Cell(())
        self._inventory = inventory
        self._settings = settings
        self._clock = clock
        self._health: dict[GpuUuid, Health] = dict(recalled or {})
        self._facts: dict[GpuUuid, Gpu] = {}
        self._scan: Scan | None = None
        self._gone: dict[GpuUuid, SharedGpu] = {}
        self._withheld = False

    @property
    def gone(self) -> tuple[SharedGpu, ...]:
        """Those that left the inventory since we started, as they were; the last one first."""
        return tuple(reversed(self._gone.values()))

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

    def withhold(self, state: Withholding) -> None:
        """While that holds nothing is on offer, whatever the GPUs are like."""
        self._withheld = state.holds
        self._publish()

    def hold(self, held: Held) -> None:
        """These slices are in use, and no others."""
        self.held.set(held)
        self._publish()

    def _publish(self) -> None:
        """Compute everything anew; publish only what differs."""
        settings = self._settings.value
        if self._scan is None:
            return
        held, unwell = frozenset(self.held.value), self._unwell()
        scan = named(self._scan, self._missing(self._scan, held | unwell))
        offer = _SharedGpus(scan, settings, self._facts)
        shared = {gpu.uuid: self._share(gpu, settings) for gpu in offer.shared()}
        absent = offer.absent(sorted(held - shared.keys()), unwell - shared.keys())
        shared |= {gpu.uuid: self._keep(gpu, settings, offer) for gpu in absent}
        self._facts = {u: gpu for u, gpu in self._facts.items() if u in shared or u in offer.here}
        old = self._inventory.value
        new = Inventory(
            generation=old.generation,
            gpus=tuple(sorted(shared.values(), key=_place)),
            driver_version=scan.driver_version,
            withheld=self._withheld,
        )
        self._tell(tuple(offer.faults))
        if new != old:
            self._note_gone(old, new)
            change = diff(old, new)
            log.debug(
                "inventory.changed",
                generation=old.generation + 1,
                added=change.added,
                removed=change.removed,
                changed=change.changed,
            )
            self._inventory.set(dataclasses.replace(new, generation=old.generation + 1))

    def _unwell(self) -> frozenset[GpuUuid]:
        """Those remembered as not well, and those kept in view for that, until they are described.

        One that nobody looks after is not known to be anything.
        """
        kept = (gpu.uuid for gpu in self._inventory.value.gpus if not gpu.gpu.name)
        told = (
            uuid
            for uuid, health in self._health.items()
            if health.condition is not Condition.OK and health.cause != Cause.OFF
        )
        return frozenset((*kept, *told))

    def _missing(self, scan: Scan, known: Iterable[GpuUuid]) -> frozenset[GpuUuid]:
        """Those of `known` that neither this scan nor an earlier one has named."""
        seen = {*(gpu.uuid for gpu in scan.gpus), *(fault.gpu for fault in scan.faults)}
        return frozenset(known) - seen - self._facts.keys()

    def _note_gone(self, old: Inventory, new: Inventory) -> None:
        here = {gpu.uuid for gpu in new.gpus}
        self._gone |= {gpu.uuid: gpu for gpu in old.gpus if gpu.uuid not in here}
        kept = [pair for pair in self._gone.items() if pair[0] not in here]
        self._gone = dict(kept[-MOST_GONE:])

    def _keep(self, gpu: Gpu, settings: SharingSettings, offer: "_SharedGpus") -> SharedGpu:
        """One that is kept in view, as not present."""
        shared = self._share(gpu, settings)
        unknown = not gpu.name and gpu.uuid not in self.held.value
        return dataclasses.replace(
            shared,
            split_count=0 if unknown else shared.split_count,
            present=False,
            there=gpu.uuid in offer.here,
            obstacle=next((one.text for one in offer.faults if one.gpu == gpu.uuid), ""),
            wanted=offer.wants(gpu),
        )

    def _share(self, gpu: Gpu, settings: SharingSettings) -> SharedGpu:
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


class _SharedGpus:
    """Which GPUs of a scan are shared, and what keeps the others out."""

    def __init__(self, scan: Scan, settings: SharingSettings, facts: Mapping[GpuUuid, Gpu]) -> None:
        self._scan = scan
        self._settings = settings
        self._facts = facts
        self.faults: list[GpuFault] = []
        self.here = {
            *(gpu.uuid for gpu in scan.gpus),
            *(fault.gpu for fault in scan.faults if not fault.lost),
        }
        """Whom the driver still lists."""

    def shared(self) -> Iterator[Gpu]:
        """The GPUs to share; one that cannot be described just now is taken as last known."""
        for gpu in self._scan.gpus:
            reason = self._obstacle(gpu)
            if reason:
                self.faults.append(GpuFault(gpu.uuid, reason, index=gpu.index))
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
                text = reason or f"{fault.text}; {remedy(fault.trouble)}"
                self.faults.append(dataclasses.replace(fault, text=text))

    def absent(self, held: Collection[GpuUuid], unwell: Collection[GpuUuid]) -> Iterator[Gpu]:
        """The GPUs to keep as not present: held ones, and some that the driver does not describe.

        Of these the known ones that are lost, and the unknown ones that are not well.
        """
        faults = {GpuUuid(fault.gpu): fault for fault in self._scan.faults}
        for uuid in dict.fromkeys((*faults, *held)):
            gpu = known = self._facts.get(uuid)
            if gpu is None:
                # From before we started: nothing is known but its identity, and perhaps its index.
                index = faults[uuid].index if uuid in faults else NO_INDEX
                gpu = Gpu(uuid, index=index, name="", memory_mib=None, pci="")
            is_missed = uuid in unwell if known is None else uuid in faults and faults[uuid].lost
            if uuid in held or (is_missed and self.wants(gpu)):
                yield gpu

    def wants(self, gpu: Gpu) -> bool:
        """Whether nothing but the driver keeps it from being shared, as far as it is known."""
        return not (self._filtered(gpu) or (gpu.name and self._obstacle(gpu)))

    def _filtered(self, gpu: Gpu) -> bool:
        return gpu.uuid in self._settings.filter_uuids or gpu.index in self._settings.filter_indexes

    def _obstacle(self, gpu: Gpu) -> str:
        """Why a GPU that the operator did not filter out cannot be shared; empty: it can."""
        if self._filtered(gpu):
            return ""
        if not gpu.name:
            return "the driver does not tell its name, by which schedulers know a GPU"
        if gpu.mig_enabled or self._settings.mode == MIG_MODE:
            return IN_MIG_MODE if gpu.mig_enabled else NODE_OF_MIG
        if registered_mib(gpu.memory_mib, self._settings) is None:
            return "the driver does not tell its memory; set sharing.preconfiguredMemoryMiB"
        return ""
