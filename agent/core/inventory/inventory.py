"""The inventory: an immutable snapshot of the shared GPUs, their shares and their health."""

from typing import Final

import msgspec

from agent.core.inventory.condition import Health
from agent.core.inventory.gpu import Gpu, GpuUuid

WITHHELD: Final = "no slice of this node is on offer: `/readyz?verbose` says why at `offer`"


class SharedGpu(msgspec.Struct, frozen=True):
    """One GPU and how it is shared.

    - `registered_mib` and `core_percent`: MiB and percent after scaling.
    - `type_name`: the model name with the prefix `NVIDIA`, by which the scheduler matches.
    - `mode`: HAMi's operating mode.
    - `present`: False if the GPU is shown but not offered. Either it vanished or is no longer
      shared while a container holds a slice of it; or it is unhealthy and the driver lists it
      without describing it; or the container runtime would not find it. In the second case only
      its UUID may be known, and it has no slices.
    - `there`: the driver still lists it.
    - `obstacle`: why it is not present; empty if nothing more is known.
    - `wanted`: False if the settings or MIG mode exclude it.
    - `numa_hint`: whether the list tells the kubelet its NUMA node.
    """

    gpu: Gpu
    health: Health
    split_count: int
    registered_mib: int
    core_percent: int
    type_name: str
    mode: str
    present: bool = True
    there: bool = True
    obstacle: str = ""
    wanted: bool = True
    numa_hint: bool = True

    @property
    def uuid(self) -> GpuUuid:
        """The UUID of the GPU."""
        return self.gpu.uuid

    @property
    def serving(self) -> bool:
        """True when new containers may be given this GPU."""
        return self.present and self.health.serving

    @property
    def plight(self) -> str:
        """Why no new container may get the GPU, as a predicate of its name. Empty: one may."""
        if not self.health.serving:
            return f"is {self.health.condition.value}: {self.health.text or self.health.cause}"
        if self.present:
            return ""
        if self.obstacle:
            return f"is not shared: {self.obstacle}"
        return "is filtered out by the settings" if self.there else "is not on the node any more"


class Inventory(msgspec.Struct, frozen=True):
    """All shared GPUs, sorted by index, then UUID. GPUs without an index come last.

    `generation` rises with every change. `withheld`: no slice is on offer, whatever the health.
    """

    generation: int = 0
    gpus: tuple[SharedGpu, ...] = ()
    driver_version: str = ""
    withheld: bool = False

    def find(self, uuid: GpuUuid) -> SharedGpu | None:
        """The GPU with that UUID, or None."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)

    def label(self, uuid: GpuUuid) -> str:
        """The label of one GPU, for people; its UUID if it is not here."""
        found = self.find(uuid)
        return found.gpu.label if found else str(uuid)

    def offers(self, gpu: SharedGpu) -> bool:
        """True when the list and the register annotation offer this GPU to new containers."""
        return gpu.serving and not self.withheld

    def obstacles(self, gpu: SharedGpu) -> tuple[str, ...]:
        """Reasons other than health for which new containers do not get the GPU."""
        if gpu.serving:
            return (WITHHELD,) if self.withheld else ()
        return (f"it {gpu.plight}",) if gpu.health.serving else ()


class InventoryDiff(msgspec.Struct, frozen=True):
    """What differs between two snapshots, by UUID."""

    added: tuple[GpuUuid, ...] = ()
    removed: tuple[GpuUuid, ...] = ()
    changed: tuple[GpuUuid, ...] = ()

    @property
    def empty(self) -> bool:
        """True when nothing differs."""
        return not (self.added or self.removed or self.changed)


def diff(old: Inventory, new: Inventory) -> InventoryDiff:
    """The UUIDs that `new` adds, removes and changes, each in the order of its snapshot."""
    before = {gpu.uuid: gpu for gpu in old.gpus}
    after = {gpu.uuid: gpu for gpu in new.gpus}
    return InventoryDiff(
        added=tuple(uuid for uuid in after if uuid not in before),
        removed=tuple(uuid for uuid in before if uuid not in after),
        changed=tuple(u for u, gpu in after.items() if u in before and before[u] != gpu),
    )
