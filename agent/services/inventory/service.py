"""Keeps the inventory: combines scans, health, held slices and settings into one value."""

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

import msgspec
import structlog

from agent.core.containers.device_list import looks_up_cdi, undefined
from agent.core.containers.edits import EditSettings
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
from agent.core.node.withholding import Withholding
from agent.core.ports import Clock, Specifications
from agent.kit.cell import Cell, News
from agent.kit.ticks import until_tick

MOST_GONE: Final = 64
"""The number of GPUs that left the inventory and are still remembered."""

SPECIFICATIONS_PERIOD: Final = 5.0
"""Seconds between two looks at the CDI specifications. Only what changed is read again."""

SPECIFICATIONS_DEADLINE: Final = 2.0
"""Seconds for one look; of directories that hang, nothing is known."""

IN_MIG_MODE: Final = "it is in MIG mode, which is not shared yet; disable MIG or use another plugin"
NODE_OF_MIG: Final = (
    "the settings name mig as this node's operating mode, which is not shared yet; set "
    "sharing.operatingMode to hami-core or mps, or use another plugin"
)

log = structlog.get_logger(__name__)


class InventoryKeeper:
    """Sole writer of the inventory. Every method publishes at most once; all but run() at once.

    - `held`: the slices in use. `left_out`: the GPUs that are not shared, and why.
    - A GPU that the driver lists but cannot describe keeps its last known facts.
    - A GPU that is gone, filtered out or no longer shareable stays, as not present, while a slice
      of it is held. So does a GPU that is remembered as not ok and that the driver lists but has
      not described since the agent started.
    - So does a GPU that container runtimes do not find by its CDI name.
    """

    def __init__(
        self,
        inventory: Cell[Inventory],
        settings: Cell[SharingSettings],
        clock: Clock,
        recalled: Mapping[GpuUuid, Health] | None = None,
        edits: Cell[EditSettings] | None = None,
        specifications: Specifications | None = None,
    ) -> None:
        self.held: Cell[Held] = Cell({})
        self.left_out: Cell[tuple[GpuFault, ...]] = Cell(())
        self._inventory = inventory
        self._settings = settings
        self._edits = edits or Cell(EditSettings())
        self._specifications = specifications
        self._defined: frozenset[str] | None = None
        self._is_unread = specifications is not None
        self._clock = clock
        self._health: dict[GpuUuid, Health] = dict(recalled or {})
        self._facts: dict[GpuUuid, Gpu] = {}
        self._scan: Scan | None = None
        self._gone: dict[GpuUuid, SharedGpu] = {}
        self._withheld = False

    @property
    def gone(self) -> tuple[SharedGpu, ...]:
        """GPUs that left the inventory since the agent started, the last one first."""
        return tuple(reversed(self._gone.values()))

    async def run(self) -> None:
        """Follow the settings, and the CDI specifications while answers name GPUs by them."""
        changes = News(self._settings, self._edits)
        while True:
            edits, defined, period = self._edits.value, None, None
            if self._specifications is not None and looks_up_cdi(edits):
                period = until_tick(SPECIFICATIONS_PERIOD, turn=1)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SPECIFICATIONS_DEADLINE):
                        defined = await self._specifications.names(edits.cdi_spec_dirs)
            self._defined, self._is_unread = defined, False
            self._publish()
            await changes.wait(period)

    def refresh(self) -> None:
        """Publish at once what follows from the present settings."""
        self._publish()

    def found(self, scan: Scan) -> None:
        """Take over a scan of the driver."""
        self._scan = scan
        self._facts.update({gpu.uuid: gpu for gpu in scan.gpus})
        self._publish()

    def judged(self, health: Mapping[GpuUuid, Health]) -> None:
        """Take over the health of these GPUs."""
        self._health.update(health)
        self._publish()

    def withhold(self, state: Withholding) -> None:
        """Withhold all slices, or offer them again, whatever the health of the GPUs."""
        self._withheld = state.holds
        self._publish()

    def hold(self, held: Held) -> None:
        """Replace the set of slices in use."""
        self.held.set(held)
        self._publish()

    def _publish(self) -> None:
        """Compute the inventory again and publish it if it changed."""
        settings = self._settings.value
        if self._scan is None or (self._is_unread and looks_up_cdi(self._edits.value)):
            return
        held, unwell = frozenset(self.held.value), self._unwell()
        scan = named(self._scan, self._missing(self._scan, held | unwell))
        offer = _SharedGpus(scan, settings, self._facts)
        shared = {gpu.uuid: self._share(gpu, settings) for gpu in offer.shared()}
        missed = (gpu for gpu in shared.values() if not gpu.present)
        offer.faults += [GpuFault(g.uuid, g.obstacle, index=g.gpu.index) for g in missed]
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
            self._inventory.set(msgspec.structs.replace(new, generation=old.generation + 1))

    def _unwell(self) -> frozenset[GpuUuid]:
        """GPUs remembered as not ok, and GPUs of the inventory that the driver never described.

        A GPU whose health checks are switched off does not count.
        """
        kept = (gpu.uuid for gpu in self._inventory.value.gpus if not gpu.gpu.name)
        not_ok = (
            uuid
            for uuid, health in self._health.items()
            if health.condition is not Condition.OK and health.cause != Cause.OFF
        )
        return frozenset((*kept, *not_ok))

    def _missing(self, scan: Scan, known: Iterable[GpuUuid]) -> frozenset[GpuUuid]:
        """The GPUs of `known` that neither this scan nor an earlier one has named."""
        seen = {*(gpu.uuid for gpu in scan.gpus), *(fault.gpu for fault in scan.faults)}
        return frozenset(known) - seen - self._facts.keys()

    def _note_gone(self, old: Inventory, new: Inventory) -> None:
        here = {gpu.uuid for gpu in new.gpus}
        self._gone |= {gpu.uuid: gpu for gpu in old.gpus if gpu.uuid not in here}
        kept = [pair for pair in self._gone.items() if pair[0] not in here]
        self._gone = dict(kept[-MOST_GONE:])

    def _keep(self, gpu: Gpu, settings: SharingSettings, offer: "_SharedGpus") -> SharedGpu:
        """A GPU that stays in the inventory as not present."""
        shared = self._share(gpu, settings)
        unknown = not gpu.name and gpu.uuid not in self.held.value
        return msgspec.structs.replace(
            shared,
            split_count=0 if unknown else shared.split_count,
            present=False,
            there=gpu.uuid in offer.here,
            obstacle=next((fault.text for fault in offer.faults if fault.gpu == gpu.uuid), ""),
            wanted=offer.wants(gpu),
        )

    def _share(self, gpu: Gpu, settings: SharingSettings) -> SharedGpu:
        if gpu.uuid not in self._health:
            self._health[gpu.uuid] = Health(Condition.OK, since=self._clock.now())
        obstacle = undefined((gpu.uuid,), self._edits.value, self._defined)
        return SharedGpu(
            gpu=gpu,
            health=self._health[gpu.uuid],
            split_count=settings.split_count,
            registered_mib=registered_mib(gpu.memory_mib, settings) or 0,
            core_percent=registered_core_percent(settings),
            type_name=type_name(gpu.name),
            mode=settings.mode,
            present=obstacle is None,
            obstacle="; ".join(obstacle or ()),
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
    """Decides which GPUs of a scan are shared; `faults`: why others are not."""

    def __init__(self, scan: Scan, settings: SharingSettings, facts: Mapping[GpuUuid, Gpu]) -> None:
        self._scan = scan
        self._settings = settings
        self._facts = facts
        self.faults: list[GpuFault] = []
        self.here = {
            *(gpu.uuid for gpu in scan.gpus),
            *(fault.gpu for fault in scan.faults if not fault.lost),
        }
        """The GPUs that the driver still lists."""

    def shared(self) -> Iterator[Gpu]:
        """The GPUs to share. A GPU that the driver cannot describe has its last known facts."""
        for gpu in self._scan.gpus:
            reason = self._obstacle(gpu)
            if reason:
                self.faults.append(GpuFault(gpu.uuid, reason, index=gpu.index))
            elif not self._settings.filters(gpu):
                yield gpu
        for fault in self._scan.faults:
            known = self._facts.get(GpuUuid(fault.gpu))
            if fault.gpu in self._settings.filter_uuids or (
                known and self._settings.filters(known)
            ):
                continue
            reason = self._obstacle(known) if known else ""
            if known and not fault.lost and not reason:
                yield known
            else:
                text = reason or f"{fault.text}; {fault.remedy}"
                self.faults.append(msgspec.structs.replace(fault, text=text))

    def absent(self, held: Collection[GpuUuid], unwell: Collection[GpuUuid]) -> Iterator[Gpu]:
        """The GPUs to keep as not present.

        These are held GPUs, lost GPUs with known facts, and `unwell` GPUs without known facts.
        """
        faults = {GpuUuid(fault.gpu): fault for fault in self._scan.faults}
        for uuid in dict.fromkeys((*faults, *held)):
            gpu = known = self._facts.get(uuid)
            if gpu is None:
                # It is from before the start: only its UUID is known, and perhaps its index.
                index = faults[uuid].index if uuid in faults else NO_INDEX
                gpu = Gpu(uuid, index=index, name="", memory_mib=None, pci="")
            is_missed = uuid in unwell if known is None else uuid in faults and faults[uuid].lost
            if uuid in held or (is_missed and self.wants(gpu)):
                yield gpu

    def wants(self, gpu: Gpu) -> bool:
        """Whether the settings and the known facts allow the agent to share the GPU."""
        return not (self._settings.filters(gpu) or (gpu.name and self._obstacle(gpu)))

    def _obstacle(self, gpu: Gpu) -> str:
        """Why the GPU cannot be shared. Empty: it can, or the operator filtered it out."""
        if self._settings.filters(gpu):
            return ""
        if not gpu.name:
            return "the driver does not report its name, which schedulers need"
        if gpu.mig_enabled or self._settings.mode == MIG_MODE:
            return IN_MIG_MODE if gpu.mig_enabled else NODE_OF_MIG
        if registered_mib(gpu.memory_mib, self._settings) is None:
            return "the driver does not report its memory; set sharing.preconfiguredMemoryMiB"
        return ""
