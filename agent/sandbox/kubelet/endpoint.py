"""One plugin: the ids that it lists, the choice among them, and the connection to it.

The connection behaves as grpc-go's.
"""

import asyncio
import random
import struct
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    Device,
    DevicePluginOptions,
    DevicePluginStub,
    PreferredAllocationRequest,
)

if TYPE_CHECKING:
    from grpclib._typing import IProtoMessage

# The device table of one resource and the choice of ids for a container: the rules and texts of
# kubelet 1.36, without topology hints (policy none). So every free id is "without affinity".

HEALTHY: Final = "Healthy"
NO_NUMA: Final = -1


class DeviceError(Exception):
    """No ids were given. str() is the kubelet's exact text.

    `said` is the text in a container's status: for an error that a plugin returned, only the
    plugin's text.
    """

    def __init__(self, text: str, said: str | None = None) -> None:
        super().__init__(text)
        self.said: Final = text if said is None else said


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """All ids of one resource. An id that was listed twice can be in both sets.

    `nodes`: the NUMA nodes of each id, or None if its entry had no topology.
    """

    nodes: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    healthy: frozenset[str] = frozenset()
    unhealthy: frozenset[str] = frozenset()

    @classmethod
    def of(cls, entries: Sequence[Device]) -> "DeviceTable":
        """The table after a list, which replaces everything before it."""
        return cls(
            nodes={
                one.id: None
                if one.topology is None
                else tuple(node.id for node in one.topology.nodes)
                for one in entries
            },
            healthy=frozenset(entry.id for entry in entries if entry.health == HEALTHY),
            unhealthy=frozenset(entry.id for entry in entries if entry.health != HEALTHY),
        )

    def without_plugin(self) -> "DeviceTable":
        """The table after the plugin's stream has ended: all ids are unhealthy."""
        return replace(self, healthy=frozenset(), unhealthy=self.unhealthy | self.healthy)

    @property
    def capacity(self) -> int:
        """Healthy and unhealthy ids together; an id in both sets counts twice."""
        return len(self.healthy) + len(self.unhealthy)

    def by_numa(self, ids: Iterable[str]) -> dict[int, tuple[str, ...]]:
        """Ids under each of their NUMA nodes, as the checkpoint has them; -1 means none."""
        grouped: dict[int, tuple[str, ...]] = {}
        for device_id in ids:
            for node in self.nodes.get(device_id) or (NO_NUMA,):
                grouped[node] = (*grouped.get(node, ()), device_id)
        return grouped


def draw(chance: random.Random, ids: Iterable[str], count: int) -> frozenset[str]:
    """At most `count` ids in random order, as from the kubelet's maps."""
    return frozenset(shuffled(chance, ids)[:count])


def fill(
    chance: random.Random, preferred: Iterable[str], free: frozenset[str], count: int
) -> frozenset[str]:
    """`count` free ids, the plugin's preferred ones first. Ids that are not free are ignored."""
    chosen = draw(chance, free.intersection(preferred), count)
    return chosen | draw(chance, free - chosen, count - len(chosen))


def shuffled(chance: random.Random, values: Iterable[str]) -> list[str]:
    """The values in random order, because no plugin may rely on an order."""
    order = sorted(values)
    chance.shuffle(order)
    return order


# The connection.

MESSAGE_LIMIT: Final = 4 * 1024 * 1024
DIAL_TIMEOUT: Final = 10.0
GRACE_PERIOD: Final = 300.0
_FIRST_REDIAL: Final = 1.0
_REDIAL_GROWTH: Final = 1.6
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


async def dial(path: Path) -> PluginChannel:
    """Dial a plugin until something listens; retry after 1, 1.6, 2.56 … s, for 10 s in all.

    Raises DeviceError: no answer in time; the text is the kubelet's.
    """
    channel, delay = PluginChannel(path), _FIRST_REDIAL
    try:
        async with asyncio.timeout(DIAL_TIMEOUT):
            while True:
                try:
                    await channel.__connect__()
                except OSError:
                    await asyncio.sleep(delay)
                    delay *= _REDIAL_GROWTH
                else:
                    return channel
    except TimeoutError:
        raise DeviceError("failed to dial device plugin: context deadline exceeded") from None


def go_text(error: BaseException) -> str:
    """The error as Go prints it. The text appears in the pod's status."""
    status = error.status if isinstance(error, GRPCError) else Status.UNAVAILABLE
    code = "".join(part.capitalize() for part in status.name.split("_"))
    return f"rpc error: code = {code.replace('Cancelled', 'Canceled')} desc = {_said(error)}"


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

    A registration from the checkpoint has no channel, and its `options` are None.
    """

    resource: str
    _channel: PluginChannel | None = None
    options: DevicePluginOptions | None = None
    stopped_at: float | None = None

    def stop(self, now: float) -> None:
        """Note that the plugin is gone since `now` (loop time). The grace period starts."""
        self.stopped_at = now

    def prefers(self) -> bool:
        """Whether the plugin offers GetPreferredAllocation."""
        return self.options is not None and self.options.get_preferred_allocation_available

    def is_expired(self, now: float) -> bool:
        """Whether it has been stopped for longer than the grace period."""
        return self.stopped_at is not None and now - self.stopped_at > GRACE_PERIOD

    async def follow(self, receive: Callable[[Sequence[Device]], None]) -> None:
        """Call ListAndWatch and pass every list to `receive` until the plugin ends the stream.

        Raises PLUGIN_FAULTS: the stream ended in another way than by the plugin's return.
        """
        async for response in self._stub().list_and_watch():
            receive(response.devices)

    async def allocate(self, ids: Iterable[str]) -> list[ContainerAllocateResponse]:
        """One Allocate with one container request, without a deadline.

        Raises DeviceError: the plugin refused, has stopped or died; the text is Go's.
        """
        request = AllocateRequest([ContainerAllocateRequest(list(ids))])
        answer = await _answered(self._stub().allocate(request))
        return answer.container_responses

    async def prefer(
        self, available: Iterable[str], must_include: Iterable[str], size: int
    ) -> tuple[str, ...]:
        """One GetPreferredAllocation, without a deadline. Raises DeviceError: the call failed."""
        asked = ContainerPreferredAllocationRequest(list(available), list(must_include), size)
        request = PreferredAllocationRequest([asked])
        try:
            answer = await _answered(self._stub().get_preferred_allocation(request))
        except DeviceError as error:
            text = f"device plugin GetPreferredAllocation rpc failed with err: {error}"
            raise DeviceError(text) from error
        first = answer.container_responses[:1]
        return tuple(device_id for response in first for device_id in response.device_i_ds)

    def _stub(self) -> DevicePluginStub:
        if self._channel is None or self.stopped_at is not None:
            raise DeviceError(f"endpoint {self.resource} has been stopped")
        return DevicePluginStub(self._channel)


async def _answered(call: Coroutine[object, object, _AnswerT]) -> _AnswerT:
    try:
        return await call
    except PLUGIN_FAULTS as error:
        raise DeviceError(go_text(error), _said(error)) from error
