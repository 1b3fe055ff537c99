"""The inventory: which GPUs are shared here, how, and how they are. One immutable snapshot."""

import dataclasses
from typing import Final

from agent.core.inventory.condition import Health
from agent.core.inventory.gpu import Gpu, GpuUuid

WITHHELD: Final = "no slice of this node is on offer: `/readyz?verbose` says why at `offer`"


@dataclasses.dataclass(frozen=True, slots=True)
class SharedGpu:
    """A GPU as it is offered.

    `registered_mib` and `core_percent` are after scaling; `type_name` is the name with the
    `NVIDIA` prefix that the scheduler matches; `mode` is HAMi's operating mode text.
    `present` is False for one that is kept in view and not offered: it vanished, or is shared no
    more, while a slice of it is held; or it is not well, and the driver lists it but does not
    describe it. Of the latter nothing may be known but its UUID: it has no slices. `there`: the
    driver still lists it. `obstacle`: why it is not present, if more is known than that. `wanted`
    is False for one that the settings or its mode keep out. `numa_hint`: the kubelet is told its
    NUMA node.
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
        """The identity of the GPU."""
        return self.gpu.uuid

    @property
    def serving(self) -> bool:
        """True when new containers may be given this GPU."""
        return self.present and self.health.serving

    @property
    def plight(self) -> str:
        """Why no new container may be given it, to be read behind its name. Empty: one may."""
        if not self.health.serving:
            return f"is {self.health.condition.value}: {self.health.text or self.health.cause}"
        if self.present:
            return ""
        if self.obstacle:
            return f"is not shared: {self.obstacle}"
        return "is filtered out by the settings" if self.there else "is not on the node any more"


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory:
    """All shared GPUs, sorted by index then UUID, those without an index last.

    `generation` rises with every change. `withheld`: no slice of any GPU is on offer, whatever the
    GPUs are like.
    """

    generation: int = 0
    gpus: tuple[SharedGpu, ...] = ()
    driver_version: str = ""
    withheld: bool = False

    def find(self, uuid: GpuUuid) -> SharedGpu | None:
        """The GPU of that identity, or None."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)

    def offers(self, gpu: SharedGpu) -> bool:
        """True when kubelet and scheduler are told that this GPU takes new containers."""
        return gpu.serving and not self.withheld

    def obstacles(self, gpu: SharedGpu) -> tuple[str, ...]:
        """What keeps a GPU that is served by its health from new containers all the same."""
        if gpu.serving:
            return (WITHHELD,) if self.withheld else ()
        return (f"it {gpu.plight}",) if gpu.health.serving else ()


@dataclasses.dataclass(frozen=True, slots=True)
class InventoryDiff:
    """What differs between two snapshots, by UUID."""

    added: tuple[GpuUuid, ...] = ()
    removed: tuple[GpuUuid, ...] = ()
    changed: tuple[GpuUuid, ...] = ()

    @property
    def empty(self) -> bool:
        """True when nothing differs."""
        return not (self.added or self.removed or self.changed)


def diff(old: Inventory, new: Inventory) -> InventoryDiff:
    """What `new` adds to, removes from and changes in `old`, each in the order of its snapshot."""
    before = {gpu.uuid: gpu for gpu in old.gpus}
    after = {gpu.uuid: gpu for gpu in new.gpus}
    return InventoryDiff(
        added=tuple(uuid for uuid in after if uuid not in before),
        removed=tuple(uuid for uuid in before if uuid not in after),
        changed=tuple(u for u, gpu in after.items() if u in before and before[u] != gpu),
    )
