"""The extender's HTTP server, with TLS if there is a certificate."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog
from aiohttp import web

from agent.core.errors import MalformedText, host_port
from agent.sandbox.api_errors import Json

log = structlog.get_logger(__name__)
LIMIT: Final = 1024 * 1024
"""The most bytes of a body, as in HAMi."""
REVIEW_LIMIT: Final = 7 * 1024 * 1024
"""The most bytes of an AdmissionReview, as in controller-runtime."""
BODY_DEADLINE: Final = 4.0
"""Seconds; kube-scheduler is on the same host, and waits for 30 s in all."""
CLOSE_DEADLINE: Final = 5.0
_BAD_REQUEST: Final = 400
_UNAVAILABLE: Final = 503

Verb = Callable[[bytes], Awaitable[Json]]


@dataclass(frozen=True, slots=True)
class ExtenderPath:
    """One path: the handler, and the longest body in bytes."""

    answer: Verb
    limit: int = LIMIT


class ExtenderServer:
    """Serves `doors` by path, /healthz, and /readyz, which is 503 until `is_ready`."""

    def __init__(self, doors: Mapping[str, ExtenderPath], is_ready: Callable[[], bool]) -> None:
        self._doors = doors
        self._is_ready = is_ready

    @contextlib.asynccontextmanager
    async def listening(
        self, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[str]:
        """Serve while the block runs; yields the address. Running answers are finished at the end.

        Raises:
            OSError: the address cannot be bound.
        """
        server = web.Server(self._answer, access_log=None)
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(server, host, port, ssl=tls)
        try:
            number = listener.sockets[0].getsockname()[1]
            yield f"{'http' if tls is None else 'https'}://{host_port(host, number)}"
        finally:
            listener.close()
            server.pre_shutdown()  # close idle connections
            await server.shutdown(CLOSE_DEADLINE)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        if request.path in ("/healthz", "/readyz"):
            return self._health(request.path)
        door = self._doors.get(request.path)
        if door is None:
            return web.Response(status=404, text=f"there is no {request.path[:128]} here\n")
        if request.method != "POST":
            text = f"{request.path} takes POST only\n"
            return web.Response(status=405, text=text, headers={"Allow": "POST"})
        try:
            answer = await door.answer(await _read(request, door.limit))
        except MalformedText as error:
            log.warning("extender.bad_request", path=request.path, err=str(error))
            response = web.Response(status=_BAD_REQUEST, text=f"{request.path}: {error}\n")
            response.force_close()  # the rest of the body is not read
            return response
        text = json.dumps(answer, separators=(",", ":"))
        return web.Response(text=text, content_type="application/json")

    def _health(self, path: str) -> web.Response:
        if path == "/healthz" or self._is_ready():
            return web.Response()
        return web.Response(status=_UNAVAILABLE, text="nodes and pods are not listed yet\n")


async def _read(request: web.BaseRequest, limit: int) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_DEADLINE):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > limit:
                    raise MalformedText(f"the body is longer than {limit} bytes")
    except TimeoutError as slow:
        raise MalformedText(f"the body did not arrive within {BODY_DEADLINE:g} s") from slow
    return bytes(body)
