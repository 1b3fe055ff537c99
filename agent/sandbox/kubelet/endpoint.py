"""The connection to one plugin. It behaves as grpc-go's."""

from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from grpclib.client import Channel
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from typing_extensions import override

from agent.wire.v1beta1 import (
    AllocateRequest,
    ContainerAllocateRequest,
    ContainerAllocateResponse,
    ContainerPreferredAllocationRequest,
    DevicePluginStub,
    PreferredAllocationRequest,
)

if TYPE_CHECKING:
    from grpclib._typing import IProtoMessage

MESSAGE_LIMIT: Final = 4 * 1024 * 1024
PLUGIN_FAULTS: Final = (
    GRPCError,
    StreamTerminatedError,
    ProtocolError,
    OSError,
    AssertionError,  # grpclib: the peer closed in the middle of a message
)
"""The exceptions of a call if the plugin refuses, breaks the protocol or dies."""
_AnswerT = TypeVar("_AnswerT")


class DeviceError(Exception):
    """No ids were given. str() is the kubelet's exact text.

    `said` is the text in a container's status: for an error that a plugin returned, only the
    plugin's text.
    """

    def __init__(self, text: str, said: str | None = None) -> None:
        super().__init__(text)
        self.said: Final = text if said is None else said


class _BoundedCodec(ProtoCodec):
    """Accepts messages of at most 4 MiB, as grpc-go does."""

    @override
    def decode(self, data: bytes, message_type: "type[IProtoMessage]") -> "IProtoMessage":
        if len(data) > MESSAGE_LIMIT:
            text = f"grpc: received message larger than max ({len(data)} vs. {MESSAGE_LIMIT})"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, text)
        return super().decode(data, message_type)


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


def go_text(error: BaseException) -> str:
    """The error as Go prints it. The text appears in the pod's status."""
    status = error.status if isinstance(error, GRPCError) else Status.UNAVAILABLE
    code = status.name.title().replace("_", "").replace("Cancelled", "Canceled")
    return f"rpc error: code = {code} desc = {_said(error)}"


def _said(error: BaseException) -> str:
    """The message of the error without its code."""
    if isinstance(error, GRPCError):
        return error.message or ""
    if isinstance(error, OSError):
        return f'connection error: desc = "{error}"'
    return "error reading from server: EOF"


@dataclass(eq=False)
class PluginEndpoint:
    """One registration of a resource: the channel to its plugin, or the note that there was one.

    A registration from the checkpoint has no channel. `prefers`: the plugin offers
    GetPreferredAllocation. `stopped_at`: since when (loop time) the plugin is gone.
    """

    resource: str
    channel: PluginChannel | None = None
    prefers: bool = False
    stopped_at: float | None = None

    def stub(self) -> DevicePluginStub:
        """The way to the plugin. Raises DeviceError: it is gone."""
        if self.channel is None or self.stopped_at is not None:
            raise DeviceError(f"endpoint {self.resource} has been stopped")
        return DevicePluginStub(self.channel)

    async def allocate(self, ids: Iterable[str]) -> ContainerAllocateResponse:
        """One Allocate with one container request, without a deadline.

        Raises DeviceError: the plugin refused, has stopped or died; the text is Go's.
        """
        request = AllocateRequest([ContainerAllocateRequest(list(ids))])
        answer = await _answered(self.stub().allocate(request))
        return answer.container_responses[0]

    async def prefer(
        self, available: Iterable[str], must_include: Iterable[str], size: int
    ) -> tuple[str, ...]:
        """One GetPreferredAllocation, without a deadline. Raises DeviceError: the call failed."""
        asked = ContainerPreferredAllocationRequest(list(available), list(must_include), size)
        request = PreferredAllocationRequest([asked])
        try:
            answer = await _answered(self.stub().get_preferred_allocation(request))
        except DeviceError as error:
            text = f"device plugin GetPreferredAllocation rpc failed with err: {error}"
            raise DeviceError(text) from error
        return tuple(answer.container_responses[0].device_i_ds)


async def _answered(call: Coroutine[object, object, _AnswerT]) -> _AnswerT:
    try:
        return await call
    except PLUGIN_FAULTS as error:
        raise DeviceError(go_text(error), _said(error)) from error
