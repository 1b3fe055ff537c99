"""What the kubelet says it holds: PodResources, merged per container."""

import dataclasses
import datetime as dt
from collections.abc import Mapping

from agent.core.inventory.slices import SliceId


@dataclasses.dataclass(frozen=True, slots=True)
class ContainerHolding:
    """The ids of one container, by resource name. No resource: nothing was allocated (yet)."""

    name: str
    ids: Mapping[str, frozenset[SliceId]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """One pod that the kubelet knows (it has no UID there). Init containers are never listed."""

    namespace: str
    pod: str
    containers: tuple[ContainerHolding, ...] = ()

    def ids_of(self, container: str, resource: str) -> frozenset[SliceId]:
        """The ids of `resource` that the kubelet holds for the container; empty when none."""
        for held in self.containers:
            if held.name == container:
                return held.ids.get(resource, frozenset())
        return frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class KubeletEpoch:
    """One life of the kubelet: its socket's inode and ctime (an inode alone is often reused)."""

    inode: int = 0
    ctime_ns: int = 0

    @property
    def since(self) -> dt.datetime:
        """When its socket appeared, in UTC."""
        return dt.datetime.fromtimestamp(self.ctime_ns / 1e9, dt.UTC)
