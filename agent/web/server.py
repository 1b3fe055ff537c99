"""The HTTP server for people and Prometheus, on TCP (read-only), a unix socket, or both.

It is aiohttp's server. What is ours are the limits of connections in number and time, the headers
of every answer, and errors that repeat nothing of the request.
"""

import asyncio
import collections
import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec
import structlog
from aiohttp import HttpVersion10, HttpVersion11, web
from typing_extensions import override

from agent.errors import PermissionFault, host_port
from agent.kit.tasks import Allowance

log = structlog.get_logger(__name__)

T = TypeVar("T")

PREFIX: Final = "/api/v1/"
"""The page of this path answers for all paths below it."""

CONNECTIONS: Final = 256
"""Connections of each listener; each beyond that closes another."""

SHARE: Final = 32
"""Connections of one address that are safe from another's when full; the kubelet has two."""

HEAD_TIMEOUT: Final = 3.0
"""Seconds for a client to send its request: longer than the kubelet waits for a whole probe."""

ANSWER_TIMEOUT: Final = 30.0
"""Seconds for a client to read the answer."""

HEAD_LIMIT: Final = 16 * 1024
LINE_LIMIT: Final = 4096
"""Bytes of a whole head, and of one line of it."""

RECEIVE_LIMIT: Final = 64 * 1024
"""Bytes after which reading stops: a connection has one request, whose head may have 16 KiB."""

STOP_TIMEOUT: Final = 2.0
"""Seconds for open answers at the end."""

TELL_PERIOD: Final = 60.0
"""Seconds between two log lines of one kind: callers could cause a flood."""

AT_ONCE: Final = 32
"""Connections accepted in one turn of the loop, before open ones are read."""

QUEUE: Final = 4096
"""Connections that wait to be accepted; beyond that, a client's kernel tries again after 1 s.

The kernel reduces it to net.core.somaxconn, which is 4096 from Linux 5.4 on.
"""

SOCKET_MODE: Final = 0o660
DIRECTORY_MODE: Final = 0o750
"""Besides the agent's user, the directory's group may ask."""

HEADERS: Final = {
    "Server": "hami-agent",  # aiohttp would name itself and its version
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The headers of every answer. The page at `/` has a Content-Security-Policy of its own."""

Page = Callable[[web.BaseRequest], web.Response]
"""Renders one path from values in memory, without waiting."""

Act = Callable[[web.BaseRequest], Awaitable[web.Response]]
"""Answers a POST on the unix socket."""


class Reused(Generic[T]):
    """What `make` returns, for `kept` seconds: so many readers cost the loop no more than one.

    None is not kept.
    """

    def __init__(self, make: Callable[[], T], kept: float) -> None:
        self._make = make
        self._kept = kept
        self._until = 0.0
        self._made: T | None = None

    def value(self) -> T:
        """The newest value, or one of the last `kept` seconds."""
        now = asyncio.get_running_loop().time()
        made = self._made
        if made is None or self._until <= now:
            made = self._made = self._make()
            self._until = now + self._kept

        return made


def near(host: str) -> str:
    """The address of loopback if `host` is a single other address, else empty.

    In a pod the port is on the pod's address, for probes and Prometheus. `kubectl port-forward`
    connects to the pod's loopback, and only from there the page and `/api/v1` are read.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""

    return "" if address.is_loopback or address.is_unspecified else "127.0.0.1"


@contextlib.asynccontextmanager
async def serve_port(
    pages: Mapping[str, Page], host: str, port: int, near_by: str = ""
) -> AsyncIterator[int]:
    """Serve `pages` by path at a TCP port for the block; yield the port. 0: any free one.

    The page of PREFIX answers for all paths below it. `near_by`: a second address for the same
    port; without it the first one serves, too. Raises PermissionFault: `host` cannot be bound.
    """
    async with contextlib.AsyncExitStack() as stack:
        port = await _listen_tcp(stack, host, port, pages)
        try:
            if near_by:
                await _listen_tcp(stack, near_by, port, pages)
        except PermissionFault as error:
            log.warning("web.not_near", text=str(error))

        yield port


@contextlib.asynccontextmanager
async def serve_socket(
    pages: Mapping[str, Page], path: Path, actions: Act | None = None
) -> AsyncIterator[None]:
    """Serve `pages` at a unix socket for the block, as serve_port does.

    Only here `actions` are served: the kernel identifies the callers.
    """
    gate = ConnectionGate(pages, actions)
    with unix_socket(path) as opened:
        server = await asyncio.get_running_loop().create_unix_server(gate, sock=opened)
        log.info("web.listening", path=str(path))

        try:
            yield
        finally:
            await _stop(server, gate)


async def _listen_tcp(
    stack: contextlib.AsyncExitStack, host: str, port: int, pages: Mapping[str, Page]
) -> int:
    gate = ConnectionGate(pages)
    try:
        server = await asyncio.get_running_loop().create_server(gate, host, port, backlog=AT_ONCE)
    except OSError as error:
        raise PermissionFault(
            f"{host_port(host, port)} cannot be bound: {error.strerror}; choose another "
            "web.address or web.port, or stop the process that listens there."
        ) from error

    stack.push_async_callback(_stop, server, gate)
    for listener in server.sockets:
        with listener.dup() as same:  # asyncio uses one number for AT_ONCE and QUEUE
            same.listen(QUEUE)

    found: int = server.sockets[0].getsockname()[1]
    log.info("web.listening", host=host, port=found)
    return found


async def _stop(server: asyncio.Server, gate: "ConnectionGate") -> None:
    server.close()  # no wait_closed(): on Python 3.12 and later it waits for all clients
    gate.pre_shutdown()
    await gate.shutdown(STOP_TIMEOUT)


@contextlib.contextmanager
def unix_socket(path: Path) -> Iterator[socket.socket]:
    """Bind a socket at `path`, not yet listening, for the block; make its directory (0750).

    A socket that is there was left by a dead agent: the lock beside it lets one agent run at a
    time. At the end the file is removed, unless it was replaced. Raises PermissionFault: another
    file is there, or the agent may not write the directory.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
        try:
            path.parent.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            if os.path.lexists(path):
                if path.is_symlink() or not path.is_socket():
                    raise PermissionFault(
                        f"{path} is in the way of the socket and is not a socket: remove it."
                    )

                path.unlink(missing_ok=True)

            opened.setblocking(False)
            opened.bind(str(path))

            # No client can connect before listen(), so the mode is set in time.
            path.chmod(SOCKET_MODE)
            bound = path.lstat()
        except OSError as error:
            raise PermissionFault(
                f"{path} cannot be bound: {error.strerror or error}; let the agent's user own its "
                "directory."
            ) from error

        try:
            yield opened
        finally:
            opened.close()
            with contextlib.suppress(OSError):
                if os.path.samestat(path.lstat(), bound):
                    path.unlink()


def _ours(response: web.Response) -> web.Response:
    """Add the headers that an answer does not set itself, and end its connection."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)

    response.force_close()
    return response


class _Guest(msgspec.Struct):
    """An open connection. `source`: the caller's address, empty on a unix socket."""

    transport: asyncio.Transport
    source: str
    timer: asyncio.TimerHandle

    is_heard: bool = False
    """Its request was received; now it reads the answer."""


class ConnectionGate(web.Server):
    """aiohttp's server of one listener, with limits on the number and time of connections.

    When it is full, a new connection replaces the oldest one without a request, else the oldest
    one. If an address has more than SHARE, only connections of the address with the most are
    candidates. So no client can keep out the kubelet, which sends its request as soon as it is
    connected, and no client is refused because of its address. Each listener has a gate of its own:
    a flood on one does not affect the other.
    """

    def __init__(self, pages: Mapping[str, Page], actions: Act | None = None) -> None:
        self._pages = pages
        self._actions = actions
        super().__init__(self._answer)

        # aiohttp would log each malformed request with a traceback: a client could flood the log.
        self._quiet = logging.getLogger(f"{__name__}.clients")
        self._quiet.setLevel(logging.CRITICAL)
        self._guests: dict[web.RequestHandler, _Guest] = {}  # oldest first
        self._full, self._slow, self._failed = (Allowance(1, TELL_PERIOD) for _ in range(3))

    @override
    def __call__(self) -> web.RequestHandler:
        """Make the protocol of a new connection."""
        return _Connection(
            self,
            loop=asyncio.get_running_loop(),
            access_log=self._quiet,
            logger=self._quiet,
            max_line_size=LINE_LIMIT,
            lingering_time=0,
        )

    @override
    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Take the connection in, in place of another one when it is full."""
        super().connection_made(handler, transport)
        peer = transport.get_extra_info("peername")
        source = str(peer[0]) if isinstance(peer, tuple) else ""

        if len(self._guests) >= CONNECTIONS:
            held = collections.Counter(guest.source for guest in self._guests.values())
            held[source] += 1  # an address that has the most already gives way to itself
            greediest, most = held.most_common(1)[0]

            candidates = [
                other
                for other, guest in self._guests.items()
                if most <= SHARE or guest.source == greediest
            ]

            idle = (other for other in candidates if not self._guests[other].is_heard)
            closed = self._close(next(idle, candidates[0]))
            left_out = self._full.admit()

            if left_out is not None:
                log.warning("web.full", connections=CONNECTIONS, peer=closed.source, more=left_out)

        timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT, self._too_slow, handler)
        self._guests[handler] = _Guest(transport, source, timer)

    @override
    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        guest = self._guests.pop(handler, None)
        if guest is not None:
            guest.timer.cancel()
        super().connection_lost(handler, exc)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        """Answer the only request of a connection; whatever fails, the client gets a sentence."""
        guest = self._guests.get(request.protocol)
        if guest is not None:  # now the deadline for reading the answer runs
            guest.is_heard = True
            guest.timer.cancel()
            loop = asyncio.get_running_loop()
            guest.timer = loop.call_later(ANSWER_TIMEOUT, self._too_slow, request.protocol)

        if request.version not in {HttpVersion10, HttpVersion11}:
            return _ours(web.Response(status=505, text="Use HTTP/1.0 or HTTP/1.1.\n"))

        try:
            if self._actions is not None and request.method == "POST":
                return _ours(await self._actions(request))

            return _ours(self._read(request))
        except Exception:
            left_out = self._failed.admit()
            if left_out is not None:
                log.exception("web.failed", path=request.path, more=left_out)

            text = "This page failed; the agent's log says why.\n"
            return _ours(web.Response(status=500, text=text))

    def _read(self, request: web.BaseRequest) -> web.Response:
        if sum(len(name) + len(value) for name, value in request.raw_headers) > HEAD_LIMIT:
            return web.Response(status=431, text=f"The head may have {HEAD_LIMIT} bytes.\n")

        path = PREFIX if request.path.startswith(PREFIX) else request.path
        page = self._pages.get(path)
        if page is None:
            return web.Response(status=404, text=f"No such page. Pages: {' '.join(self._pages)}\n")

        if request.method not in {"GET", "HEAD"}:
            text, allowed = "Only GET and HEAD are answered.\n", {"Allow": "GET, HEAD"}
            return web.Response(status=405, headers=allowed, text=text)

        return page(request)

    def _too_slow(self, handler: web.RequestHandler) -> None:
        guest = self._close(handler)
        left_out = self._slow.admit()
        if left_out is not None:
            log.info("web.client_too_slow", peer=guest.source, more=left_out)

    def _close(self, handler: web.RequestHandler) -> _Guest:
        guest = self._guests.pop(handler)
        guest.timer.cancel()
        guest.transport.abort()
        return guest


class _Connection(web.RequestHandler):
    """aiohttp's protocol; its errors repeat nothing of the request, and it reads at most 64 KiB.

    By its own limits aiohttp would keep a head of 1 MB for each connection.
    """

    _received = 0

    @override
    def data_received(self, data: bytes) -> None:
        """Pass the bytes on, up to the limit."""
        if self._received > RECEIVE_LIMIT:
            return

        self._received += len(data)
        super().data_received(data)

        if self._received > RECEIVE_LIMIT and isinstance(self.transport, asyncio.ReadTransport):
            self.transport.pause_reading()

    @override
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer an error of aiohttp, such as an unreadable request, with only its status."""
        del exc, message  # they hold what the caller sent
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")

        return _ours(web.Response(status=status, text=f"{HTTPStatus(status).phrase}\n"))
