"""The admit handlers in the kubelet's order: the device manager first, then the predicates."""

from collections.abc import Iterable, Mapping

from agent.sandbox.kubelet.allocation import DeviceAllocator
from agent.sandbox.kubelet.books import KubeletBooks
from agent.sandbox.kubelet.devices import DeviceError
from agent.sandbox.kubelet.node import KubeletAdmission, KubeletNode
from agent.sandbox.kubelet.pods import PodSpec
from agent.sandbox.kubelet.seen import KubeletLog


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
        if refusal is not None or _matches(pod.node_selector.items(), self._node.labels):
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


def _matches(selector: Iterable[tuple[str, str]], labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector)
