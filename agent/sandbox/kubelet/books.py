"""The state of the device manager: tables, endpoints, records and their checkpoint.

No method waits, so each change is complete when its method returns.
"""

import asyncio
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent.sandbox.kubelet import checkpoint
from agent.sandbox.kubelet.devices import DeviceError, DeviceTable, ListedDevice, shuffled
from agent.sandbox.kubelet.endpoint import PluginEndpoint
from agent.sandbox.kubelet.records import DeviceRecord, DeviceRecords
from agent.sandbox.kubelet.seen import KubeletLog
from agent.wire.v1beta1 import ContainerAllocateResponse


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
