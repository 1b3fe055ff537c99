"""The device manager: its records, admission of one pod, and Allocate for one container.

Only the calls to the plugin and the write of the checkpoint wait, without a lock around them. So
overlapping callers see each other's marks exactly as in the real kubelet.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.sandbox.kubelet import checkpoint
from agent.sandbox.kubelet.endpoint import (
    DeviceError,
    DeviceTable,
    PluginEndpoint,
    draw,
    fill,
    shuffled,
)
from agent.sandbox.kubelet.pods import (
    ContainerKey,
    ContainerSpec,
    KubeletAdmission,
    KubeletLog,
    KubeletNode,
    PodSpec,
    SeenKind,
)
from agent.wire.v1beta1 import ContainerAllocateResponse, Device

# The state of the device manager: tables, endpoints, records and their checkpoint. No method of
# KubeletBooks waits, so each change is complete when its method returns.


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """The ids of one container and resource, and the plugin's answer for them.

    `numa` maps NUMA nodes (-1: none) to ids.
    """

    numa: Mapping[int, tuple[str, ...]]
    response: ContainerAllocateResponse

    @property
    def ids(self) -> frozenset[str]:
        """The ids of all NUMA nodes."""
        return frozenset(device_id for members in self.numa.values() for device_id in members)


@dataclass(frozen=True, slots=True)
class NodeResources:
    """The resources of one node status. A removed resource is shown as 0."""

    capacity: Mapping[str, int] = field(default_factory=dict)
    allocatable: Mapping[str, int] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()


@dataclass(eq=False)
class KubeletBooks:
    """The plugins that one kubelet process knows, their ids, and the holders of the ids.

    `records`: by container and resource. `in_use`: the ids of each resource that are marked.
    """

    _directory: Path
    _chance: random.Random
    _seen: KubeletLog
    tables: dict[str, DeviceTable] = field(default_factory=dict)
    endpoints: dict[str, PluginEndpoint] = field(default_factory=dict)
    records: dict[ContainerKey, dict[str, DeviceRecord]] = field(default_factory=dict)
    in_use: dict[str, set[str]] = field(default_factory=dict)

    def load(self) -> None:
        """Read the checkpoint: records as before, every known resource empty and stopped."""
        content = self._read()
        for entry in content.entries:
            response = ContainerAllocateResponse.parse(entry.response)
            record = DeviceRecord({node: tuple(ids) for node, ids in entry.numa.items()}, response)
            self.insert((entry.pod_uid, entry.container), entry.resource, record)
        self.recount()
        now = asyncio.get_running_loop().time()
        for resource in content.registered or {}:
            self.tables[resource] = DeviceTable()
            self.endpoints[resource] = PluginEndpoint(resource)
            self.endpoints[resource].stop(now)

    def save(self) -> None:
        """Write the checkpoint. Raises DeviceError: the write failed; the text is the kubelet's."""
        entries = [
            checkpoint.CheckpointEntry(*owner, resource, record.numa, bytes(record.response))
            for owner, records in self.records.items()
            for resource, record in records.items()
        ]
        self._chance.shuffle(entries)
        registered = {
            resource: shuffled(self._chance, table.healthy)
            for resource, table in self.tables.items()
        }
        self._write(checkpoint.Checkpoint(tuple(entries), registered))

    def insert(self, owner: ContainerKey, resource: str, record: DeviceRecord) -> None:
        """Add a record. It replaces an earlier one of the same container and resource."""
        self.records.setdefault(owner, {})[resource] = record

    def held(self, owner: ContainerKey, resource: str) -> frozenset[str] | None:
        """The container's ids of one resource, or None if it has no record."""
        record = self.records.get(owner, {}).get(resource)
        return None if record is None else record.ids

    def is_plugin_resource(self, resource: str) -> bool:
        """Whether the device manager is responsible for the resource."""
        return resource in self.tables or resource in self.in_use

    def connected(self, resource: str, endpoint: PluginEndpoint) -> None:
        """Note that a plugin has registered. Its ids come with its first list."""
        self.endpoints[resource] = endpoint
        self._seen.note("registered", resource=resource)

    def listed(self, resource: str, devices: Sequence[Device]) -> None:
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
        kept = set(active)
        gone = [owner for owner in self.records if owner[0] not in kept]
        for owner in gone:
            del self.records[owner]
        if gone:
            self.recount()

    def recount(self) -> None:
        """Compute the marks again from the records."""
        self.in_use = {}
        for records in self.records.values():
            for resource, record in records.items():
                self.in_use.setdefault(resource, set()).update(record.ids)

    def _read(self) -> checkpoint.Checkpoint:
        try:
            return checkpoint.load(self._directory)
        except checkpoint.CheckpointError as error:
            self._seen.note("checkpoint_lost", text=str(error))
            return checkpoint.Checkpoint()

    def _write(self, content: checkpoint.Checkpoint) -> None:
        try:
            checkpoint.replace(self._directory, content, self._chance)
        except OSError as error:
            name = checkpoint.FILE_NAME
            self._seen.note("checkpoint_unwritten", text=str(error))
            text = f'failed to write checkpoint file "{name}": {error.strerror}'
            raise DeviceError(text) from error

    def _save_or_go_on(self) -> None:
        try:
            self.save()
        except DeviceError:
            return  # the real kubelet logs it and continues; the event is noted

    def _is_expired(self, resource: str) -> bool:
        endpoint = self.endpoints.get(resource)
        return endpoint is None or endpoint.is_expired(asyncio.get_running_loop().time())


# Admission of one pod, and Allocate for one container, in the kubelet's order of steps.

CHECKPOINT = 0.002
"""Seconds for the write of the checkpoint. Notes of other pods are read only after it."""


class KubeletPanicError(Exception):
    """The kubelet panics. Only the model catches this, and restarts the process."""


@dataclass(eq=False)
class DeviceAllocator:
    """The device manager, used by admission and by the pod workers."""

    _books: KubeletBooks
    _chance: random.Random
    _seen: KubeletLog
    _running_at_start: frozenset[ContainerKey]
    _active: Callable[[], Iterable[str]]
    sources_ready: bool = False
    _pending: str | None = None
    _reusable: dict[str, dict[str, frozenset[str]]] = field(default_factory=dict)

    def collect(self) -> None:
        """Forget the records of pods that have ended, as a List or the next allocation does."""
        if self.sources_ready:
            pending = () if self._pending is None else (self._pending,)
            self._books.collect((*self._active(), *pending))

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
        held = self._books.records.get(owner, {})
        current = self._reusable.get(pod.uid)
        if current is None:
            if held:
                raise KubeletPanicError("assignment to entry in nil map")
            return
        for resource, record in held.items():
            before = current.get(resource, frozenset())
            reusable = container.kind == "init"
            current[resource] = before | record.ids if reusable else before - record.ids

    async def start(self, pod: PodSpec, container: ContainerSpec) -> None:
        """Prepare the start of a container, as a pod worker does: allocate what has no record.

        Raises DeviceError: the container has to wait; KubeletPanicError: as in `allocate`.
        """
        missing = [
            resource
            for resource, count in container.limits.items()
            if count and self._books.is_plugin_resource(resource)
            if self._books.held((pod.uid, container.name), resource) is None
        ]
        if missing and pod.uid in self._active():
            await self.allocate(pod, container)

    async def _allocate_all(
        self, owner: ContainerKey, container: ContainerSpec, table: dict[str, frozenset[str]]
    ) -> None:
        resources = shuffled(self._chance, container.limits)
        resources = [name for name in resources if self._books.is_plugin_resource(name)]
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
            self._books.save()

    async def _choose(
        self, owner: ContainerKey, resource: str, count: int, reusable: frozenset[str]
    ) -> frozenset[str]:
        """The ids that are to be asked for; none if the container has a record or runs already."""
        recorded = self._books.held(owner, resource)
        if not self.sources_ready and owner in self._running_at_start:
            return frozenset()
        # Health is checked even for a count of 0.
        table = self._books.tables.get(resource)
        if table is None:
            raise DeviceError(f"cannot allocate unregistered device {resource}")
        blocked = f"cannot allocate unhealthy devices {resource}"
        if not table.healthy:
            raise DeviceError(f"no healthy devices present; {blocked}")
        if recorded is not None and not recorded <= table.healthy:
            raise DeviceError(f"previously allocated devices are no longer healthy; {blocked}")
        if recorded is not None or not count:
            return frozenset()

        marks = self._books.in_use.setdefault(resource, set())
        taken = draw(self._chance, reusable, count)
        marks |= taken
        missing = count - len(taken)
        if missing == 0:
            return taken
        free = table.healthy.difference(marks)
        if len(free) < missing:
            raise DeviceError(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {missing}, Available: {len(free)}"
            )
        preferred = await self._prefer(owner, resource, count, free, taken)
        chosen = taken | fill(self._chance, preferred, free, missing)
        self._books.in_use.setdefault(resource, set()).update(chosen)
        return chosen

    async def _prefer(
        self,
        owner: ContainerKey,
        resource: str,
        count: int,
        free: frozenset[str],
        taken: frozenset[str],
    ) -> tuple[str, ...]:
        endpoint = self._books.endpoints.get(resource)
        if endpoint is None or not endpoint.prefers():
            return ()
        available = shuffled(self._chance, free | taken)
        self._note("preferring", owner, resource, available, str(count))
        must_include = shuffled(self._chance, taken)
        answer = await endpoint.prefer(available, must_include, count)
        self._note("preferred", owner, resource, answer)
        return answer

    async def _ask(self, owner: ContainerKey, resource: str, ids: frozenset[str]) -> None:
        order = shuffled(self._chance, ids)
        self._note("allocating", owner, resource, order)
        try:
            responses = await self._books.endpoints[resource].allocate(order)
        except DeviceError as error:
            self._books.recount()
            self._note("allocate_refused", owner, resource, order, str(error))
            raise
        numa = self._books.tables.get(resource, DeviceTable()).by_numa(order)
        self._books.insert(owner, resource, DeviceRecord(numa, responses[0]))
        self._note("allocated", owner, resource, order)

    def _note(
        self, kind: SeenKind, owner: ContainerKey, resource: str, ids: Iterable[str], text: str = ""
    ) -> None:
        uid, container = owner
        self._seen.note(kind, resource=resource, pod=uid, container=container, ids=ids, text=text)


@dataclass(eq=False)
class Admitter:
    """Admits one pod at a time. `active`: every pod that is admitted or being admitted."""

    _node: KubeletNode
    _books: KubeletBooks
    _allocator: DeviceAllocator
    _seen: KubeletLog
    active: dict[str, PodSpec] = field(default_factory=dict)

    async def admit(self, pod: PodSpec) -> KubeletAdmission:
        """Run all handlers. A rejected pod is inactive at once. Raises KubeletPanicError."""
        self.active[pod.uid] = pod
        self._seen.note("admitting", pod=pod.uid)
        refusal = await self._allocate(pod) or self._predicate(pod)
        if refusal is None:
            self._seen.note("admitted", pod=pod.uid)
            return KubeletAdmission(admitted=True)
        del self.active[pod.uid]
        reason, text = refusal
        message = f"Pod was rejected: {text}"
        self._seen.note("rejected", pod=pod.uid, text=message)
        return KubeletAdmission(admitted=False, reason=reason, message=message)

    async def _allocate(self, pod: PodSpec) -> tuple[str, str] | None:
        for container in pod.containers:
            try:
                await self._allocator.allocate(pod, container)
            except DeviceError as error:
                text = f"Allocate failed due to {error}, which is unexpected"
                return "UnexpectedAdmissionError", text
        return None

    def _predicate(self, pod: PodSpec) -> tuple[str, str] | None:
        # The Node's allocatable is raised to what is held if the pod itself holds some of it.
        room = dict(self._node.published)
        if any(uid == pod.uid for uid, _ in self._books.records):
            for resource, ids in self._books.in_use.items():
                room[resource] = max(room.get(resource, 0), len(ids))
        refusal = self._lacking(pod, room)
        if refusal is not None or pod.node_selector.items() <= self._node.labels.items():
            return refusal
        # Only the labels do not match. The Node is read again, and nothing is raised this time.
        published = {name: self._node.published.get(name, 0) for name in room}
        text = "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"
        return self._lacking(pod, published) or ("NodeAffinity", text)

    def _lacking(self, pod: PodSpec, room: Mapping[str, int]) -> tuple[str, str] | None:
        """The first resource that does not suffice. Resources that the Node lacks are ignored."""
        resources = {name for container in pod.containers for name in container.limits}
        for resource in sorted(resources & room.keys()):
            asked, capacity = pod.request(resource), room[resource]
            others = (other for other in self.active.values() if other.uid != pod.uid)
            used = sum(other.request(resource) for other in others)
            if asked and asked > capacity - used:
                return f"OutOf{resource}", (
                    f"Node didn't have enough resource: {resource}, "
                    f"requested: {asked}, used: {used}, capacity: {capacity}"
                )
        return None
