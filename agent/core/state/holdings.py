"""The slices that the kubelet holds for pods, as PodResources reports them."""

import datetime as dt
from collections.abc import Mapping

import msgspec

from agent.core.inventory.slices import SliceId


class ContainerHolding(msgspec.Struct, frozen=True):
    """The slice ids of one container, by resource name; empty: nothing is allocated yet."""

    name: str
    ids: Mapping[str, frozenset[SliceId]] = msgspec.field(default_factory=dict)


class Holding(msgspec.Struct, frozen=True):
    """One pod that the kubelet knows. PodResources has no UID and no ordinary init containers."""

    namespace: str
    pod: str
    containers: tuple[ContainerHolding, ...] = ()

    def ids_of(self, container: str, resource: str) -> frozenset[SliceId]:
        """The ids of `resource` that the kubelet holds for the container; may be empty."""
        for held in self.containers:
            if held.name == container:
                return held.ids.get(resource, frozenset())
        return frozenset()


class KubeletEpoch(msgspec.Struct, frozen=True):
    """A kubelet instance: its socket's inode and ctime (an inode alone is often reused)."""

    inode: int = 0
    ctime_ns: int = 0

    @property
    def since(self) -> dt.datetime:
        """When its socket appeared, in UTC."""
        return dt.datetime.fromtimestamp(self.ctime_ns / 1e9, dt.UTC)
