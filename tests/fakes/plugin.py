"""A scripted device plugin on a real unix socket, for tests of the kubelet's side."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import H2Protocol
from typing_extensions import override

from agent.sandbox.kubelet.services import SocketServer
from agent.wire.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateResponse,
    ContainerPreferredAllocationResponse,
    Device,
    DevicePluginBase,
    DevicePluginOptions,
    Empty,
    ListAndWatchResponse,
    NumaNode,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    PreStartContainerRequest,
    PreStartContainerResponse,
    RegisterRequest,
    RegistrationStub,
    TopologyInfo,
)

RESOURCE = "example.com/gpu"


def a_device(device_id: str, *, health: str = "Healthy", nodes: Iterable[int] | None = None):
    """One entry of a list; `nodes` None leaves the topology out."""
    topology = None if nodes is None else TopologyInfo([NumaNode(node) for node in nodes])
    return Device(device_id, health, topology)


def devices(count: int, *, health: str = "Healthy") -> list[Device]:
    """`count` entries g0, g1, …"""
    return [a_device(f"g{number}", health=health) for number in range(count)]


def answer(ids: Iterable[str]) -> ContainerAllocateResponse:
    """An answer that names its ids, in an order of its own."""
    return ContainerAllocateResponse(envs={"IDS": ",".join(sorted(ids))})


@dataclass
class Script:
    """What the plugin does; every part can be changed while it serves.

    `refusals` are used up one by one, each by one Allocate. `gate` holds every Allocate until set.
    """

    options: DevicePluginOptions = field(default_factory=DevicePluginOptions)
    options_error: GRPCError | None = None
    refusals: list[GRPCError] = field(default_factory=list)
    prefer: Callable[[list[str], list[str], int], list[str]] | None = None
    responses: Callable[[list[str]], list[ContainerAllocateResponse]] | None = None
    gate: asyncio.Event | None = None
    pre_start_error: GRPCError | None = None


class _Ear(SocketServer):
    """Notes what the kubelet says outside its messages."""

    def __init__(self, plugin: "ScriptedPlugin") -> None:
        super().__init__([plugin])
        self._plugin = plugin

    @override
    def _protocol_factory(self) -> H2Protocol:
        connection = super()._protocol_factory()
        accept = connection.handler.accept
        self._plugin.connections += 1

        def listen(stream, headers, release) -> None:
            self._plugin.headers.append(dict(headers))
            accept(stream, headers, release)

        connection.handler.accept = listen  # type: ignore[method-assign, assignment]
        return connection


class ScriptedPlugin(DevicePluginBase):
    """Serves `resource` on `directory/name`; `async with` serves, `register` registers."""

    def __init__(
        self, directory: Path, *, resource: str = RESOURCE, name: str = "p.sock", count: int = 4
    ) -> None:
        self.directory = directory
        self.resource = resource
        self.name = name
        self.script = Script()
        self.devices = devices(count)
        self.preferred: list[tuple[list[str], list[str], int]] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.streams = 0
        self._changed = asyncio.Event()
        self._closing = False
        self._server: _Ear | None = None

    async def __aenter__(self) -> Self:
        await self.serve()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.die()

    async def serve(self) -> None:
        """Bind the socket and serve; what served before ends."""
        await self.die()
        self._server = _Ear(self)
        await self._server.serve(self.path)

    async def die(self) -> None:
        """End as a process does: connections cut, the socket file left."""
        server, self._server = self._server, None
        if server is not None:
            await server.die()

    @property
    def path(self) -> Path:
        """The socket."""
        return self.directory / self.name

    async def register(self, **other: object) -> None:
        """Register with the kubelet in the same directory. Raises GRPCError: it refused."""
        fields = {"version": "v1beta1", "endpoint": self.name, "resource_name": self.resource}
        async with Channel(path=str(self.directory / "kubelet.sock")) as channel:
            request = RegisterRequest(**(fields | other))  # type: ignore[arg-type]
            await RegistrationStub(channel).register(request)

    def publish(self, entries: list[Device]) -> None:
        """Send this list on every stream."""
        self.devices = entries
        self._wake()

    def end_streams(self) -> None:
        """Return from every ListAndWatch; the server goes on."""
        self._closing = True
        self._wake()

    @override
    async def get_device_plugin_options(self, message: Empty) -> DevicePluginOptions:
        if self.script.options_error is not None:
            raise self.script.options_error
        return self.script.options

    @override
    async def list_and_watch(self, message: Empty) -> AsyncIterator[ListAndWatchResponse]:
        self.streams += 1
        self._closing = False
        try:
            while not self._closing:
                changed = self._changed
                yield ListAndWatchResponse(self.devices)
                await changed.wait()
        finally:
            self.streams -= 1

    @override
    async def get_preferred_allocation(
        self, message: PreferredAllocationRequest
    ) -> PreferredAllocationResponse:
        asked = message.container_requests[0]
        available, required = asked.available_deviceIDs, asked.must_include_deviceIDs
        self.preferred.append((available, required, asked.allocation_size))
        if self.script.prefer is None:
            raise GRPCError(Status.UNIMPLEMENTED, "no preference")
        ids = self.script.prefer(available, required, asked.allocation_size)
        return PreferredAllocationResponse([ContainerPreferredAllocationResponse(ids)])

    @override
    async def allocate(self, message: AllocateRequest) -> AllocateResponse:
        (request,) = message.container_requests
        if self.script.gate is not None:
            await self.script.gate.wait()
        if self.script.refusals:
            raise self.script.refusals.pop(0)
        if self.script.responses is not None:
            return AllocateResponse(self.script.responses(request.devices_ids))
        return AllocateResponse([answer(request.devices_ids)])

    @override
    async def pre_start_container(
        self, message: PreStartContainerRequest
    ) -> PreStartContainerResponse:
        if self.script.pre_start_error is not None:
            raise self.script.pre_start_error
        return PreStartContainerResponse()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
