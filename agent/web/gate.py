"""Bounds the connections of the HTTP server in number and time, and answers bad requests."""

import asyncio
import collections
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

import msgspec
import structlog
from aiohttp import HttpVersion10, HttpVersion11, web
from typing_extensions import override

from agent.kit.tasks import Throttle

log = structlog.get_logger(__name__)

CONNECTIONS: Final = 256
SHARE: Final = 32
"""Connections of one address that are safe from another's when full; the kubelet has two."""
HEAD_TIMEOUT: Final = 3.0
"""Seconds for a client to send its request: longer than the kubelet waits for a whole probe."""
ANSWER_TIMEOUT: Final = 30.0
"""Seconds for a client to read the answer."""
LINE_LIMIT: Final = 4096
RECEIVE_LIMIT: Final = 64 * 1024
"""Bytes after which reading stops: a connection has one request, whose head may have 16 KiB."""
TELL_PERIOD: Final = 60.0
"""Seconds between two log lines of one kind: callers could cause a flood."""
HEADERS: Final = {
    "Server": "hami-agent",  # aiohttp would name itself and its version
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The headers of every answer. The page at `/` has a Content-Security-Policy of its own."""

Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]


def ours(response: web.Response) -> web.Response:
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
    """aiohttp's server with limits on the number and time of connections.

    When it is full, a new connection replaces the oldest one without a request, else the oldest
    one. If an address has more than SHARE, only connections of the address with the most are
    candidates. So no client can keep out the kubelet, which sends its request as soon as it is
    connected, and no client is refused because of its address. Each listener has a gate of its own:
    a flood on one does not affect the other.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        super().__init__(self._answer)
        # aiohttp would log each malformed request with a traceback: a client could flood the log.
        self._quiet = logging.getLogger(f"{__name__}.clients")
        self._quiet.setLevel(logging.CRITICAL)
        self._guests: dict[web.RequestHandler, _Guest] = {}  # oldest first
        self._full = Throttle(TELL_PERIOD)
        self._slow = Throttle(TELL_PERIOD)

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
        super().connection_made(handler, transport)
        peer = transport.get_extra_info("peername")
        source = str(peer[0]) if isinstance(peer, tuple) else ""
        while len(self._guests) >= CONNECTIONS:
            self._make_room(source)
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
        """Answer a request, and start the deadline for reading the answer."""
        guest = self._guests.get(request.protocol)
        if guest is not None:
            guest.is_heard = True
            guest.timer.cancel()
            loop = asyncio.get_running_loop()
            guest.timer = loop.call_later(ANSWER_TIMEOUT, self._too_slow, request.protocol)
        if request.version not in {HttpVersion10, HttpVersion11}:
            return ours(web.Response(status=505, text="Use HTTP/1.0 or HTTP/1.1.\n"))
        return await self._handler(request)

    def _make_room(self, newcomer: str) -> None:
        """Close one connection to admit one from the address `newcomer`."""
        held = collections.Counter(guest.source for guest in self._guests.values())
        held[newcomer] += 1
        greediest, most = held.most_common(1)[0]
        candidates = [
            handler
            for handler, guest in self._guests.items()
            if most <= SHARE or guest.source == greediest
        ]
        idle = (handler for handler in candidates if not self._guests[handler].is_heard)
        guest = self._close(next(idle, candidates[0]))
        left_out = self._full.admit()
        if left_out is not None:
            log.warning("web.full", connections=CONNECTIONS, peer=guest.source, more=left_out)

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
        return ours(web.Response(status=status, text=f"{HTTPStatus(status).phrase}\n"))
