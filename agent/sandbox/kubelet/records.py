"""The kubelet's records: the ids of each container, and the plugin's answer for them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from agent.sandbox.kubelet.pods import ContainerKey
from agent.wire.v1beta1 import ContainerAllocateResponse


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """The ids of one container and resource. `numa` maps NUMA nodes (-1: none) to ids."""

    numa: Mapping[int, tuple[str, ...]]
    response: ContainerAllocateResponse

    @property
    def ids(self) -> frozenset[str]:
        """The ids of all NUMA nodes."""
        return frozenset(device_id for members in self.numa.values() for device_id in members)


@dataclass(slots=True)
class DeviceRecords:
    """All records of the node: pod UID → container → resource → record."""

    _pods: dict[str, dict[str, dict[str, DeviceRecord]]] = field(default_factory=dict)

    def insert(self, owner: ContainerKey, resource: str, record: DeviceRecord) -> None:
        """Add a record. It replaces an earlier one of the same container and resource."""
        uid, container = owner
        self._pods.setdefault(uid, {}).setdefault(container, {})[resource] = record

    def of_container(self, owner: ContainerKey) -> Mapping[str, DeviceRecord]:
        """The container's records by resource."""
        uid, container = owner
        return self._pods.get(uid, {}).get(container, {})

    def ids(self, owner: ContainerKey, resource: str) -> frozenset[str] | None:
        """The container's ids of one resource, or None if it has no record."""
        record = self.of_container(owner).get(resource)
        return None if record is None else record.ids

    def drop_all_but(self, uids: Iterable[str]) -> bool:
        """Forget every other pod. Returns whether there was one."""
        gone = self._pods.keys() - set(uids)
        for uid in gone:
            del self._pods[uid]
        return bool(gone)

    def in_use(self) -> dict[str, set[str]]:
        """The recorded ids by resource."""
        held: dict[str, set[str]] = {}
        for _, resource, record in self:
            held.setdefault(resource, set()).update(record.ids)
        return held

    def has_pod(self, uid: str) -> bool:
        """Whether a container of the pod has a record."""
        return uid in self._pods

    def __iter__(self) -> Iterator[tuple[ContainerKey, str, DeviceRecord]]:
        for uid, containers in self._pods.items():
            for container, resources in containers.items():
                for resource, record in resources.items():
                    yield (uid, container), resource, record


def merge(records: Iterable[DeviceRecord]) -> ContainerAllocateResponse:
    """The answers of a container merged for the runtime: the first value of each key wins."""
    whole = ContainerAllocateResponse()
    for record in records:
        answer = record.response
        whole.envs = answer.envs | whole.envs
        whole.annotations = answer.annotations | whole.annotations
        paths = {mount.container_path for mount in whole.mounts}
        whole.mounts += [m for m in answer.mounts if m.container_path not in paths]
        paths = {node.container_path for node in whole.devices}
        whole.devices += [d for d in answer.devices if d.container_path not in paths]
        names = {name.name for name in whole.cdi_devices}
        whole.cdi_devices += [d for d in answer.cdi_devices if d.name not in names]
    return whole
