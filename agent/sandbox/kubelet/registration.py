"""The Registration service of kubelets up to and including 1.36: one client per resource name.

A second Register replaces the first and leaves its stream open. The end of *any* stream of a
resource disconnects the current client.
"""

import os.path
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError
from typing_extensions import override

from agent.sandbox.kubelet.books import KubeletBooks
from agent.sandbox.kubelet.devices import DeviceError, is_extended_resource
from agent.sandbox.kubelet.endpoint import (
    PLUGIN_FAULTS,
    PluginChannel,
    PluginEndpoint,
    dial,
    go_text,
)
from agent.sandbox.kubelet.seen import KubeletLog
from agent.wire.v1beta1 import DevicePluginStub, Empty, RegisterRequest, RegistrationBase

VERSION: Final = "v1beta1"


@dataclass(slots=True)
class _Client:
    """The client of a resource. It has no channel while it dials."""

    channel: PluginChannel | None = None


class RegistrationServer(RegistrationBase):
    """Serves `Register`. Everything after it runs in tasks given to `spawn`."""

    def __init__(
        self,
        directory: Path,
        books: KubeletBooks,
        seen: KubeletLog,
        spawn: Callable[[Coroutine[object, object, None]], object],
    ) -> None:
        self._directory = directory
        self._books = books
        self._seen = seen
        self._spawn = spawn
        self._clients: dict[str, _Client] = {}
        self._channels: set[PluginChannel] = set()

    @override
    async def register(self, message: RegisterRequest) -> Empty:
        resource = message.resource_name
        try:
            _require_valid(message)
            await self._connect(resource, self._socket(message.endpoint))
        except DeviceError as error:
            self._seen.note("register_refused", resource=resource, text=str(error))
            raise GRPCError(Status.UNKNOWN, str(error)) from error
        return Empty()

    def close(self) -> None:
        """Cut every connection to a plugin."""
        for channel in self._channels:
            channel.close()

    def _socket(self, endpoint: str) -> Path:
        # Go's filepath.Join: an absolute name stays below the directory, dots are resolved
        return Path(os.path.normpath(f"{self._directory}/{endpoint}"))

    async def _connect(self, resource: str, path: Path) -> None:
        client = self._clients[resource] = _Client()
        try:
            client.channel = await dial(path)
            self._channels.add(client.channel)
            endpoint = await self._ask_options(resource, client.channel)
        except BaseException:
            # The failed client is dropped *by name*: an earlier client is forgotten, but its stream
            # stays.
            self._clients.pop(resource, None)
            raise
        self._books.connected(resource, endpoint)
        self._spawn(self._run(resource, endpoint))

    async def _ask_options(self, resource: str, channel: PluginChannel) -> PluginEndpoint:
        try:
            options = await DevicePluginStub(channel).get_device_plugin_options(Empty())
        except PLUGIN_FAULTS as error:
            text = f"failed to get device plugin options: {go_text(error)}"
            raise DeviceError(text) from error
        return PluginEndpoint(resource, channel, options)

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
        current = self._clients.pop(resource, None)
        if current is not None:
            self._cut(current.channel)
            self._books.disconnected(resource, text)

    def _cut(self, channel: PluginChannel | None) -> None:
        if channel is not None:
            channel.close()
            self._channels.discard(channel)


def _require_valid(message: RegisterRequest) -> None:
    if message.version != VERSION:
        raise DeviceError(
            f'requested API version "{message.version}" is not supported by kubelet. '
            f'Supported version is ["{VERSION}"]'
        )
    if not is_extended_resource(message.resource_name):
        raise DeviceError(f'the ResourceName "{message.resource_name}" is invalid')
