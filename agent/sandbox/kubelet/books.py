"""The state of the device manager: tables, endpoints, records and their checkpoint.

A record has the ids of one container and the plugin's answer for them. No method waits, so each
change is complete when its method returns.
"""

import asyncio
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent.sandbox.kubelet import checkpoint
from agent.sandbox.kubelet.endpoint import (
    DeviceError,
    DeviceTable,
    ListedDevice,
    PluginEndpoint,
    shuffled,
)
from agent.sandbox.kubelet.pods import ContainerKey, KubeletLog
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


@dataclass(frozen=True, slots=True)
class NodeResources:
    """The resources of one node status. A removed resource is shown as 0."""

    capacity: Mapping[str, int] = field(default_factory=dict)
    allocatable: Mapping[str, int] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()


class KubeletBooks:
    """The plugins that one kubelet process knows, their ids, and the holders of the ids."""

    def __init__(self, directory: Path, chance: random.Random, seen: KubeletLog) -> None:
        self.tables: dict[str, DeviceTable] = {}
        self.endpoints: dict[str, PluginEndpoint] = {}
        self.records = DeviceRecords()
        self.in_use: dict[str, set[str]] = {}
        self._directory = directory
        self._chance = chance
        self._seen = seen

    def load(self) -> None:
        """Read the checkpoint: records as before, every known resource empty and stopped."""
        try:
            content = checkpoint.load(self._directory)
        except checkpoint.CheckpointError as error:
            self._seen.note("checkpoint_lost", text=str(error))
            return
        for entry in content.entries:
            response = ContainerAllocateResponse.parse(entry.response)
            record = DeviceRecord({node: tuple(ids) for node, ids in entry.numa.items()}, response)
            self.records.insert((entry.pod_uid, entry.container), entry.resource, record)
        self.recount()
        now = asyncio.get_running_loop().time()
        for resource in content.registered or {}:
            self.tables[resource] = DeviceTable()
            self.endpoints[resource] = PluginEndpoint(resource)
            self.endpoints[resource].stop(now)

    def save(self) -> None:
        """Write the checkpoint.

        Raises:
            DeviceError: the write failed; the text is the kubelet's.
        """
        entries = [
            checkpoint.CheckpointEntry(*owner, resource, record.numa, bytes(record.response))
            for owner, resource, record in self.records
        ]
        self._chance.shuffle(entries)
        registered = {
            resource: shuffled(self._chance, table.healthy)
            for resource, table in self.tables.items()
        }
        content = checkpoint.Checkpoint(tuple(entries), registered)
        try:
            checkpoint.replace(self._directory, content, self._chance)
        except OSError as error:
            name = checkpoint.FILE_NAME
            self._seen.note("checkpoint_unwritten", text=str(error))
            text = f'failed to write checkpoint file "{name}": {error.strerror}'
            raise DeviceError(text) from error

    def is_plugin_resource(self, resource: str) -> bool:
        """Whether the device manager is responsible for the resource."""
        return resource in self.tables or resource in self.in_use

    def connected(self, resource: str, endpoint: PluginEndpoint) -> None:
        """Note that a plugin has registered. Its ids come with its first list."""
        self.endpoints[resource] = endpoint
        self._seen.note("registered", resource=resource)

    def listed(self, resource: str, devices: Iterable[ListedDevice]) -> None:
        """Replace the table by a new list, and write the checkpoint."""
        table = DeviceTable.of(devices)
        self.tables[resource] = table
        self._save_or_go_on()
        text = f"{len(table.healthy)} healthy, {len(table.unhealthy)} unhealthy"
        self._seen.note("listed", resource=resource, ids=sorted(table.healthy), text=text)

    def disconnected(self, resource: str, text: str) -> None:
        """Note that the plugin is gone: its ids become unhealthy, the checkpoint stays."""
        endpoint = self.endpoints.get(resource)
        if endpoint is not None:
            table = self.tables.get(resource)
            if table is not None:
                self.tables[resource] = table.without_plugin()
            endpoint.stop(asyncio.get_running_loop().time())
        self._seen.note("disconnected", resource=resource, text=text)

    def view(self, resource: str) -> tuple[int, int]:
        """Capacity and allocatable of one resource in the next node status, without a change."""
        table = self.tables.get(resource)
        if table is None or self._is_expired(resource):
            return 0, 0
        return table.capacity, len(table.healthy)

    def tick(self) -> NodeResources:
        """Count for the node status. Resources whose plugin was gone for 5 minutes are removed."""
        removed = frozenset(resource for resource in self.tables if self._is_expired(resource))
        for resource in removed:
            del self.tables[resource]
            self.endpoints.pop(resource, None)
            self._seen.note("removed", resource=resource)
        if removed:
            self._save_or_go_on()
        return NodeResources(
            capacity={resource: table.capacity for resource, table in self.tables.items()},
            allocatable={resource: len(t.healthy) for resource, t in self.tables.items()},
            removed=removed,
        )

    def collect(self, active: Iterable[str]) -> None:
        """Forget pods that are no longer active. If there were any, also drop marks in flight."""
        if self.records.drop_all_but(active):
            self.recount()

    def recount(self) -> None:
        """Compute the marks again from the records."""
        self.in_use = self.records.in_use()

    def _save_or_go_on(self) -> None:
        try:
            self.save()
        except DeviceError:
            return  # the real kubelet logs it and continues; the event is noted

    def _is_expired(self, resource: str) -> bool:
        endpoint = self.endpoints.get(resource)
        return endpoint is None or endpoint.is_expired(asyncio.get_running_loop().time())
