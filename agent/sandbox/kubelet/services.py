"""The kubelet's gRPC services on unix sockets: Registration and PodResources.

Registration is that of kubelets up to and including 1.36, with one client per resource name. A
second Register replaces the first and leaves its stream open. The end of *any* stream of a resource
disconnects the current client.
"""

import asyncio
import random
import socket
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import H2Protocol
from grpclib.server import Server
from typing_extensions import override

from agent.kit.tasks import Allowance
from agent.sandbox.kubelet.allocation import DeviceAllocator, KubeletBooks
from agent.sandbox.kubelet.endpoint import (
    NO_NUMA,
    PLUGIN_FAULTS,
    DeviceError,
    PluginChannel,
    PluginEndpoint,
    dial,
    go_text,
)
from agent.sandbox.kubelet.pods import KubeletLog, PodSpec
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
from agent.wire.v1beta1 import DevicePluginStub, Empty, RegisterRequest, RegistrationBase

if TYPE_CHECKING:
    from grpclib._typing import IServable

_DEATH_TIMEOUT: Final = 2.0
_TURNS: Final = 3
"""Turns of the loop until a connection that was just accepted can be closed."""
VERSION: Final = "v1beta1"
_BURST: Final = 10
_REFILL: Final = 0.01


class SocketServer(Server):
    """One incarnation of one socket; built and used inside one event loop."""

    def __init__(self, services: "Collection[IServable]") -> None:
        super().__init__(services)
        self._connections: list[H2Protocol] = []
        self._has_served = False

    @override
    def _protocol_factory(self) -> H2Protocol:
        self._connections = [c for c in self._connections if not _is_closed(c)]
        connection = super()._protocol_factory()
        self._connections.append(connection)
        return connection

    async def serve(self, path: Path) -> None:
        """Bind and listen. An existing file is replaced.

        asyncio gets a bound socket, so that no version of it removes the file at the end.

        Raises OSError: the path cannot be bound.
        """
        path.unlink(missing_ok=True)  # noqa: ASYNC240 -- one system call on a run directory
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            await self.start(sock=listener)
            self._has_served = True
        except BaseException:
            listener.close()
            raise

    def open_connections(self) -> int:
        """The number of open connections."""
        return sum(not _is_closed(connection) for connection in self._connections)

    async def die(self) -> None:
        """Cut all connections and stop listening; the socket file stays.

        If it never served, this does nothing.
        """
        if not self._has_served:
            return
        self.close()
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        for connection in self._connections:
            if hasattr(connection, "processor"):
                connection.processor.close("kubelet is gone")
        async with asyncio.timeout(_DEATH_TIMEOUT):
            await self.wait_closed()


def _is_closed(connection: H2Protocol) -> bool:
    return hasattr(connection, "connection") and connection.connection.is_closing()


@dataclass(eq=False)
class RegistrationServer(RegistrationBase):
    """Serves `Register`. Everything after it runs in tasks given to `spawn`.

    `clients`: the client of each resource; it has no channel while it dials.
    """

    _directory: Path
    _books: KubeletBooks
    _seen: KubeletLog
    _spawn: Callable[[Coroutine[object, object, None]], object]
    _clients: dict[str, PluginChannel | None] = field(default_factory=dict)
    _channels: set[PluginChannel] = field(default_factory=set)

    @override
    async def register(self, message: RegisterRequest) -> Empty:
        resource = message.resource_name
        try:
            await self._connect(resource, message)
        except DeviceError as error:
            self._seen.note("register_refused", resource=resource, text=str(error))
            raise GRPCError(Status.UNKNOWN, str(error)) from error
        return Empty()

    def close(self) -> None:
        """Cut every connection to a plugin."""
        for channel in self._channels:
            channel.close()

    async def _connect(self, resource: str, message: RegisterRequest) -> None:
        if message.version != VERSION:
            supported = f'not supported by kubelet. Supported version is ["{VERSION}"]'
            raise DeviceError(f'requested API version "{message.version}" is {supported}')
        self._clients[resource] = None
        try:
            channel = await dial(self._directory / message.endpoint)
            self._channels.add(channel)
            if resource in self._clients:  # an earlier stream may have ended meanwhile
                self._clients[resource] = channel
            options = await DevicePluginStub(channel).get_device_plugin_options(Empty())
        except BaseException as error:
            # The failed client is dropped *by name*: an earlier client is forgotten, but its stream
            # stays.
            self._clients.pop(resource, None)
            if not isinstance(error, PLUGIN_FAULTS):
                raise
            text = f"failed to get device plugin options: {go_text(error)}"
            raise DeviceError(text) from error
        endpoint = PluginEndpoint(resource, channel, options)
        self._books.connected(resource, endpoint)
        self._spawn(self._run(resource, endpoint))

    async def _run(self, resource: str, endpoint: PluginEndpoint) -> None:
        text = "the plugin ended the stream"
        try:
            await endpoint.follow(lambda devices: self._books.listed(resource, devices))
        except PLUGIN_FAULTS as error:
            text = go_text(error)
        except DeviceError as error:  # an older stream ended before this one started
            text = str(error)
        # The current client is disconnected, even if it is still dialling. If there is none, this
        # stream's connection stays open, and its plugin still gets calls.
        if resource in self._clients:
            if (channel := self._clients.pop(resource)) is not None:
                channel.close()
                self._channels.discard(channel)
            self._books.disconnected(resource, text)


@dataclass(eq=False)
class PodResourcesLister(PodResourcesListerBase):
    """Answers from the records without waiting. `pods`: the active pods by UID."""

    _books: KubeletBooks
    _allocator: DeviceAllocator
    _pods: Mapping[str, PodSpec]
    _chance: random.Random
    _limit: Allowance = field(default_factory=lambda: Allowance(_BURST, _REFILL))

    @override
    async def list(self, message: ListPodResourcesRequest) -> ListPodResourcesResponse:
        self._admit()
        self._allocator.collect()
        return ListPodResourcesResponse([self._describe(pod) for pod in self._pods.values()])

    @override
    async def get(self, message: GetPodResourcesRequest) -> GetPodResourcesResponse:
        self._admit()
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
        self._admit()
        entries: list[ContainerDevices] = []
        for resource, table in self._books.tables.items():
            for device_id in table.healthy:
                nodes = table.nodes.get(device_id)
                nodes = (NO_NUMA,) if nodes is None else nodes
                entries += (_entry(resource, device_id, node) for node in nodes)
        return AllocatableResourcesResponse(entries)

    def _admit(self) -> None:
        """Raise RESOURCE_EXHAUSTED if all clients together ask too often."""
        if self._limit.admit() is None:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")

    def _describe(self, pod: PodSpec) -> PodResources:
        listed = [c for c in pod.containers if c.kind != "init"]
        return PodResources(
            name=pod.name,
            namespace=pod.namespace,
            containers=[ContainerResources(c.name, [*self._held(pod.uid, c.name)]) for c in listed],
        )

    def _held(self, uid: str, container: str) -> Sequence[ContainerDevices]:
        entries = [
            _entry(resource, device_id, node)
            for resource, record in self._books.records.get((uid, container), {}).items()
            for node, ids in record.numa.items()
            for device_id in ids
        ]
        self._chance.shuffle(entries)
        return entries


def _entry(resource: str, device_id: str, node: int) -> ContainerDevices:
    topology = None if node == NO_NUMA else TopologyInfo([NumaNode(node)])
    return ContainerDevices(resource, [device_id], topology)
