"""The PodResources service: serves the kubelet's records, with its rate limit."""

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError
from typing_extensions import override

from agent.sandbox.kubelet.allocation import DeviceAllocator
from agent.sandbox.kubelet.books import KubeletBooks
from agent.sandbox.kubelet.devices import NO_NUMA
from agent.sandbox.kubelet.pods import PodSpec
from agent.wire.v1 import (
    AllocatableResourcesRequest,
    AllocatableResourcesResponse,
    ContainerDevices,
    ContainerResources,
    GetPodResourcesRequest,
    GetPodResourcesResponse,
    ListPodResourcesRequest,
    ListPodResourcesResponse,
    NumaNode,
    PodResources,
    PodResourcesListerBase,
    TopologyInfo,
)

_BURST: Final = 10
_PER_SECOND: Final = 100.0


class RateLimit:
    """A token bucket on loop time, shared by all clients: 10 at once, then 100 a second."""

    def __init__(self) -> None:
        self._tokens = float(_BURST)
        self._filled_at = asyncio.get_running_loop().time()

    def take(self) -> None:
        """Take one token.

        Raises:
            GRPCError: RESOURCE_EXHAUSTED, if there is none.
        """
        now = asyncio.get_running_loop().time()
        self._tokens = min(_BURST, self._tokens + (now - self._filled_at) * _PER_SECOND)
        self._filled_at = now
        if self._tokens < 1:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._tokens -= 1


class PodResourcesLister(PodResourcesListerBase):
    """Answers from the records without waiting. `pods`: the active pods by UID."""

    def __init__(
        self,
        books: KubeletBooks,
        allocator: DeviceAllocator,
        pods: Mapping[str, PodSpec],
        chance: random.Random,
    ) -> None:
        self._books = books
        self._allocator = allocator
        self._pods = pods
        self._chance = chance
        self._limit = RateLimit()

    @override
    async def list(self, message: ListPodResourcesRequest) -> ListPodResourcesResponse:
        self._limit.take()
        self._allocator.collect()
        return ListPodResourcesResponse([self._describe(pod) for pod in self._pods.values()])

    @override
    async def get(self, message: GetPodResourcesRequest) -> GetPodResourcesResponse:
        self._limit.take()
        wanted = (message.pod_namespace, message.pod_name)
        found = [pod for pod in self._pods.values() if pod.full_name == wanted]
        if not found:
            text = f"pod {message.pod_name} in namespace {message.pod_namespace} not found"
            raise GRPCError(Status.UNKNOWN, text)
        return GetPodResourcesResponse(self._describe(found[-1]))

    @override
    async def get_allocatable_resources(
        self, message: AllocatableResourcesRequest
    ) -> AllocatableResourcesResponse:
        self._limit.take()
        entries: list[ContainerDevices] = []
        for resource, table in self._books.tables.items():
            for device_id in table.healthy:
                nodes = table.nodes.get(device_id)
                entries += _entries(resource, device_id, (NO_NUMA,) if nodes is None else nodes)
        return AllocatableResourcesResponse(entries)

    def _describe(self, pod: PodSpec) -> PodResources:
        listed = [c for c in pod.containers if c.kind != "init"]
        return PodResources(
            name=pod.name,
            namespace=pod.namespace,
            containers=[ContainerResources(c.name, [*self._held(pod.uid, c.name)]) for c in listed],
        )

    def _held(self, uid: str, container: str) -> Sequence[ContainerDevices]:
        entries = [
            entry
            for resource, record in self._books.records.of_container((uid, container)).items()
            for node, ids in record.numa.items()
            for device_id in ids
            for entry in _entries(resource, device_id, (node,))
        ]
        self._chance.shuffle(entries)
        return entries


def _entries(resource: str, device_id: str, nodes: tuple[int, ...]) -> Iterator[ContainerDevices]:
    for node in nodes:
        topology = None if node == NO_NUMA else TopologyInfo([NumaNode(node)])
        yield ContainerDevices(resource, [device_id], topology)
