"""Admission of one pod, and Allocate for one container, in the kubelet's order of steps.

Only the calls to the plugin and the write of the checkpoint wait, without a lock around them. So
overlapping callers see each other's marks exactly as in the real kubelet.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping

from agent.sandbox.kubelet.books import DeviceRecord, KubeletBooks, merge
from agent.sandbox.kubelet.endpoint import (
    Demand,
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
from agent.wire.v1beta1 import ContainerAllocateResponse

CHECKPOINT = 0.002
"""Seconds for the write of the checkpoint. Notes of other pods are read only after it."""


class KubeletPanicError(Exception):
    """The kubelet panics. Only the model catches this, and restarts the process."""


class DeviceAllocator:
    """The device manager, used by admission and by the pod workers."""

    def __init__(
        self,
        books: KubeletBooks,
        chance: random.Random,
        seen: KubeletLog,
        running_at_start: frozenset[ContainerKey],
        active: Callable[[], Iterable[str]],
    ) -> None:
        self.sources_ready = False
        self._books = books
        self._chance = chance
        self._seen = seen
        self._running_at_start = running_at_start
        self._active = active
        self._pending: str | None = None
        self._reusable: dict[str, dict[str, frozenset[str]]] = {}

    def collect(self) -> None:
        """Forget the records of pods that have ended, as a List or the next allocation does."""
        if self.sources_ready:
            pending = () if self._pending is None else (self._pending,)
            self._books.collect((*self._active(), *pending))

    async def allocate(self, pod: PodSpec, container: ContainerSpec) -> None:
        """Give a container its ids, for each of its resources in random order.

        Raises:
            DeviceError: no ids; the text is the kubelet's or the plugin's.
            KubeletPanicError: another pod's allocation began meanwhile, and this one succeeded.
        """
        owner = (pod.uid, container.name)
        self._pending = pod.uid
        table = self._reusable.get(pod.uid, {})
        self._reusable = {pod.uid: table}  # every other pod's table is dropped, without a lock
        await self._allocate_all(pod, container, table)
        held = self._books.records.of_container(owner)
        current = self._reusable.get(pod.uid)
        if current is None:
            if held:
                raise KubeletPanicError("assignment to entry in nil map")
            return
        for resource, record in held.items():
            before = current.get(resource, frozenset())
            reusable = container.kind == "init"
            current[resource] = before | record.ids if reusable else before - record.ids

    async def start(self, pod: PodSpec, container: ContainerSpec) -> ContainerAllocateResponse:
        """Prepare the start of a container, as a pod worker: missing records, PreStartContainer.

        Returns:
            the merged answers of all resources of the container.

        Raises:
            DeviceError: the container has to wait.
            KubeletPanicError: as in `allocate`.
        """
        owner, needs_ids = (pod.uid, container.name), False
        for resource in shuffled(self._chance, container.limits):
            if container.limits[resource] == 0 or not self._books.is_plugin_resource(resource):
                continue
            await self._pre_start(owner, resource)
            is_active = pod.uid in self._active()
            needs_ids |= is_active and self._books.records.ids(owner, resource) is None
        if needs_ids:
            await self.allocate(pod, container)
        return self.answers(owner)

    def answers(self, owner: ContainerKey) -> ContainerAllocateResponse:
        """The container's recorded answers, merged."""
        return merge(self._books.records.of_container(owner).values())

    async def _pre_start(self, owner: ContainerKey, resource: str) -> None:
        endpoint = self._books.endpoints.get(resource)
        if endpoint is None:
            raise DeviceError(f"endpoint not found in cache for a registered resource: {resource}")
        if endpoint.options is None or not endpoint.options.pre_start_required:
            return
        uid, container = owner
        ids = self._books.records.ids(owner, resource)
        if ids is None:
            raise DeviceError(
                f"no devices found allocated in local cache for pod {uid}, "
                f"container {container}, resource {resource}"
            )
        order = shuffled(self._chance, ids)
        try:
            await endpoint.pre_start(order)
        except DeviceError as error:
            self._note("prestart_refused", owner, resource, order, str(error))
            raise
        self._note("prestarted", owner, resource, order)

    async def _allocate_all(
        self, pod: PodSpec, container: ContainerSpec, table: dict[str, frozenset[str]]
    ) -> None:
        owner, collected, changed = (pod.uid, container.name), False, False
        for resource in shuffled(self._chance, container.limits):
            if not self._books.is_plugin_resource(resource):
                continue
            if not collected:
                self.collect()
                collected = True
            recorded = self._books.records.ids(owner, resource)
            demand = Demand(owner, resource, container.limits[resource], recorded)
            ids = await self._choose(demand, table.get(resource, frozenset()))
            if ids:
                await self._ask(demand, ids)
                changed = True
        if changed:
            await asyncio.sleep(CHECKPOINT)
            self._books.save()

    async def _choose(self, demand: Demand, reusable: frozenset[str]) -> frozenset[str]:
        missing = demand.still_needed()
        if not self.sources_ready and demand.owner in self._running_at_start:
            return frozenset()
        table = demand.require_health(self._books.tables.get(demand.resource))
        if missing == 0:
            return frozenset()
        marks = self._books.in_use.setdefault(demand.resource, set())
        taken = draw(self._chance, reusable, missing)
        marks |= taken
        missing -= len(taken)
        if missing == 0:
            return taken
        free = demand.available(table, marks, missing)
        preferred = await self._prefer(demand, free, taken)
        chosen = taken | fill(self._chance, preferred, free, missing)
        self._books.in_use.setdefault(demand.resource, set()).update(chosen)
        return chosen

    async def _prefer(
        self, demand: Demand, free: frozenset[str], taken: frozenset[str]
    ) -> tuple[str, ...]:
        endpoint = self._books.endpoints.get(demand.resource)
        if endpoint is None or not endpoint.prefers():
            return ()
        available = shuffled(self._chance, free | taken)
        self._note("preferring", demand.owner, demand.resource, available, str(demand.count))
        must_include = shuffled(self._chance, taken)
        answer = await endpoint.prefer(available, must_include, demand.count)
        self._note("preferred", demand.owner, demand.resource, answer)
        return answer

    async def _ask(self, demand: Demand, ids: frozenset[str]) -> None:
        owner, resource = demand.owner, demand.resource
        endpoint = self._books.endpoints.get(resource)
        order = shuffled(self._chance, ids)
        self._note("allocating", owner, resource, order)
        try:
            responses = await self._call(endpoint, resource, order)
        except DeviceError as error:
            self._books.recount()
            self._note("allocate_refused", owner, resource, order, str(error))
            raise
        if not responses:
            text = "no containers return in allocation response "
            self._note("allocate_refused", owner, resource, order, text)
            raise DeviceError(text)  # the marks stay until the next collection, as in the kubelet
        numa = self._books.tables.get(resource, DeviceTable()).by_numa(order)
        self._books.records.insert(owner, resource, DeviceRecord(numa, responses[0]))
        self._note("allocated", owner, resource, order)

    async def _call(
        self, endpoint: PluginEndpoint | None, resource: str, order: list[str]
    ) -> list[ContainerAllocateResponse]:
        if endpoint is None:
            raise DeviceError(f"unknown Device Plugin {resource}")
        return await endpoint.allocate(order)

    def _note(
        self,
        kind: SeenKind,
        owner: ContainerKey,
        resource: str,
        ids: Iterable[str],
        text: str = "",
    ) -> None:
        uid, container = owner
        self._seen.note(kind, resource=resource, pod=uid, container=container, ids=ids, text=text)


class Admitter:
    """Admits one pod at a time. `active`: every pod that is admitted or being admitted."""

    def __init__(
        self, node: KubeletNode, books: KubeletBooks, allocator: DeviceAllocator, seen: KubeletLog
    ) -> None:
        self.active: dict[str, PodSpec] = {}
        self._node = node
        self._books = books
        self._allocator = allocator
        self._seen = seen

    async def admit(self, pod: PodSpec) -> KubeletAdmission:
        """Run all handlers. A rejected pod is inactive at once.

        Raises:
            KubeletPanicError: see Allocator.allocate.
        """
        self.active[pod.uid] = pod
        self._seen.note("admitting", pod=pod.uid)
        refusal = await self._allocate(pod) or self._predicate(pod)
        if refusal is None:
            answers = {c.name: self._allocator.answers((pod.uid, c.name)) for c in pod.containers}
            self._seen.note("admitted", pod=pod.uid)
            return KubeletAdmission(admitted=True, containers=answers)
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
        room = self._raised(pod)
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

    def _raised(self, pod: PodSpec) -> Mapping[str, int]:
        """The Node's allocatable, raised to what is held if the pod itself holds some of it."""
        room = dict(self._node.published)
        if self._books.records.has_pod(pod.uid):
            for resource, ids in self._books.in_use.items():
                room[resource] = max(room.get(resource, 0), len(ids))
        return room
