"""One connection of the web door: what aiohttp would answer by itself, in our form."""

import asyncio
from http import HTTPStatus

from aiohttp import HttpVersion, HttpVersion10, HttpVersion11, web
from typing_extensions import override

HEADERS = {
    "Server": "hami-agent",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""On every answer."""

RECEIVE_LIMIT = 64 * 1024
"""Bytes after which nothing more is read: one request, whose head may have 16 KiB."""


def ours(response: web.Response) -> web.Response:
    """The answer with our headers; the connection ends with it."""
    response.headers.update(HEADERS)
    response.force_close()
    return response


class Caller(web.RequestHandler):
    """aiohttp's protocol, which never repeats what it was sent, and reads no more than a request.

    aiohttp bounds a field and their number, and so a head to 2 MB.
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
        """What cannot be read, or failed in aiohttp: the status and its name, nothing else."""
        del exc, message  # they hold what the caller sent
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        return ours(web.Response(status=status, text=f"{HTTPStatus(status).phrase}\n"))


class WebRequest(web.BaseRequest):
    """aiohttp's request, answered in a version that we speak and not in whatever it names."""

    @property
    def is_spoken(self) -> bool:
        """Whether it came in HTTP/1.0 or 1.1, and not in 0.9 or 2.0."""
        return super().version in {HttpVersion10, HttpVersion11}

    @property
    @override
    def version(self) -> HttpVersion:
        """The version of the answer."""
        return super().version if self.is_spoken else HttpVersion10
