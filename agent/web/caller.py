"""One connection of the HTTP server: aiohttp's protocol with the agent's own error answers."""

import asyncio
from http import HTTPStatus

from aiohttp import HttpVersion, HttpVersion10, HttpVersion11
from typing_extensions import override

from agent.web import aiohttp_server as web

HEADERS = {
    "Server": "hami-agent",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The headers of every answer. The page at `/` has a Content-Security-Policy of its own."""

RECEIVE_LIMIT = 64 * 1024
"""Bytes after which reading stops: a connection has one request, whose head may have 16 KiB."""


def ours(response: web.StreamResponse) -> web.StreamResponse:
    """Add the headers that an answer does not set itself, and end its connection."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.force_close()
    return response


class Caller(web.RequestHandler):
    """aiohttp's protocol; its errors repeat nothing of the request, and it reads at most 64 KiB.

    aiohttp's own limits of a head allow 2 MB.
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


class WebRequest(web.BaseRequest):
    """aiohttp's request; the answer is in HTTP/1.0 if the request has an unsupported version."""

    @property
    def is_spoken(self) -> bool:
        """Whether the request is in HTTP/1.0 or 1.1."""
        return super().version in {HttpVersion10, HttpVersion11}

    @property
    @override
    def version(self) -> HttpVersion:
        """The HTTP version of the answer."""
        return super().version if self.is_spoken else HttpVersion10
