"""The device plugin service: the calls, their answers, and the socket and life of the server."""

import asyncio
import contextlib
import errno
import functools
import itertools
import os
import random
import socket
import stat
import struct
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import structlog
from betterproto2 import decode_varint, encode_varint
from grpclib import GRPCError
from grpclib.const import Handler, Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import StreamTerminatedError
from grpclib.protocol import H2Protocol
from grpclib.server import Server, Stream
from prometheus_client import Histogram
from typing_extensions import override

from agent.errors import (
    AgentError,
    DirectoryLost,
    KubeletError,
    PermissionFault,
    Refusal,
    RefusalReason,
    SettingsError,
    StateError,
    cap,
)
from agent.kit.cell import Cell, News
from agent.kit.timing import IdleWaiter, Lag, Tally, loop_time
from agent.ledger import ContainerEdits
from agent.model import LIST_BYTES, SliceGroup, SliceId, SliceList
from agent.wire import v1beta1 as pluginapi
from agent.witness import UnixChannel

log = structlog.get_logger(__name__)

# The agent's socket files in the kubelet's directory: naming, binding, removing dead ones.

MODE = 0o600


def bind(directory: Path, resource: str, chance: random.Random) -> tuple[Path, socket.socket]:
    """Bind a private socket with a new name in `directory`; it does not listen yet.

    Raises DirectoryLost (it is read-only), PermissionFault (the agent may not write there, or
    others may), KubeletError.
    """
    path = directory / f"hami-{_tail(resource)}-{chance.getrandbits(32):08x}.sock"
    check_directory(directory)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # The file is created with its mode: a later chmod could follow a link.
        os.fchmod(sock.fileno(), MODE)
        sock.bind(os.fspath(path))
    except OSError as error:
        sock.close()
        if error.errno == errno.EROFS:
            # A sandbox that mounts the directory for writing loses the mount when the directory is
            # removed. A new one in its place is read-only to this process for ever.
            raise DirectoryLost(f"{directory} is read-only: restart the agent") from error
        if isinstance(error, PermissionError):
            raise PermissionFault(f"{directory} may not be written: run as root") from error
        raise KubeletError(f"{path} cannot be bound: {error.strerror or error}") from error
    return path, sock


def check_directory(directory: Path) -> None:
    """Raise PermissionFault if another user can replace sockets in the kubelet's directory.

    The kubelet creates it with owner root and mode 0750. A missing directory passes.
    """
    with contextlib.suppress(OSError):  # binding raises the reason
        status = directory.stat()
        fault = "is writable by everybody" if status.st_mode & stat.S_IWOTH else ""
        if status.st_uid not in {0, os.geteuid()}:
            fault = f"belongs to uid {status.st_uid}"
        if fault:
            text = f"{directory} {fault}: give it to root, with mode 0750 [P-KUBELET]"
            raise PermissionFault(text)


def _tail(resource: str) -> str:
    """What names the resource in a socket's name. Socket paths have at most 107 bytes."""
    return resource.rpartition("/")[2][:24]


def sweep(directory: Path, resource: str) -> None:
    """Delete the dead sockets of the agent's earlier servers.

    No name is used twice: the kubelet may still have a record of an earlier one, and a server that
    stops late would delete its successor's file.
    """
    for path in directory.glob(f"hami-{_tail(resource)}-{'[0-9a-f]' * 8}.sock"):
        # One that still has a server is removed by that server when it stops.
        if listens(path) is False:
            with contextlib.suppress(OSError):  # gone, or bind() says why
                path.unlink()
                log.info("plugin.stale_socket_removed", name=path.name)


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

    Raises SettingsError: with all slices unhealthy, it would be longer than the kubelet accepts.
    """
    encoded = [_encode_group(group) for group in listed.groups]
    size = sum(worst for _, worst in encoded)
    if size > LIST_BYTES:
        count = sum(len(group.ids) for group in listed.groups)
        raise SettingsError(
            f"{count} slices make a list of {size} bytes, more than the {LIST_BYTES} that are safe"
            f" at the kubelet: lower the split count to {LIST_BYTES * count // size} slices in all"
        )
    return b"".join(entries for entries, _ in encoded)


@functools.lru_cache(maxsize=32)
def _encode_group(group: SliceGroup) -> tuple[bytes, int]:
    """The entries of one GPU's slices, and how many bytes they are when unhealthy.

    An XID changes one GPU. 200 slices take 15 µs, and 0.3 ms if each is encoded by itself.
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

    Requests of admissions have a parser of their own: the generated one takes 2.5 µs for each id
    and accepts a text that is cut short. A property test compares it with Google's.
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
        return message_type.parse(data)


def _fields(data: bytes) -> Mapping[int, list[Any]]:
    """The values in a message by tag: the number of a field and its encoding."""
    fields: defaultdict[int, list[Any]] = defaultdict(list)
    at, end = 0, len(data)
    value: Any
    while at < end:
        # Numbers of one byte, which are those of ids, without a call: that takes 20 times as long.
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
"""Seconds after a call of an admission in which the next one comes, usually after 1 to 20 ms."""

TEXT_LIMIT = 4096
"""Characters of an error's text, which the kubelet copies into the pod's status."""

BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Ids = tuple[SliceId, ...]

Fence = Callable[[Ids], None]
"""Raises a Refusal if the container that holds these slices must not start. Does not wait."""


class SliceAllocator(Protocol):
    """The service that decides allocations."""

    async def allocate(self, ids: Ids) -> ContainerEdits:
        """Give these slices to the container being admitted. Raises AgentError."""

    async def prefer(self, available: Ids, must_include: Ids, size: int) -> Ids:
        """Choose the best `size` ids of `available`, soon and without an error."""


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
    """The gRPC error for an error. The pod's status shows code and text."""
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


def _ids(texts: Sequence[str]) -> Ids:
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

_CREDENTIALS = struct.Struct("3i")
"""struct ucred of Linux: process, user, group."""


def peer_uid(transport: asyncio.BaseTransport | None) -> int | None:
    """The user id that opened a unix socket connection; None for another kind, or no transport."""
    opened = None if transport is None else transport.get_extra_info("socket")
    if opened is None or opened.family != socket.AF_UNIX:
        return None
    credentials = opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


class Peer(H2Protocol):
    """One connection, which is in `peers` while it is open.

    Only root (the kubelet) and the agent's user (its self-check) may connect. Another's connection
    is closed before any byte is read or sent.
    """

    def __init__(self, plain: H2Protocol, peers: Cell[frozenset[asyncio.Transport]]) -> None:
        super().__init__(plain.handler, plain.config, plain.h2_config)
        self._peers = peers
        self._transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        is_ours = peer_uid(transport) in {0, os.geteuid()}
        if not is_ours or not isinstance(transport, asyncio.Transport):
            transport.close()
            return
        super().connection_made(transport)
        self._transport = transport
        self._peers.set(self._peers.value | {transport})

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        if self._transport is None:  # a refused peer
            self.handler.close()
            return
        super().connection_lost(exc)
        self._peers.set(self._peers.value - {self._transport})


class Incarnation(Server):
    """One gRPC server on one socket. Create it on the loop where it serves."""

    def __init__(self, path: Path, sock: socket.socket, plugin: "PluginServer") -> None:
        super().__init__([plugin], codec=PluginCodec())
        self._path = path
        self._sock = sock
        self._peers: Cell[frozenset[asyncio.Transport]] = Cell(frozenset())

    @override
    def _protocol_factory(self) -> H2Protocol:
        return Peer(super()._protocol_factory(), self._peers)

    async def serve(self) -> None:
        """Listen, and check by a call that the server answers. Raises KubeletError."""
        try:
            # Not by path: asyncio would unlink an existing file, and on 3.13 delete it at the end.
            await self.start(sock=self._sock)
            channel = UnixChannel(path=str(self._path))
            async with Lag().within(SELF_CHECK_DEADLINE), channel:
                stub = pluginapi.DevicePluginStub(channel)
                await stub.get_device_plugin_options(pluginapi.Empty())
        except (OSError, TimeoutError, GRPCError, StreamTerminatedError) as error:
            raise KubeletError(f"{self._path} does not serve: {error!r}") from error

    async def stop(self) -> None:
        """Accept no more connections, let the peers leave, cut the others; delete the socket."""
        try:
            if self._server is not None:
                self.close()  # cancels what is left of handlers, which then send no answer
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PEER_DEADLINE):
                        await self._peers.until(lambda peers: not peers)
        finally:
            for transport in self._peers.value:
                transport.abort()
            with contextlib.suppress(OSError):  # gone, or the directory is read-only
                self._path.unlink()
            self._sock.close()
        if self._server is not None:
            # From 3.12 on, wait_closed also waits for connections; all are closed by now.
            await _ended(self.wait_closed(), CLOSE_DEADLINE, "plugin.close_overdue")


async def _ended(end: Awaitable[object], deadline: float, overdue: str) -> None:
    try:
        async with Lag().within(deadline):
            await end
    except TimeoutError:
        log.warning(overdue, deadline=deadline)


class PluginServer:
    """The device plugin: it answers the kubelet's calls, on a new socket after each rebind().

    - `resource` names the next socket, `served` the present one, whose base name is `endpoint`
      (empty while none serves).
    - `allocator`: set before the registration.
    - `fence`: with it, the kubelet calls PreStartContainer before each start of a container.
    - `streams`: the number of open list streams. `admissions`: the calls in progress for a
      container: GetPreferredAllocation, then Allocate.
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
        self._is_draining = False
        self._ended = Cell(False)
        """Set to end the list streams of the present socket."""
        self._lost = Cell("")
        self.endpoint = self.served = ""
        self.streams: Cell[int] = Cell(0)
        self.admissions = IdleWaiter()
        # METRICS.md is read from these literals.
        self.calls = Tally(
            "rpc_calls_total",
            "Calls of the kubelet by gRPC code of the answer.",
            ("method", "code"),
        )
        self.durations = Histogram(
            "rpc_duration_seconds",
            "Seconds from request to answer.",
            ("method", "code"),
            namespace="hami_agent",
            buckets=BUCKETS,
            registry=None,
        )

    async def run(self) -> None:
        """Allow serving until cancelled; then stop the server.

        Raises DirectoryLost: only a new process may be able to bind a socket.
        """
        try:
            raise DirectoryLost(await self._lost.until(bool))
        finally:
            # In a task of its own: in one that is being cancelled, Python before 3.11.3 ends each
            # asyncio.timeout by a cancellation, and the calls under way would be cut off.
            await asyncio.shield(self._retire())

    async def rebind(self) -> None:
        """Stop the present server, if any, and serve on a new socket, which answers on return.

        The old server stops completely first: up to and including kubelet 1.36, the end of an old
        stream removes the newest registration of its resource. One call at a time. If it raises
        DirectoryLost, PermissionFault or KubeletError, no server runs.
        """
        await asyncio.shield(self._retire())  # a caller that is cancelled cuts off no open call
        async with self._turn:
            resource = self._resource.value
            sweep(self._directory, resource)
            try:
                path, sock = bind(self._directory, resource, self._chance)
            except DirectoryLost as error:
                if self.served:  # one that was never writable is the same to a new process
                    self._lost.set(str(error))
                raise
            self.served, self._is_draining, self._ended = resource, False, Cell(False)
            server = Incarnation(path, sock, self)
            async with contextlib.AsyncExitStack() as undo:
                undo.push_async_callback(server.stop)
                await server.serve()
                undo.pop_all()
            self._current, self.endpoint = server, path.name
            log.info("plugin.serving", endpoint=self.endpoint, resource=resource)

    async def _retire(self) -> None:
        """Finish admissions, end the list streams, and stop the present server.

        In that order: the kubelet closes its connection, with all open calls, after the stream. A
        server that ended between two calls of an admission would fail the pod.
        """
        async with self._turn:
            if self._current is None:
                return
            server, endpoint = self._current, self.endpoint
            self._current, self.endpoint = None, ""
            try:
                if self.streams.value > 0:  # without a stream no kubelet is connected
                    with contextlib.suppress(TimeoutError):
                        async with Lag().within(LAST_CALLS):
                            await self.admissions.idle_for(PREFERENCE_FOLLOWED)
                self._is_draining = True
                await _ended(self.admissions.idle_for(0), DRAIN_DEADLINE, "plugin.drain_overdue")
                self._ended.set(True)
                none_left = self.streams.until(lambda count: count == 0)
                await _ended(none_left, STREAM_DEADLINE, "plugin.stream_overdue")
            finally:
                self._ended.set(True)
                await server.stop()
            log.info("plugin.stopped", endpoint=endpoint)

    def __mapping__(self) -> dict[str, Handler]:
        """The handlers by path, for grpclib."""
        serve: dict[str, tuple[str, Callable[[Any], Any]]] = {
            "GetDevicePluginOptions": ("options", self.get_device_plugin_options),
            "ListAndWatch": ("list", self.list_and_watch),
            "GetPreferredAllocation": ("prefer", self.get_preferred_allocation),
            "Allocate": ("allocate", self.allocate),
            "PreStartContainer": ("prestart", self.pre_start_container),
        }
        return {
            path: handler._replace(func=functools.partial(self._serve, *serve[path.split("/")[2]]))
            for path, handler in pluginapi.DevicePluginBase().__mapping__().items()
        }

    async def _serve(
        self, method: str, answer: Callable[[Any], Any], stream: Stream[Any, Any]
    ) -> None:
        """Answer one call, count it, and turn its error into a status with one sentence."""
        started, status = loop_time(), Status.CANCELLED
        is_admission = method in {"prefer", "allocate"}
        try:
            with self.admissions.busy() if is_admission else contextlib.nullcontext():
                request = await received(stream)
                if method == "list":
                    async with contextlib.aclosing(answer(request)) as lists:
                        async for encoded in lists:
                            await stream.send_message(encoded)
                else:
                    await stream.send_message(await answer(request))
            status = Status.OK
        except GRPCError as error:
            status = error.status
            raise
        except AgentError as error:
            refused = grpc_error(error)
            status = refused.status
            raise refused from error
        except Exception as error:  # the outermost handler
            status = Status.INTERNAL
            log.exception("plugin.call_failed", method=method)
            text = f"{method} failed in the agent ({type(error).__name__}); its log has the trace"
            raise GRPCError(status, text) from error
        finally:
            self.calls.add(method, status.name)
            if method != "list":  # a stream lasts as long as the kubelet
                self.durations.labels(method, status.name).observe(loop_time() - started)

    async def get_device_plugin_options(self, _: pluginapi.Empty) -> pluginapi.DevicePluginOptions:
        """Return the options, which never change: preferences, and starts if there is a fence."""
        return pluginapi.DevicePluginOptions(
            pre_start_required=self._fence is not None, get_preferred_allocation_available=True
        )

    async def list_and_watch(self, _: pluginapi.Empty) -> AsyncGenerator[bytes, None]:
        """Yield the list at once and after every change; changes during a send are combined."""
        sent: bytes | None = None
        streams, ended = self.streams, self._ended
        streams.set(streams.value + 1)
        log.info("plugin.stream_opened", streams=streams.value)
        try:
            news = News(self._lists, ended)
            while not ended.value:
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
        chosen = [
            await self.allocator.prefer(
                _ids(request.available_deviceIDs),
                _ids(request.must_include_deviceIDs),
                request.allocation_size,
            )
            for request in message.container_requests
        ]
        answers = [pluginapi.ContainerPreferredAllocationResponse(list(ids)) for ids in chosen]
        return pluginapi.PreferredAllocationResponse(answers)

    async def allocate(self, message: pluginapi.AllocateRequest) -> pluginapi.AllocateResponse:
        """Return one answer for each container request, in order. Raises AgentError.

        A server of a former name refuses: a row would get the present name.
        """
        requests = message.container_requests
        if not requests or not all(request.devices_ids for request in requests):
            raise Refusal(RefusalReason.EMPTY_REQUEST, "The kubelet requested no slice.")
        if self._is_draining or self.served != self._resource.value:
            sentence = "The GPU agent stops, or its resource was renamed: create the pod again."
            raise Refusal(RefusalReason.STOPPING, sentence)
        answers = [
            container_response(await self.allocator.allocate(_ids(request.devices_ids)))
            for request in requests
        ]
        return pluginapi.AllocateResponse(container_responses=answers)

    async def pre_start_container(
        self, message: pluginapi.PreStartContainerRequest
    ) -> pluginapi.PreStartContainerResponse:
        """Let the container start unless the fence raises a Refusal; the kubelet calls again."""
        if self._fence is not None:
            try:
                self._fence(_ids(message.devices_ids))
            except Refusal as refusal:
                log.warning("plugin.start_refused", gate=refusal.gate.value, err=refusal.sentence)
                raise
        return pluginapi.PreStartContainerResponse()
