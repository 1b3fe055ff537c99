"""The device plugin server: its socket, its life, and who may connect."""

import asyncio
import contextlib
import errno
import os
import random
import re
import socket
import stat
from pathlib import Path

import msgspec
import structlog
from grpclib import GRPCError
from grpclib.exceptions import StreamTerminatedError
from grpclib.protocol import H2Protocol
from grpclib.server import Server
from typing_extensions import override

from agent.errors import KubeletError, PermissionFault, SettingsError
from agent.kit.cell import Cell
from agent.kit.tasks import Throttle
from agent.kit.timing import Lag
from agent.kit.unix import UnixChannel, peer_uid
from agent.kubelet.door import DevicePlugin, Fence, PluginCodec, SliceAllocator, Traffic
from agent.model import SliceList
from agent.wire.v1beta1 import DevicePluginStub, Empty

# The agent's socket files in the kubelet's directory: naming, binding, removing dead ones.
#
# No name is used twice: the kubelet may still have a record of an earlier one, and a server that
# stops late would delete its successor's file.

PATH_LIMIT = 107
"""Bytes of a unix socket's path, without the closing zero."""

MODE = 0o600

_TRIES = 5


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
    """Bind a new name in `directory`.

    Raises:
        SettingsError: the path of the directory is too long for any socket in it.
        PermissionFault: the agent may not write the directory, or others may.
        KubeletError: the directory is missing, or binding failed otherwise.
    """
    check_directory(directory)
    for _ in range(_TRIES):
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
                case OSError(errno=errno.EADDRINUSE):
                    continue
                case FileNotFoundError():
                    text = f"{directory} is not there: the kubelet makes it at its start"
                    raise KubeletError(text) from error
                case PermissionError():
                    text = f"{directory} may not be written: run the agent as root"
                    raise PermissionFault(text) from error
                case _:
                    raise KubeletError(f"{path} cannot be bound: {error.strerror}") from error
        # Another file in its place was put there after the bind.
        if stat.S_ISSOCK(status.st_mode) and stat.S_IMODE(status.st_mode) == MODE:
            return BoundSocket(path, sock, (status.st_dev, status.st_ino))
        sock.close()
    raise KubeletError(f"no socket could be bound in {directory}: all names tried were taken")


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
    return f"hami-{_tail(resource)[:room]}{ending}"


def _tail(resource: str) -> str:
    return resource.rpartition("/")[2]


def sweep(directory: Path, resource: str) -> tuple[str, ...]:
    """Delete the dead sockets of the agent's earlier servers; return their names.

    Live sockets and those of other plugins stay.
    """
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError:
        return ()  # binding raises the reason
    dead = []
    for name in names:
        ours = re.fullmatch(r"hami-(.+)-[0-9a-f]{8}\.sock", name)
        # The tail of a long resource is cut in the name.
        if ours and _tail(resource).startswith(ours[1]) and listens(directory / name) is False:
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


# The device plugin server of one resource: it binds, serves, checks itself, drains and unlinks.
#
# The kubelet deletes every socket when it starts. Then the watcher of the directory calls rebind(),
# which starts a new server on a new socket.

log = structlog.get_logger(__name__)

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
        self, plain: H2Protocol, peers: Cell[frozenset[asyncio.Transport]], refused: Throttle
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

    def __init__(self, bound: BoundSocket, lists: Cell[SliceList], plugin: DevicePlugin) -> None:
        super().__init__([plugin], codec=PluginCodec())
        self._bound = bound
        self._plugin = plugin
        self._peers: Cell[frozenset[asyncio.Transport]] = Cell(frozenset())
        self._refused = Throttle(REFUSED_PERIOD)
        self.lists = lists

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
            KubeletError: the call was not answered.
        """
        # Not by path: asyncio would unlink an existing file, and on 3.13 delete it at the end.
        await self.start(sock=self._bound.sock)
        try:
            async with (
                Lag().within(SELF_CHECK_DEADLINE),
                UnixChannel(path=str(self._bound.path)) as channel,
            ):
                await DevicePluginStub(channel).get_device_plugin_options(Empty())
        except (OSError, TimeoutError, GRPCError, StreamTerminatedError) as error:
            raise KubeletError(
                f"{self._bound.path} does not answer a call of its own server: {error!r}"
            ) from error

    async def stop(self) -> None:
        """Finish admissions, end the list streams, close, and delete the socket file.

        In that order: the kubelet closes its connection, with all open calls, after the stream.
        """
        try:
            if self._plugin.streams.value > 0:  # without a stream no kubelet is connected
                with contextlib.suppress(TimeoutError):
                    async with Lag().within(LAST_CALLS):
                        await self._plugin.calls.over()
            self._plugin.drain()
            await _zero(self._plugin.calls.open, DRAIN_DEADLINE, "plugin.drain_overdue")
            self.lists.close()
            await _zero(self._plugin.streams, STREAM_DEADLINE, "plugin.stream_overdue")
            if self._server is not None:
                await self._hang_up()
        finally:
            self.lists.close()
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
        try:
            async with asyncio.timeout(CLOSE_DEADLINE):
                await self.wait_closed()
        except TimeoutError:
            log.warning("plugin.close_overdue", deadline=CLOSE_DEADLINE)


async def _zero(count: Cell[int], deadline: float, overdue: str) -> None:
    try:
        async with Lag().within(deadline):
            await count.until(lambda open_calls: open_calls == 0)
    except TimeoutError:
        log.warning(overdue, deadline=deadline, left=count.value)


class PluginServer:
    """Serves our resource in the kubelet's directory, on a new socket after each rebind().

    `resource` is its name, which names the next socket. With a `fence` the kubelet asks before each
    start of a container.
    """

    def __init__(
        self,
        directory: Path,
        resource: Cell[str],
        lists: Cell[SliceList],
        allocator: SliceAllocator,
        chance: random.Random,
        fence: Fence | None = None,
    ) -> None:
        self._directory = directory
        self._resource = resource
        self._lists = lists
        self._allocator = allocator
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
            # A cell of its own: closing it ends only the streams of this server.
            lists = self._lists.branch()
            plugin = DevicePlugin(
                lists,
                self._allocator,
                self.traffic,
                self._fence,
                is_current=lambda: self._resource.value == resource,
            )
            server = Incarnation(bound, lists, plugin)
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
