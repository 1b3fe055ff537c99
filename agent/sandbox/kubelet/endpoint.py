"""A connection from the kubelet to a plugin that behaves as grpc-go's."""

import asyncio
import struct
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from grpclib.client import Channel
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from typing_extensions import override

from agent.sandbox.kubelet.devices import DeviceError, ListedDevice
from agent.wire.v1beta1 import (
    AllocateRequest,
    ContainerAllocateRequest,
    ContainerAllocateResponse,
    ContainerPreferredAllocationRequest,
    DevicePluginOptions,
    DevicePluginStub,
    ListAndWatchResponse,
    PreferredAllocationRequest,
    PreStartContainerRequest,
)

if TYPE_CHECKING:
    from grpclib._typing import IProtoMessage

MESSAGE_LIMIT: Final = 4 * 1024 * 1024
DIAL_TIMEOUT: Final = 10.0
GRACE_PERIOD: Final = 300.0
_PRE_START_TIMEOUT: Final = 30.0
_FIRST_REDIAL: Final = 1.0
_REDIAL_GROWTH: Final = 1.6
_CODES: Final[Mapping[Status, str]] = {
    status: "".join(part.capitalize() for part in status.name.split("_")) for status in Status
} | {Status.OK: "OK", Status.CANCELLED: "Canceled"}

PLUGIN_FAULTS: Final = (
    GRPCError,
    StreamTerminatedError,
    ProtocolError,
    OSError,
    AssertionError,  # grpclib: the peer closed in the middle of a message
    NotImplementedError,  # grpclib: a compressed message
)
"""The exceptions of a call if the plugin breaks the protocol or dies."""


_AnswerT = TypeVar("_AnswerT")


class _BoundedCodec(ProtoCodec):
    """Accepts the messages that grpc-go accepts: at most 4 MiB and well-formed."""

    @override
    def decode(self, data: bytes, message_type: "type[IProtoMessage]") -> "IProtoMessage":
        if len(data) > MESSAGE_LIMIT:
            text = f"grpc: received message larger than max ({len(data)} vs. {MESSAGE_LIMIT})"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, text)
        try:
            return super().decode(data, message_type)
        except (ValueError, EOFError, TypeError, struct.error) as error:
            text = f"grpc: failed to unmarshal the received message: {error}"
            raise GRPCError(Status.INTERNAL, text) from error


class _GreetedProtocol(H2Protocol):
    """Knows when the server's first frame came: before, grpc-go does not count as connected."""

    def __init__(self, plain: H2Protocol) -> None:
        super().__init__(plain.handler, plain.config, plain.h2_config)
        self.settled = asyncio.Event()
        self.greeted = False

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.greeted = True
        self.settled.set()

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.settled.set()


class PluginChannel(Channel):
    """A connection to one plugin socket, with `:authority: localhost` as kubelet ≥ 1.26 sends."""

    def __init__(self, path: Path) -> None:
        super().__init__(path=str(path), codec=_BoundedCodec())
        self._is_closed = False

    @override
    def close(self) -> None:
        self._is_closed = True
        super().close()

    @override
    async def __connect__(self) -> H2Protocol:
        # grpclib connects again for a call whose connection is lost. A dying process may accept
        # that connection, and close() may come in between.
        protocol = await super().__connect__()
        if self._is_closed:
            super().close()
            raise ConnectionResetError("the plugin is gone")
        return protocol

    @override
    def _get_authority(self, host: str, port: int) -> str:
        return "localhost"

    @override
    def _protocol_factory(self) -> H2Protocol:
        return _GreetedProtocol(super()._protocol_factory())

    async def connect(self) -> None:
        """Connect and wait for the server's first frame.

        Raises:
            OSError: no process listens, or the connection broke before the first frame.
        """
        protocol = await self.__connect__()
        if isinstance(protocol, _GreetedProtocol):
            await protocol.settled.wait()
            if not protocol.greeted:
                raise ConnectionResetError("connection lost before the server preface")


async def dial(path: Path) -> PluginChannel:
    """Dial a plugin; retry after 1, 1.6, 2.56 … s, for 10 s in all.

    Raises:
        DeviceError: no answer in time; the text is the kubelet's.
    """
    channel, delay = PluginChannel(path), _FIRST_REDIAL
    try:
        async with asyncio.timeout(DIAL_TIMEOUT):
            while True:
                try:
                    await channel.connect()
                except OSError:
                    await asyncio.sleep(delay)
                    delay *= _REDIAL_GROWTH
                else:
                    return channel
    except TimeoutError:
        channel.close()
        raise DeviceError("failed to dial device plugin: context deadline exceeded") from None
    except asyncio.CancelledError:
        channel.close()
        raise


def go_text(error: BaseException) -> str:
    """The error as Go prints it. The text appears in the pod's status."""
    status = error.status if isinstance(error, GRPCError) else Status.UNAVAILABLE
    return f"rpc error: code = {_CODES[status]} desc = {go_description(error)}"


def go_description(error: BaseException) -> str:
    """The message of the error without its code."""
    if isinstance(error, GRPCError):
        return error.message or ""
    if isinstance(error, OSError):
        return f'connection error: desc = "{error}"'
    return "error reading from server: EOF"


class PluginEndpoint:
    """One registration of a resource: the channel to its plugin, or the note that there was one.

    A registration from the checkpoint has no channel, and its `options` are None.
    """

    def __init__(
        self,
        resource: str,
        channel: PluginChannel | None = None,
        options: DevicePluginOptions | None = None,
    ) -> None:
        self.resource = resource
        self.options = options
        self.stopped_at: float | None = None
        self._channel = channel

    def stop(self, now: float) -> None:
        """Note that the plugin is gone since `now` (loop time). The grace period starts."""
        self.stopped_at = now

    def prefers(self) -> bool:
        """Whether the plugin offers GetPreferredAllocation."""
        return self.options is not None and self.options.get_preferred_allocation_available

    def is_expired(self, now: float) -> bool:
        """Whether it has been stopped for longer than the grace period."""
        return self.stopped_at is not None and now - self.stopped_at > GRACE_PERIOD

    async def follow(self, receive: Callable[[tuple[ListedDevice, ...]], None]) -> None:
        """Call ListAndWatch and pass every list to `receive` until the plugin ends the stream.

        Raises:
            PLUGIN_FAULTS: the stream ended in another way than by the plugin's return.
        """
        async for response in self._stub().list_and_watch():
            receive(_read_list(response))

    async def allocate(self, ids: Iterable[str]) -> list[ContainerAllocateResponse]:
        """One Allocate with one container request, without a deadline.

        Raises:
            DeviceError: the plugin refused, has stopped or died; the text is Go's.
        """
        request = AllocateRequest([ContainerAllocateRequest(list(ids))])
        answer = await _answered(self._stub().allocate(request))
        return answer.container_responses

    async def prefer(
        self, available: Iterable[str], must_include: Iterable[str], size: int
    ) -> tuple[str, ...]:
        """One GetPreferredAllocation, without a deadline.

        Raises:
            DeviceError: the call failed.
        """
        asked = ContainerPreferredAllocationRequest(list(available), list(must_include), size)
        request = PreferredAllocationRequest([asked])
        try:
            answer = await _answered(self._stub().get_preferred_allocation(request))
        except DeviceError as error:
            text = f"device plugin GetPreferredAllocation rpc failed with err: {error}"
            raise DeviceError(text) from error
        first = answer.container_responses[:1]
        return tuple(device_id for response in first for device_id in response.device_i_ds)

    async def pre_start(self, ids: Iterable[str]) -> None:
        """One PreStartContainer with the kubelet's deadline of 30 s.

        Raises:
            DeviceError: the call failed.
        """
        request = PreStartContainerRequest(list(ids))
        try:
            call = self._stub().pre_start_container(request, timeout=_PRE_START_TIMEOUT)
            await _answered(call)
        except DeviceError as error:
            text = f"device plugin PreStartContainer rpc failed with err: {error}"
            raise DeviceError(text) from error

    def close(self) -> None:
        """Close the connection; every call in progress on it fails."""
        if self._channel is not None:
            self._channel.close()

    def _stub(self) -> DevicePluginStub:
        if self._channel is None or self.stopped_at is not None:
            raise DeviceError(f"endpoint {self.resource} has been stopped")
        return DevicePluginStub(self._channel)


async def _answered(call: Coroutine[object, object, _AnswerT]) -> _AnswerT:
    try:
        return await call
    except TimeoutError as error:
        late = GRPCError(Status.DEADLINE_EXCEEDED, "context deadline exceeded")
        raise DeviceError(go_text(late), go_description(late)) from error
    except PLUGIN_FAULTS as error:
        raise DeviceError(go_text(error), go_description(error)) from error


def _read_list(response: ListAndWatchResponse) -> tuple[ListedDevice, ...]:
    return tuple(
        ListedDevice(
            entry.id,
            entry.health,
            None if entry.topology is None else tuple(node.id for node in entry.topology.nodes),
        )
        for entry in response.devices
    )
