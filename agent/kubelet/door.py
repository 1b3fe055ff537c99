"""The device plugin service: the calls, their answers, and the socket and life of the server."""

import asyncio
import contextlib
import errno
import functools
import itertools
import os
import random
import re
import socket
import stat
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import structlog
from betterproto2 import decode_varint, encode_varint
from grpclib import GRPCError
from grpclib.const import Handler, Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import StreamTerminatedError
from grpclib.protocol import H2Protocol
from grpclib.server import Server, Stream
from typing_extensions import override

from agent.errors import (
    AgentError,
    KubeletError,
    PermissionFault,
    Refusal,
    RefusalReason,
    SettingsError,
    StateError,
    cap,
)
from agent.kit.cell import Cell, News
from agent.kit.tasks import Allowance
from agent.kit.timing import Durations, IdleWaiter, Lag, Tally, loop_time
from agent.kit.unix import UnixChannel, peer_uid
from agent.ledger import ContainerEdits
from agent.model import LIST_BYTES, SliceGroup, SliceId, SliceList
from agent.wire import v1beta1 as pluginapi

log = structlog.get_logger(__name__)

# The agent's socket files in the kubelet's directory: naming, binding, removing dead ones.

PATH_LIMIT = 107
"""Bytes of a unix socket's path, without the closing zero."""

MODE = 0o600


class BoundSocket(msgspec.Struct, frozen=True):
    """A socket of the agent, bound and private (0600), not yet listening."""

    path: Path
    sock: socket.socket
    identity: tuple[int, int]
    """Device and inode of the file: only this file may be deleted."""

    def unlink(self) -> None:
        """Delete the file, unless it is gone or was replaced."""
        try:
            status = self.path.lstat()
        except OSError:
            return
        if (status.st_dev, status.st_ino) == self.identity:
            self.path.unlink(missing_ok=True)


def bind(directory: Path, resource: str, chance: random.Random) -> BoundSocket:
    """Bind a new name in `directory`. If it is taken, the next try has another one.

    Raises:
        SettingsError: the path of the directory is too long for any socket in it.
        PermissionFault: the agent may not write the directory, or others may.
        KubeletError: the directory is missing, or binding failed otherwise.
    """
    check_directory(directory)
    path = directory / socket_name(directory, resource, chance)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # The file is created with its mode: a later chmod could follow a link.
        os.fchmod(sock.fileno(), MODE)
        sock.bind(os.fspath(path))
        status = path.lstat()
    except OSError as error:
        sock.close()
        match error:
            case FileNotFoundError():
                text = f"{directory} is not there: the kubelet makes it at its start"
                raise KubeletError(text) from error
            case PermissionError():
                text = f"{directory} may not be written: run the agent as root"
                raise PermissionFault(text) from error
            case _:
                raise KubeletError(f"{path} cannot be bound: {error.strerror}") from error

    if not stat.S_ISSOCK(status.st_mode) or stat.S_IMODE(status.st_mode) != MODE:
        sock.close()
        # Another file in its place was put there after the bind.
        raise KubeletError(f"{path} is not the private socket that was bound there")
    return BoundSocket(path, sock, (status.st_dev, status.st_ino))


def check_directory(directory: Path) -> None:
    """Check that no other user can replace sockets in the kubelet's directory.

    The kubelet creates it with owner root and mode 0750. A missing directory passes.

    Raises:
        PermissionFault: others may write there.
    """
    try:
        status = directory.stat()
    except OSError:
        return  # binding raises the reason
    if status.st_uid not in {0, os.geteuid()}:
        raise PermissionFault(
            f"{directory} belongs to uid {status.st_uid}, who could put other sockets there:"
            " give it to root [P-KUBELET]"
        )
    if status.st_mode & stat.S_IWOTH:
        raise PermissionFault(
            f"{directory} is writable by everybody, who could put other sockets there: make it"
            " 0750 [P-KUBELET]"
        )


def socket_name(directory: Path, resource: str, chance: random.Random) -> str:
    """A new name: `hami-<tail of the resource>-<8 hex digits>.sock`, the tail cut to fit.

    No name is used twice: the kubelet may still have a record of an earlier one, and a server that
    stops late would delete its successor's file.

    Raises:
        SettingsError: the directory is too long for any name.
    """
    ending = f"-{chance.getrandbits(32):08x}.sock"
    room = PATH_LIMIT - len(os.fsencode(directory)) - len(f"/hami-{ending}")
    if room < 1:
        raise SettingsError(
            f"{directory} is too long for a socket path of {PATH_LIMIT} bytes:"
            " the kubelet's directory needs a shorter path"
        )
    tail = resource.rpartition("/")[2]
    return f"hami-{tail[:room]}{ending}"


def sweep(directory: Path, resource: str) -> tuple[str, ...]:
    """Delete the dead sockets of the agent's earlier servers; return their names.

    Live sockets and those of other plugins stay.
    """
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError:
        return ()  # binding raises the reason
    dead, tail = [], resource.rpartition("/")[2]
    for name in names:
        ours = re.fullmatch(r"hami-(.+)-[0-9a-f]{8}\.sock", name)
        # The tail of a long resource is cut in the name.
        if ours and tail.startswith(ours[1]) and listens(directory / name) is False:
            (directory / name).unlink(missing_ok=True)
            dead.append(name)
    return tuple(dead)


def listens(path: Path) -> bool | None:
    """Whether a socket has a server: one whose server has ended refuses. None: it is no socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return None
    except OSError:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(os.fspath(path)) != errno.ECONNREFUSED


# Encodes and decodes the messages of the device plugin API.

_HEAD = b"\x0a"
"""The tag of field 1: Device.ID, and an entry of the list."""

_TEXTS_1, _TEXTS_2, _NUMBER_3 = 0x0A, 0x12, 0x18
"""Tags of the requests: field 1 and 2 length-delimited, also of messages; field 3 a varint."""


def encode_list(listed: SliceList) -> bytes:
    """Encode a list, as bytes(ListAndWatchResponse) would, which takes 17 µs for each slice.

    Raises:
        SettingsError: with all slices unhealthy, the list would be longer than the kubelet accepts;
            the text says how many slices fit.
    """
    encoded = [_encode_group(group) for group in listed.groups]
    size = sum(worst for _, worst in encoded)
    if size > LIST_BYTES:
        count = sum(len(group.ids) for group in listed.groups)
        raise SettingsError(
            f"{count} slices on {len(listed.groups)} GPUs make a list of {size} bytes when all are"
            f" unhealthy ({size // count} bytes a slice), more than the {LIST_BYTES} bytes that are"
            f" safe with the kubelet's limit of 4 MiB: lower the split count so that at most"
            f" {LIST_BYTES * count // size} slices are listed"
        )
    return b"".join(entries for entries, _ in encoded)


@functools.lru_cache(maxsize=32)
def _encode_group(group: SliceGroup) -> tuple[bytes, int]:
    """The entries of one GPU's slices, and how many bytes they are when unhealthy.

    Each stream encodes the list, and an XID changes one GPU of it. 200 slices take 15 µs, and 0.3
    ms if each is encoded by itself.
    """
    # An unknown NUMA node is omitted: the kubelet never places a container on node -1.
    numa = -1 if group.numa is None else group.numa
    topology = pluginapi.TopologyInfo(nodes=[pluginapi.NumaNode(id=numa)]) if numa >= 0 else None
    worst = bytes(pluginapi.Device(health="Unhealthy", topology=topology))
    well = bytes(pluginapi.Device(health="Healthy", topology=topology))
    tail = well if group.healthy else worst

    parts: list[bytes] = []
    size = 0
    # Neighbours with ids of one length differ only in the ids: the bytes between are equal.
    for length, texts in itertools.groupby((text.encode() for text in group.ids), len):
        ids, name = list(texts), _HEAD + encode_varint(length)
        head = _HEAD + encode_varint(len(name) + length + len(tail)) + name
        parts += (head, (tail + head).join(ids), tail)
        entry = len(name) + length + len(worst)
        size += len(ids) * (len(_HEAD + encode_varint(entry)) + entry)

    return b"".join(parts), size


class PluginCodec(CodecBase):
    """The codec of the plugin's server. Lists are given to it as bytes, by encode_list().

    Requests with ids have a parser of their own: the generated one takes 2.5 µs for each id, on the
    loop, and accepts a text that is cut short. A property test compares it with Google's protobuf.
    """

    __content_subtype__ = "proto"

    @override
    def encode(self, message: Any, message_type: Any) -> bytes:
        """Encode a message."""
        return bytes(message)

    @override
    def decode(self, data: bytes, message_type: Any) -> Any:
        """Decode a request. Raises ValueError or EOFError if it is malformed."""
        if message_type is pluginapi.AllocateRequest:
            ids = [_texts(_fields(container)[_TEXTS_1]) for container in _fields(data)[_TEXTS_1]]
            return pluginapi.AllocateRequest(list(map(pluginapi.ContainerAllocateRequest, ids)))

        if message_type is pluginapi.PreferredAllocationRequest:
            containers = map(_fields, _fields(data)[_TEXTS_1])
            return pluginapi.PreferredAllocationRequest(
                [
                    pluginapi.ContainerPreferredAllocationRequest(
                        available_deviceIDs=_texts(fields[_TEXTS_1]),
                        must_include_deviceIDs=_texts(fields[_TEXTS_2]),
                        allocation_size=_int32(fields[_NUMBER_3]),
                    )
                    for fields in containers
                ]
            )
        if message_type is pluginapi.PreStartContainerRequest:
            return pluginapi.PreStartContainerRequest(_texts(_fields(data)[_TEXTS_1]))
        return message_type.parse(data)


def _fields(data: bytes) -> Mapping[int, list[Any]]:
    """The values in a message by tag, which is the number of a field and its encoding.

    A field that is encoded in another way than the API says is unknown, and ignored.
    """
    fields: defaultdict[int, list[Any]] = defaultdict(list)
    at, end = 0, len(data)
    value: Any
    while at < end:
        # Numbers of one byte, which are those of ids, without a call.
        tag, at = (data[at], at + 1) if data[at] < 0x80 else decode_varint(data, at)
        match tag & 7:
            case 0:
                value, at = decode_varint(data, at)
            case 2:
                is_short = at < end and data[at] < 0x80
                size, at = (data[at], at + 1) if is_short else decode_varint(data, at)
                value, at = data[at : at + size], at + size
            case 1 | 5 as kind:
                value, at = None, at + (8 if kind == 1 else 4)
            case kind:
                raise ValueError(f"a field is encoded in the unknown way {kind}")
        if tag < 8 or at > end:
            raise ValueError(f"field {tag >> 3} is cut short, or no field")
        fields[tag].append(value)
    return fields


def _texts(values: list[bytes]) -> list[str]:
    # All at once, unless a text holds the separator.
    texts = b"\0".join(values).decode().split("\0") if values else []
    return texts if len(texts) == len(values) else [value.decode() for value in values]


def _int32(values: list[int]) -> int:
    number = values[-1] & 0xFFFF_FFFF if values else 0
    return number - (1 << 32) if number >> 31 else number


# The handlers of the kubelet's five calls; they translate between messages and services.

RECEIVE_DEADLINE = 10.0
"""Seconds that a peer has to send its complete request."""

PREFERENCE_FOLLOWED: Final = 0.5
"""Seconds after a call of an admission in which the next one comes. It usually comes after 1 ms
(the Allocate after GetPreferredAllocation) or 8 to 20 ms (the next container or pod)."""

TEXT_LIMIT = 4096
"""Characters of an error's text, which the kubelet copies into the pod's status."""

BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Fence = Callable[[tuple[SliceId, ...]], None]
"""Raises a Refusal if the container that holds these slices must not start. Does not wait."""


class SliceAllocator(Protocol):
    """The service that decides allocations."""

    async def allocate(self, ids: tuple[SliceId, ...]) -> ContainerEdits:
        """Give these slices to the container being admitted. Raises AgentError."""
        ...

    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        """Choose the best `size` ids of `available`, soon and without an error."""
        ...


class Traffic:
    """The kubelet's calls over all servers: open list streams, calls by code, durations.

    `admissions`: those of admissions, for what would disturb them. For each container the kubelet
    calls GetPreferredAllocation, then Allocate.
    """

    def __init__(self) -> None:
        self.streams: Cell[int] = Cell(0)
        self.admissions = IdleWaiter()
        self.calls = Tally(
            "rpc_calls_total",
            "Calls of the kubelet by gRPC code of the answer.",
            ("method", "code"),
        )
        self.durations = Durations(
            "rpc_duration_seconds", "Seconds from request to answer.", ("method", "code"), BUCKETS
        )


class DevicePlugin:
    """The handlers of one device plugin server. Setting `has_ended` ends its list streams.

    Every call ends in an answer, or in a status with one sentence that has the refusal's id.

    `is_current`: whether the resource still has the name that this server registered. With a
    `fence` the kubelet calls PreStartContainer before each start of a container. While
    `is_draining`, each new Allocate is refused, and open calls go on.
    """

    def __init__(
        self,
        lists: Cell[SliceList],
        allocator: SliceAllocator,
        traffic: Traffic,
        fence: Fence | None = None,
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        self._lists = lists
        self._allocator = allocator
        self.traffic = traffic
        self._fence = fence
        self._is_current = is_current
        self.is_draining = False
        self.has_ended = Cell(False)

    async def get_device_plugin_options(self, _: pluginapi.Empty) -> pluginapi.DevicePluginOptions:
        """Return the options, which never change: preferences, and starts if there is a fence."""
        return pluginapi.DevicePluginOptions(
            pre_start_required=self._fence is not None, get_preferred_allocation_available=True
        )

    async def list_and_watch(self, _: pluginapi.Empty) -> AsyncGenerator[bytes, None]:
        """Yield the list at once and after every change; changes during a send are combined."""
        sent: bytes | None = None
        streams = self.traffic.streams
        streams.set(streams.value + 1)
        log.info("plugin.stream_opened", streams=streams.value)
        try:
            news = News(self._lists, self.has_ended)
            while not self.has_ended.value:
                listed = self._lists.value
                try:
                    encoded = encode_list(listed)
                except SettingsError as error:
                    # The kubelet would close the stream: it keeps the former list.
                    log.error("plugin.list_too_long", err=str(error), generation=listed.generation)  # noqa: TRY400 -- no bug
                else:
                    # The kubelet writes its checkpoint at each list, also at an equal one
                    # (devicemanager/manager.go, genericDeviceUpdateCallback).
                    if encoded != sent:
                        sent = encoded
                        yield encoded
                await news.wait()
        finally:
            streams.set(streams.value - 1)

    async def get_preferred_allocation(
        self, message: pluginapi.PreferredAllocationRequest
    ) -> pluginapi.PreferredAllocationResponse:
        """Return a choice for each container, in order."""
        answers = []
        for request in message.container_requests:
            available = _ids(request.available_deviceIDs)
            must_include = _ids(request.must_include_deviceIDs)
            chosen = await self._allocator.prefer(available, must_include, request.allocation_size)
            answers.append(pluginapi.ContainerPreferredAllocationResponse(device_i_ds=list(chosen)))
        return pluginapi.PreferredAllocationResponse(container_responses=answers)

    async def allocate(self, message: pluginapi.AllocateRequest) -> pluginapi.AllocateResponse:
        """Return one answer for each container request, in order.

        Raises:
            AgentError: the allocator's.
            Refusal: the request is empty, or the server is stopping. A server of a former name is
                stopping: a row would get the present name.
        """
        requests = message.container_requests
        if not requests or not all(request.devices_ids for request in requests):
            raise Refusal(RefusalReason.EMPTY_REQUEST, "The kubelet requested no slice.")
        if self.is_draining or not self._is_current():
            sentence = (
                "The GPU agent of this node is stopping, or its resource has another name now; "
                "create the pod again, with the node's present resource name."
            )
            raise Refusal(RefusalReason.STOPPING, sentence)
        answers = [
            container_response(await self._allocator.allocate(_ids(request.devices_ids)))
            for request in requests
        ]
        return pluginapi.AllocateResponse(container_responses=answers)

    async def pre_start_container(
        self, message: pluginapi.PreStartContainerRequest
    ) -> pluginapi.PreStartContainerResponse:
        """Let the container start unless the fence refuses.

        Raises:
            Refusal: the fence's; the kubelet keeps the container waiting and calls again.
        """
        if self._fence is not None:
            try:
                self._fence(_ids(message.devices_ids))
            except Refusal as refusal:
                log.warning("plugin.start_refused", gate=refusal.gate.value, err=refusal.sentence)
                raise
        return pluginapi.PreStartContainerResponse()

    def __mapping__(self) -> dict[str, Handler]:
        """The handlers by path, for grpclib."""
        serve = {
            "GetDevicePluginOptions": self._unary("options", self.get_device_plugin_options),
            "ListAndWatch": self._list_stream,
            "GetPreferredAllocation": self._unary("prefer", self.get_preferred_allocation),
            "Allocate": self._unary("allocate", self.allocate),
            "PreStartContainer": self._unary("prestart", self.pre_start_container),
        }
        return {
            path: generated._replace(func=serve[path.rpartition("/")[2]])
            for path, generated in pluginapi.DevicePluginBase().__mapping__().items()
        }

    def _unary(
        self, method: str, answer: Callable[[Any], Awaitable[Any]]
    ) -> Callable[[Stream[Any, Any]], Awaitable[None]]:
        async def serve(stream: Stream[Any, Any]) -> None:
            is_admission = method in {"prefer", "allocate"}
            under_way = self.traffic.admissions.busy() if is_admission else contextlib.nullcontext()
            with under_way, self._answered(method):
                await stream.send_message(await answer(await received(stream)))

        return serve

    async def _list_stream(self, stream: Stream[Any, Any]) -> None:
        with self._answered("list"):
            async with aclosing(self.list_and_watch(await received(stream))) as lists:
                async for encoded in lists:
                    await stream.send_message(encoded)

    @contextlib.contextmanager
    def _answered(self, method: str) -> Iterator[None]:
        """Count a call, and turn its error into a status with one sentence."""
        started = loop_time()
        status = Status.CANCELLED
        try:
            yield
            status = Status.OK
        except GRPCError as error:
            status = error.status
            raise
        except AgentError as error:
            answer = grpc_error(error)
            status = answer.status
            raise answer from error
        except Exception as error:  # the outermost handler
            status = Status.INTERNAL
            log.exception("plugin.call_failed", method=method)
            text = f"{method} failed in the agent ({type(error).__name__}); its log has the trace"
            raise GRPCError(status, text) from error
        finally:
            self.traffic.calls.add(method, status.name)
            if method != "list":  # a stream lasts as long as the kubelet
                self.traffic.durations.observe(loop_time() - started, method, status.name)


async def received(stream: Stream[Any, Any]) -> Any:  # noqa: ANN401 -- any request
    """Receive the request of a call. Raises GRPCError, or a Refusal of a malformed request."""
    try:
        async with asyncio.timeout(RECEIVE_DEADLINE):
            message = await stream.recv_message()
    except TimeoutError as error:
        raise GRPCError(Status.DEADLINE_EXCEEDED, "the request is incomplete") from error
    # AssertionError and NotImplementedError are grpclib's, for a body that is shorter than its
    # prefix says and for a compressed one. No kubelet sends either.
    except (AssertionError, EOFError, NotImplementedError, ValueError) as error:
        sentence = f"The call holds no whole request: {error}."
        raise Refusal(RefusalReason.MALFORMED_REQUEST, sentence) from error
    if message is None:
        raise Refusal(RefusalReason.MALFORMED_REQUEST, "The call holds no message.")
    return message


def grpc_error(error: AgentError) -> GRPCError:
    """The gRPC error for an error. The pod's status shows code and text, so both are stable."""
    match error:
        case Refusal(gate=RefusalReason.EMPTY_REQUEST | RefusalReason.MALFORMED_REQUEST):
            status = Status.INVALID_ARGUMENT
        case Refusal(transient=True) | StateError():
            status = Status.UNAVAILABLE
        case Refusal():
            status = Status.FAILED_PRECONDITION
        case _:
            status = Status.INTERNAL
    return GRPCError(status, cap(str(error), TEXT_LIMIT))


def _ids(texts: Sequence[str]) -> tuple[SliceId, ...]:
    return tuple(map(SliceId, texts))


def container_response(edits: ContainerEdits) -> pluginapi.ContainerAllocateResponse:
    """Encode what a container receives."""
    return pluginapi.ContainerAllocateResponse(
        envs=dict(edits.envs),
        mounts=[pluginapi.Mount(m.container_path, m.host_path, m.read_only) for m in edits.mounts],
        devices=[
            pluginapi.DeviceSpec(n.container_path, n.host_path, n.permissions) for n in edits.nodes
        ],
        annotations=dict(edits.annotations),
        cdi_devices=[pluginapi.CdiDevice(name) for name in edits.cdi_names],
    )


# The device plugin server of one resource: it binds, serves, checks itself, drains and unlinks.

LAST_CALLS = 1.0
"""Seconds in which admissions in progress are served to their end."""

DRAIN_DEADLINE = 10.0
"""Seconds that open calls have to finish: so long an Allocate waits for the disk or the kubelet."""

STREAM_DEADLINE = 1.0
"""Seconds for the list streams to end; a kubelet that does not read is cut off."""

PEER_DEADLINE = 0.5
"""Seconds that peers have to close their connections after their last call ended."""

CLOSE_DEADLINE = 1.0
"""Seconds for the remaining handlers to end after that."""

SELF_CHECK_DEADLINE = 2.0

UNREAD_LIMIT = 1024 * 1024
"""Bytes that a peer may leave unread. Lists wait for the peer at 64 KiB, so these are answers of
HTTP/2 itself, which nothing else bounds."""

REFUSED_PERIOD = 60.0
"""Seconds between two log lines about refused callers, who could cause a flood."""


class Peer(H2Protocol):
    """One connection, which is in `peers` while it is open.

    Only root (the kubelet) and the agent's user (its self-check) may connect. The socket's mode
    keeps others out; if one connects, the connection is closed before any byte is read or sent.
    """

    def __init__(
        self, plain: H2Protocol, peers: Cell[frozenset[asyncio.Transport]], refused: Allowance
    ) -> None:
        super().__init__(plain.handler, plain.config, plain.h2_config)
        self._peers = peers
        self._refused = refused
        self._transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        uid = peer_uid(transport)
        if uid not in {0, os.geteuid()} or not isinstance(transport, asyncio.Transport):
            left_out = self._refused.admit()
            if left_out is not None:
                log.warning("plugin.peer_refused", uid=uid, more=left_out)
            transport.close()
            return
        super().connection_made(transport)
        self._transport = transport
        self._peers.set(self._peers.value | {transport})

    @override
    def data_received(self, data: bytes) -> None:
        if self._transport is None:  # a refused peer, whose connection is closing
            return
        if self._transport.get_write_buffer_size() > UNREAD_LIMIT:
            self._transport.abort()
            return
        super().data_received(data)

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        if self._transport is None:
            self.handler.close()
            return
        super().connection_lost(exc)
        self._peers.set(self._peers.value - {self._transport})


class Incarnation(Server):
    """One server on one socket, from serve() to stop(). Create it on the loop where it serves."""

    def __init__(self, bound: BoundSocket, plugin: DevicePlugin) -> None:
        super().__init__([plugin], codec=PluginCodec())
        self._bound = bound
        self._plugin = plugin
        self._peers: Cell[frozenset[asyncio.Transport]] = Cell(frozenset())
        self._refused = Allowance(1, REFUSED_PERIOD)

    @property
    def endpoint(self) -> str:
        """The base name of its socket."""
        return self._bound.path.name

    @override
    def _protocol_factory(self) -> H2Protocol:
        return Peer(super()._protocol_factory(), self._peers, self._refused)

    async def serve(self) -> None:
        """Listen, and check by a call that the server answers.

        Raises:
            KubeletError: it cannot listen, or the call was not answered.
        """
        try:
            # Not by path: asyncio would unlink an existing file, and on 3.13 delete it at the end.
            await self.start(sock=self._bound.sock)
            async with (
                Lag().within(SELF_CHECK_DEADLINE),
                UnixChannel(path=str(self._bound.path)) as channel,
            ):
                stub = pluginapi.DevicePluginStub(channel)
                await stub.get_device_plugin_options(pluginapi.Empty())
        except (OSError, TimeoutError, GRPCError, StreamTerminatedError) as error:
            raise KubeletError(
                f"{self._bound.path} does not answer a call of its own server: {error!r}"
            ) from error

    async def stop(self) -> None:
        """Finish admissions, end the list streams, close, and delete the socket file.

        In that order: the kubelet closes its connection, with all open calls, after the stream. A
        server that ended between two calls of an admission would fail the pod.
        """
        calls, streams = self._plugin.traffic.admissions, self._plugin.traffic.streams
        try:
            if streams.value > 0:  # without a stream no kubelet is connected
                with contextlib.suppress(TimeoutError):
                    async with Lag().within(LAST_CALLS):
                        await calls.idle_for(PREFERENCE_FOLLOWED)
            self._plugin.is_draining = True
            await _ended(calls.idle_for(0), DRAIN_DEADLINE, "plugin.drain_overdue")
            self._plugin.has_ended.set(True)
            none_left = streams.until(lambda count: count == 0)
            await _ended(none_left, STREAM_DEADLINE, "plugin.stream_overdue")
            if self._server is not None:
                await self._hang_up()
        finally:
            self._plugin.has_ended.set(True)
            self._bound.unlink()
            self._bound.sock.close()

    async def _hang_up(self) -> None:
        """Accept no more connections, give the peers a moment to leave, and cut the others."""
        self.close()  # cancels what is left of handlers, which then send no answer
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PEER_DEADLINE):
                    await self._peers.until(lambda peers: not peers)
        finally:
            for transport in self._peers.value:
                transport.abort()
        # From 3.12 on, wait_closed also waits for connections; all are closed by now.
        await _ended(self.wait_closed(), CLOSE_DEADLINE, "plugin.close_overdue")


async def _ended(end: Awaitable[object], deadline: float, overdue: str) -> None:
    try:
        async with Lag().within(deadline):
            await end
    except TimeoutError:
        log.warning(overdue, deadline=deadline)


class PluginServer:
    """Serves our resource in the kubelet's directory, on a new socket after each rebind().

    The kubelet deletes every socket when it starts; then the registration calls rebind().

    `resource` is its name, which names the next socket. With a `fence` the kubelet asks before each
    start of a container. `allocator` is set before the registration.
    """

    allocator: SliceAllocator

    def __init__(
        self,
        directory: Path,
        resource: Cell[str],
        lists: Cell[SliceList],
        chance: random.Random,
        fence: Fence | None = None,
    ) -> None:
        self._directory = directory
        self._resource = resource
        self._lists = lists
        self._chance = chance
        self._fence = fence
        self._turn = asyncio.Lock()
        self._current: Incarnation | None = None
        self._stopped = False
        self.traffic = Traffic()

    @property
    def endpoint(self) -> str:
        """The base name of the socket that serves now; empty while none does."""
        return "" if self._current is None else self._current.endpoint

    async def run(self) -> None:
        """Allow serving until cancelled; then stop the server."""
        self._stopped = False
        try:
            await asyncio.Event().wait()
        finally:
            self._stopped = True
            # In a task of its own: in one that is being cancelled, Python before 3.11.3 ends each
            # asyncio.timeout by a cancellation, and the calls under way would be cut off.
            await asyncio.shield(self._finish())

    async def _finish(self) -> None:
        async with self._turn:
            await self._retire()

    async def rebind(self) -> None:
        """Stop the present server, if any, and serve on a new socket, which answers on return.

        The old server stops completely first: up to and including kubelet 1.36, the end of an old
        stream removes the newest registration of its resource.

        Raises:
            PermissionFault, SettingsError, KubeletError: the socket cannot be bound, or does not
                answer. Then no server runs.
        """
        await asyncio.shield(self._finish())  # a caller that is cancelled cuts off no open call
        async with self._turn:
            if self._stopped:
                raise KubeletError("the plugin server is stopping")
            await self._retire()  # one that another call has bound meanwhile
            resource = self._resource.value
            for name in sweep(self._directory, resource):
                log.info("plugin.stale_socket_removed", name=name)
            bound = bind(self._directory, resource, self._chance)
            plugin = DevicePlugin(
                self._lists,
                self.allocator,
                self.traffic,
                self._fence,
                is_current=lambda: self._resource.value == resource,
            )
            server = Incarnation(bound, plugin)
            async with contextlib.AsyncExitStack() as undo:
                undo.push_async_callback(server.stop)
                await server.serve()
                undo.pop_all()
            self._current = server
            log.info("plugin.serving", endpoint=server.endpoint, resource=resource)

    async def _retire(self) -> None:
        server, self._current = self._current, None
        if server is not None:
            await server.stop()
            log.info("plugin.stopped", endpoint=server.endpoint)
