"""The kubelet's gRPC services on unix sockets: Registration and PodResources.

Registration is that of kubelets up to and including 1.36, with one client per resource name. A
second Register replaces the first and leaves its stream open. The end of *any* stream of a resource
disconnects the current client.
"""

import asyncio
import random
import socket
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import H2Protocol
from grpclib.server import Server
from typing_extensions import override

from agent.kit.tasks import Allowance
from agent.sandbox.kubelet.allocation import NO_NUMA, DeviceManager, healthy, numa_nodes
from agent.sandbox.kubelet.endpoint import (
    PLUGIN_FAULTS,
    DeviceError,
    PluginChannel,
    PluginEndpoint,
    go_text,
)
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
from agent.wire.v1beta1 import DevicePluginStub, Empty, RegisterRequest, RegistrationBase

if TYPE_CHECKING:
    from grpclib._typing import IServable

_TURNS: Final = 3
"""Turns of the loop until a connection that was just accepted can be closed."""
VERSION: Final = "v1beta1"
_BURST: Final = 10
_REFILL: Final = 0.01


class SocketServer(Server):
    """One incarnation of one socket; built and used inside one event loop."""

    def __init__(self, services: "Collection[IServable]") -> None:
        super().__init__(services)
        self.connections: Final = set[H2Protocol]()

    @override
    def _protocol_factory(self) -> H2Protocol:
        connection = super()._protocol_factory()
        self.connections.add(connection)
        return connection

    async def serve(self, path: Path) -> None:
        """Bind and listen. An existing file is replaced.

        asyncio gets a bound socket, so that no version of it removes the file at the end.

        Raises OSError: the path cannot be bound.
        """
        path.unlink(missing_ok=True)  # noqa: ASYNC240 -- one system call on a run directory
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        await self.start(sock=listener)

    async def die(self) -> None:
        """Cut all connections and stop listening; the socket file stays."""
        self.close()
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        for connection in self.connections:
            if hasattr(connection, "processor"):
                connection.processor.close("kubelet is gone")
        await self.wait_closed()


@dataclass(eq=False)
class RegistrationServer(RegistrationBase):
    """Serves `Register`. Everything after it runs in tasks given to `_spawn`.

    `_clients`: the current client of each resource. `_channels`: every connection to a plugin.
    """

    _directory: Path
    _devices: DeviceManager
    _spawn: Callable[[Coroutine[object, object, None]], object]
    _clients: dict[str, PluginChannel] = field(default_factory=dict)
    _channels: set[PluginChannel] = field(default_factory=set)

    @override
    async def register(self, message: RegisterRequest) -> Empty:
        if message.version != VERSION:
            supported = f'not supported by kubelet. Supported version is ["{VERSION}"]'
            text = f'requested API version "{message.version}" is {supported}'
            raise GRPCError(Status.UNKNOWN, text)
        resource, channel = message.resource_name, PluginChannel(self._directory / message.endpoint)
        self._channels.add(channel)
        self._clients[resource] = channel
        try:
            options = await DevicePluginStub(channel).get_device_plugin_options(Empty())
        except PLUGIN_FAULTS as error:
            # The failed client is dropped *by name*: an earlier client is forgotten, but its stream
            # stays.
            self._clients.pop(resource, None)
            text = f"failed to get device plugin options: {go_text(error)}"
            raise GRPCError(Status.UNKNOWN, text) from error
        endpoint = PluginEndpoint(resource, channel, options.get_preferred_allocation_available)
        self._devices.connected(endpoint)
        self._spawn(self._follow(endpoint))
        return Empty()

    def close(self) -> None:
        """Cut every connection to a plugin."""
        for channel in self._channels:
            channel.close()

    async def _follow(self, endpoint: PluginEndpoint) -> None:
        """Read the plugin's lists until its stream ends in any way."""
        resource = endpoint.resource
        # DeviceError: an older stream ended before this one started.
        with suppress(*PLUGIN_FAULTS, DeviceError):
            async for response in endpoint.stub().list_and_watch():
                self._devices.listed(resource, response.devices)
        # The current client is disconnected, even if it is just asked for its options. If there is
        # none, this stream's connection stays open, and its plugin still gets calls.
        if resource in self._clients:
            channel = self._clients.pop(resource)
            channel.close()
            self._channels.discard(channel)
            self._devices.disconnected(resource)


@dataclass(eq=False)
class PodResourcesLister(PodResourcesListerBase):
    """Answers from the records of the active pods without waiting."""

    _devices: DeviceManager
    _chance: random.Random
    _limit: Allowance = field(default_factory=lambda: Allowance(_BURST, _REFILL))

    @override
    async def list(self, message: ListPodResourcesRequest) -> ListPodResourcesResponse:
        self._admit()
        self._devices.collect()
        pods = self._devices.active.values()
        return ListPodResourcesResponse([self._describe(pod) for pod in pods])

    @override
    async def get(self, message: GetPodResourcesRequest) -> GetPodResourcesResponse:
        self._admit()
        wanted = (message.pod_namespace, message.pod_name)
        found = [pod for pod in self._devices.active.values() if pod.full_name == wanted]
        if not found:
            text = f"pod {message.pod_name} in namespace {message.pod_namespace} not found"
            raise GRPCError(Status.UNKNOWN, text)
        return GetPodResourcesResponse(self._describe(found[-1]))

    @override
    async def get_allocatable_resources(
        self, message: AllocatableResourcesRequest
    ) -> AllocatableResourcesResponse:
        self._admit()
        entries = [
            _entry(resource, device_id, node)
            for resource, table in self._devices.tables.items()
            for device_id in healthy(table)
            for node in numa_nodes(table[device_id])
        ]
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
            for resource, record in self._devices.records.get((uid, container), {}).items()
            for node, ids in record.numa.items()
            for device_id in ids
        ]
        self._chance.shuffle(entries)
        return entries


def _entry(resource: str, device_id: str, node: int) -> ContainerDevices:
    topology = None if node == NO_NUMA else TopologyInfo([NumaNode(node)])
    return ContainerDevices(resource, [device_id], topology)
