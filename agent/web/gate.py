"""How many connections there may be, who gives way, and how long each may take."""

import asyncio
import collections
import dataclasses
import logging
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from typing_extensions import override

from agent.kit.throttle import Throttle
from agent.web.caller import Caller, WebRequest, ours

log = structlog.get_logger(__name__)

CONNECTIONS = 256
SHARE = 32
"""Connections of one address that are let be while there is no room; the kubelet has two."""
HEAD_TIMEOUT = 3.0
"""Seconds for a client to send its request: longer than the kubelet waits for a whole probe."""
ANSWER_TIMEOUT = 30.0
"""Seconds for a client to take the answer."""
LINE_LIMIT = 4096
FIELD_LIMIT = 8190
TELL_PERIOD = 60.0
"""Seconds between two log lines of one kind: what callers cause is anybody's flood."""

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclasses.dataclass(slots=True)
class _Guest:
    """A connection that is let in. `source`: the caller's address, empty on a unix socket."""

    transport: asyncio.Transport
    source: str
    timer: asyncio.TimerHandle
    is_heard: bool = False
    """Its request is in; from now on it takes the answer."""


class ConnectionGate(web.Server):
    """aiohttp's server with a bound on connections and on their time.

    When it is full, a newcomer takes the place of the oldest that has asked nothing yet, else of
    the oldest: among those of the address that holds the most, if that is more than its share. So
    no stranger keeps out the kubelet, which asks as soon as it is connected, and nobody is refused
    for an address that he shares with others. Each listener has a gate of its own, so that a flood
    on one costs the other nothing.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        super().__init__(self._answer, request_factory=self._asked)
        # What aiohttp would log with a traceback is a client's malformed request: anybody's flood.
        self._quiet = logging.getLogger(f"{__name__}.clients")
        self._quiet.setLevel(logging.CRITICAL)
        self._guests: dict[web.RequestHandler, _Guest] = {}  # the oldest first
        self._full = Throttle(TELL_PERIOD)
        self._slow = Throttle(TELL_PERIOD)

    @override
    def __call__(self) -> Caller:
        """The protocol of a connection that comes in."""
        return Caller(
            self,
            loop=asyncio.get_running_loop(),
            access_log=self._quiet,
            logger=self._quiet,
            max_line_size=LINE_LIMIT,
            max_field_size=FIELD_LIMIT,
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

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The request is in; from now on the time for the answer runs."""
        guest = self._guests.get(request.protocol)
        if guest is not None:
            guest.is_heard = True
            guest.timer.cancel()
            loop = asyncio.get_running_loop()
            guest.timer = loop.call_later(ANSWER_TIMEOUT, self._too_slow, request.protocol)
        if isinstance(request, WebRequest) and not request.is_spoken:
            return ours(web.Response(status=505, text="HTTP/1.0 and HTTP/1.1 are spoken here.\n"))
        return await self._handler(request)

    def _asked(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        caller: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> WebRequest:
        return WebRequest(message, payload, caller, writer, task, asyncio.get_running_loop())

    def _make_room(self, newcomer: str) -> None:
        """Close one connection for the sake of one from `newcomer`, which counts already."""
        held = collections.Counter(guest.source for guest in self._guests.values())
        held[newcomer] += 1
        greediest, most = held.most_common(1)[0]
        candidates = [
            handler
            for handler, guest in self._guests.items()
            if most <= SHARE or guest.source == greediest
        ]
        idle = (one for one in candidates if not self._guests[one].is_heard)
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
