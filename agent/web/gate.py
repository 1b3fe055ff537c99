"""How many connections there may be, and how long each may take."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web
from typing_extensions import override

log = structlog.get_logger(__name__)

CONNECTIONS = 32
HEAD_TIMEOUT = 10.0
"""Seconds for a client to send its request."""
ANSWER_TIMEOUT = 30.0
"""Seconds for a client to take the answer."""
LINE_LIMIT = 4096
FIELD_LIMIT = 8190

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Gate(web.Server):
    """aiohttp's server with a bound on connections and on their time.

    A connection too many is closed at once. Each listener has a gate of its own, so that a flood
    on one costs the other nothing.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        # What aiohttp would log with a traceback is a client's malformed request: anybody's flood.
        quiet = logging.getLogger(f"{__name__}.clients")
        quiet.setLevel(logging.CRITICAL)
        super().__init__(
            self._answer,
            access_log=None,
            logger=quiet,
            max_line_size=LINE_LIMIT,
            max_field_size=FIELD_LIMIT,
            lingering_time=0,
        )
        self._timers: dict[web.RequestHandler, asyncio.TimerHandle] = {}

    @override
    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        loop = asyncio.get_running_loop()
        if len(self._timers) >= CONNECTIONS:
            log.warning("web.full", connections=CONNECTIONS)
            loop.call_soon(transport.abort)  # not at once: aiohttp has not finished its own part
            return
        self._timers[handler] = loop.call_later(HEAD_TIMEOUT, _too_slow, transport)

    @override
    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        timer = self._timers.pop(handler, None)
        if timer is not None:
            timer.cancel()
        super().connection_lost(handler, exc)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The request is in; from now on the time for the answer runs."""
        timer, transport = self._timers.get(request.protocol), request.transport
        if timer is not None and transport is not None:
            timer.cancel()
            loop = asyncio.get_running_loop()
            self._timers[request.protocol] = loop.call_later(ANSWER_TIMEOUT, _too_slow, transport)
        return await self._handler(request)


def _too_slow(transport: asyncio.Transport) -> None:
    log.info("web.client_too_slow", peer=str(transport.get_extra_info("peername")))
    transport.abort()
