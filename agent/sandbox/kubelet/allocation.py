"""The device manager: its records, admission of one pod, and Allocate for one container.

Only the calls to the plugin and the write of the checkpoint wait, without a lock around them. So
overlapping callers see each other's marks exactly as in the real kubelet. The rules and texts are
those of kubelet 1.36 without topology hints (policy none).
"""

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.sandbox.kubelet import checkpoint
from agent.sandbox.kubelet.checkpoint import Checkpoint, CheckpointEntry
from agent.sandbox.kubelet.endpoint import DeviceError, PluginEndpoint
from agent.sandbox.kubelet.pods import (
    ContainerKey,
    ContainerSpec,
    KubeletAdmission,
    KubeletLog,
    KubeletNode,
    PodSpec,
    SeenKind,
)
from agent.wire.v1beta1 import Device

HEALTHY: Final = "Healthy"
NO_NUMA: Final = -1
GRACE_PERIOD: Final = 300.0
"""Seconds for which the Node shows a resource whose plugin is gone."""
CHECKPOINT: Final = 0.002
"""Seconds for the write of the checkpoint. Notes of other pods are read only after it."""


class KubeletPanicError(Exception):
    """The kubelet panics. Only the model catches this, and restarts the process."""


def healthy(table: Mapping[str, Device]) -> frozenset[str]:
    """The ids of a list that are healthy."""
    return frozenset(device_id for device_id, one in table.items() if one.health == HEALTHY)


def numa_nodes(device: Device) -> list[int]:
    """The NUMA nodes of an entry with a topology, which may be none; -1 without one."""
    return [NO_NUMA] if device.topology is None else [node.id for node in device.topology.nodes]


@dataclass(eq=False)
class DeviceManager:
    """The plugins that one kubelet process knows, their ids, and the holders of the ids.

    - `tables`: the last list of each resource, by id.
    - `records`: by container and resource. `in_use`: the ids of each resource that are marked.
    - `active`: every pod that is admitted or being admitted, by UID.
    """

    _directory: Path
    _chance: random.Random
    _seen: KubeletLog
    _running_at_start: frozenset[ContainerKey]
    tables: dict[str, dict[str, Device]] = field(default_factory=dict)
    endpoints: dict[str, PluginEndpoint] = field(default_factory=dict)
    records: dict[ContainerKey, dict[str, CheckpointEntry]] = field(default_factory=dict)
    in_use: dict[str, set[str]] = field(default_factory=dict)
    active: dict[str, PodSpec] = field(default_factory=dict)
    sources_ready: bool = False
    _pending: str | None = None
    _reusable: dict[str, dict[str, frozenset[str]]] = field(default_factory=dict)

    # The plugins and the checkpoint. None of this waits, so each change is complete at its return.

    def load(self) -> None:
        """Read the checkpoint: records as before, every known resource empty and stopped."""
        content = self._read()
        for entry in content.entries:
            self._insert((entry.pod_uid, entry.container), entry)
        self._recount()
        now = asyncio.get_running_loop().time()
        for resource in content.registered:
            self.tables[resource] = {}
            self.endpoints[resource] = PluginEndpoint(resource, stopped_at=now)

    def connected(self, endpoint: PluginEndpoint) -> None:
        """Note that a plugin has registered. Its ids come with its first list."""
        self.endpoints[endpoint.resource] = endpoint
        self._seen.note("registered", resource=endpoint.resource)

    def listed(self, resource: str, devices: Sequence[Device]) -> None:
        """Replace the table by a new list, and write the checkpoint."""
        table = self.tables[resource] = {device.id: device for device in devices}
        self._save()
        self._seen.note("listed", resource=resource, ids=sorted(healthy(table)))

    def disconnected(self, resource: str) -> None:
        """Note that the plugin is gone: its ids become unhealthy, the checkpoint stays."""
        self.endpoints[resource].stopped_at = asyncio.get_running_loop().time()
        for device in self.tables.get(resource, {}).values():
            device.health = ""
        self._seen.note("disconnected", resource=resource)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Capacity and allocatable of each resource; 0 if its plugin was gone for 5 minutes."""
        return {
            resource: (0, 0) if self._is_expired(resource) else (len(table), len(healthy(table)))
            for resource, table in self.tables.items()
        }

    def tick(self) -> dict[str, tuple[int, int]]:
        """Count for the node status, and forget resources whose plugin was gone for 5 minutes."""
        counts = self.counts()
        expired = [resource for resource in counts if self._is_expired(resource)]
        for resource in expired:
            del self.tables[resource]
        if expired:
            self._save()
        return counts

    def collect(self) -> None:
        """Forget the records of pods that have ended, as a List or the next allocation does.

        If there were any, marks in flight are dropped, too.
        """
        kept = {*self.active, self._pending}
        gone = [owner for owner in self.records if owner[0] not in kept]
        if gone and self.sources_ready:
            for owner in gone:
                del self.records[owner]
            self._recount()

    def _is_expired(self, resource: str) -> bool:
        stopped_at = self.endpoints[resource].stopped_at
        now = asyncio.get_running_loop().time()
        return stopped_at is not None and now - stopped_at > GRACE_PERIOD

    def _insert(self, owner: ContainerKey, entry: CheckpointEntry) -> None:
        self.records.setdefault(owner, {})[entry.resource] = entry

    def _recount(self) -> None:
        """Compute the marks again from the records."""
        self.in_use = {}
        for held in self.records.values():
            for resource, entry in held.items():
                self.in_use.setdefault(resource, set()).update(entry.ids)

    def _save(self) -> None:
        entries = [entry for held in self.records.values() for entry in held.values()]
        self._chance.shuffle(entries)
        registered = {name: self._shuffled(healthy(table)) for name, table in self.tables.items()}
        self._write(Checkpoint(entries, registered))

    def _read(self) -> Checkpoint:
        try:
            return checkpoint.load(self._directory)
        except checkpoint.CheckpointError:
            return Checkpoint()

    def _write(self, content: Checkpoint) -> None:
        checkpoint.replace(self._directory, content, self._chance)

    # Allocate for one container, used by admission and by the pod workers.

    async def allocate(self, pod: PodSpec, container: ContainerSpec) -> None:
        """Give a container its ids, for each of its resources in random order.

        Raises DeviceError: no ids; the text is the kubelet's or the plugin's; KubeletPanicError:
        another pod's allocation began meanwhile, and this one succeeded.
        """
        owner = (pod.uid, container.name)
        self._pending = pod.uid
        table = self._reusable.get(pod.uid, {})
        self._reusable = {pod.uid: table}  # every other pod's table is dropped, without a lock
        await self._allocate_all(owner, container, table)
        held = self.records.get(owner, {})
        current = self._reusable.get(pod.uid)
        if current is None:
            if held:
                raise KubeletPanicError("assignment to entry in nil map")
            return
        for resource, entry in held.items():
            before = current.get(resource, frozenset())
            is_reusable = container.kind == "init"
            current[resource] = before | entry.ids if is_reusable else before - entry.ids

    async def start(self, pod: PodSpec, container: ContainerSpec) -> None:
        """Prepare the start of a container, as a pod worker does: allocate what has no record.

        Raises DeviceError: the container has to wait; KubeletPanicError: as in `allocate`.
        """
        wanted = {name for name in self._resources(container) if container.limits[name]}
        missing = wanted - self.records.get((pod.uid, container.name), {}).keys()
        if missing and pod.uid in self.active:
            await self.allocate(pod, container)

    def _resources(self, container: ContainerSpec) -> list[str]:
        """The resources of a container for which the device manager is responsible."""
        return [name for name in container.limits if name in self.tables or name in self.in_use]

    async def _allocate_all(
        self, owner: ContainerKey, container: ContainerSpec, table: dict[str, frozenset[str]]
    ) -> None:
        resources = self._shuffled(self._resources(container))
        if resources:
            self.collect()
        changed = False
        for resource in resources:
            reusable = table.get(resource, frozenset())
            ids = await self._choose(owner, resource, container.limits[resource], reusable)
            if ids:
                await self._ask(owner, resource, ids)
                changed = True
        if changed:
            await asyncio.sleep(CHECKPOINT)
            self._save()

    async def _choose(
        self, owner: ContainerKey, resource: str, count: int, reusable: frozenset[str]
    ) -> frozenset[str]:
        """The ids that are to be asked for; none if the container has a record or runs already."""
        recorded = self.records.get(owner, {}).get(resource)
        if not self.sources_ready and owner in self._running_at_start:
            return frozenset()
        # Health is checked even for a count of 0.
        if resource not in self.tables:
            raise DeviceError(f"cannot allocate unregistered device {resource}")
        offered = healthy(self.tables[resource])
        blocked = f"cannot allocate unhealthy devices {resource}"
        if not offered:
            raise DeviceError(f"no healthy devices present; {blocked}")
        if recorded is not None and not recorded.ids <= offered:
            raise DeviceError(f"previously allocated devices are no longer healthy; {blocked}")
        if recorded is not None or not count:
            return frozenset()

        marks = self.in_use.setdefault(resource, set())
        taken = self._draw(reusable, count)
        marks |= taken
        missing = count - len(taken)
        if missing == 0:
            return taken
        free = offered.difference(marks)
        if len(free) < missing:
            raise DeviceError(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {missing}, Available: {len(free)}"
            )
        preferred = await self._prefer(owner, resource, count, free, taken)
        # The plugin's preferred ids come first. Those that are not free are ignored.
        chosen = self._draw(free.intersection(preferred), missing)
        chosen |= taken | self._draw(free - chosen, missing - len(chosen))
        self.in_use.setdefault(resource, set()).update(chosen)
        return chosen

    async def _prefer(
        self,
        owner: ContainerKey,
        resource: str,
        count: int,
        free: frozenset[str],
        taken: frozenset[str],
    ) -> tuple[str, ...]:
        endpoint = self.endpoints[resource]
        if not endpoint.prefers:
            return ()
        available = self._shuffled(free | taken)
        self._note("preferring", owner, resource, available)
        return await endpoint.prefer(available, self._shuffled(taken), count)

    async def _ask(self, owner: ContainerKey, resource: str, ids: frozenset[str]) -> None:
        order = self._shuffled(ids)
        self._note("allocating", owner, resource, order)
        try:
            response = await self.endpoints[resource].allocate(order)
        except DeviceError as error:
            self._recount()
            self._note("allocate_refused", owner, resource, order, str(error))
            raise
        numa: dict[int, list[str]] = {}
        table = self.tables.get(resource, {})
        for device_id in order:
            nodes = numa_nodes(table[device_id]) if device_id in table else []
            for node in nodes or [NO_NUMA]:
                numa.setdefault(node, []).append(device_id)
        self._insert(owner, CheckpointEntry(*owner, resource, numa, bytes(response)))
        self._note("allocated", owner, resource, order)

    def _note(
        self, kind: SeenKind, owner: ContainerKey, resource: str, ids: Iterable[str], text: str = ""
    ) -> None:
        uid, container = owner
        self._seen.note(kind, resource=resource, pod=uid, container=container, ids=ids, text=text)

    def _draw(self, ids: Iterable[str], count: int) -> frozenset[str]:
        """At most `count` ids in random order, as from the kubelet's maps."""
        return frozenset(self._shuffled(ids)[:count])

    def _shuffled(self, values: Iterable[str]) -> list[str]:
        """The values in random order, because no plugin may rely on an order."""
        order = sorted(values)
        self._chance.shuffle(order)
        return order


@dataclass(eq=False)
class Admitter:
    """Runs the handlers of admission, for one pod at a time."""

    _node: KubeletNode
    _devices: DeviceManager
    _seen: KubeletLog

    async def admit(self, pod: PodSpec) -> KubeletAdmission:
        """Run all handlers. A rejected pod is inactive at once. Raises KubeletPanicError."""
        self._devices.active[pod.uid] = pod
        try:
            for container in pod.containers:
                await self._devices.allocate(pod, container)
            refusal = self._predicate(pod)
        except DeviceError as error:
            text = f"Allocate failed due to {error}, which is unexpected"
            refusal = "UnexpectedAdmissionError", text
        if refusal is None:
            self._seen.note("admitted", pod=pod.uid)
            return KubeletAdmission(admitted=True)
        del self._devices.active[pod.uid]
        reason, text = refusal
        message = f"Pod was rejected: {text}"
        self._seen.note("rejected", pod=pod.uid, text=message)
        return KubeletAdmission(admitted=False, reason=reason, message=message)

    def _predicate(self, pod: PodSpec) -> tuple[str, str] | None:
        # The Node's allocatable is raised to what is held if the pod itself holds some of it.
        # Resources that the Node lacks are ignored.
        room = dict(self._node.published)
        if any(uid == pod.uid for uid, _ in self._devices.records):
            for resource, ids in self._devices.in_use.items():
                room[resource] = max(room.get(resource, 0), len(ids))
        others = [other for other in self._devices.active.values() if other.uid != pod.uid]
        for resource in sorted({name for c in pod.containers for name in c.limits} & room.keys()):
            asked, capacity = pod.request(resource), room[resource]
            used = sum(other.request(resource) for other in others)
            if asked and asked > capacity - used:
                return f"OutOf{resource}", (
                    f"Node didn't have enough resource: {resource}, "
                    f"requested: {asked}, used: {used}, capacity: {capacity}"
                )
        if pod.node_selector.items() <= self._node.labels.items():
            return None
        text = "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"
        return "NodeAffinity", text
