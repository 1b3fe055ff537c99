"""The HTTP server for people and Prometheus, on TCP (read-only), a unix socket, or both."""

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import msgspec
import structlog

from agent.core.errors import PermissionFault, host_port
from agent.kit.backoff import Throttle
from agent.web import aiohttp_server as web
from agent.web.actions import Actions
from agent.web.api import ReadApi
from agent.web.caller import HEADERS, ours
from agent.web.gate import TELL_PERIOD, ConnectionGate
from agent.web.sockets import unix_socket

log = structlog.get_logger(__name__)

HEAD_LIMIT = 16 * 1024
STOP_TIMEOUT = 2.0
AT_ONCE = 32
"""Connections accepted in one turn of the loop, before open ones are read."""
QUEUE = 4096
"""Connections that wait to be accepted; beyond that, a client's kernel tries again after 1 s.

The kernel reduces it to net.core.somaxconn, which is 4096 from Linux 5.4 on.
"""
METHODS = "GET, HEAD"

Page = Callable[[web.BaseRequest], web.Response]
"""Renders one path from values in memory, without waiting."""


class Listeners(msgspec.Struct, frozen=True):
    """Where to listen. `port` 0: any free one; None: no TCP. `socket_path` None: no unix socket.

    `near`: a second address for the same port; empty: none. Without it the server serves, too.
    """

    host: str = "127.0.0.1"
    port: int | None = 9394
    socket_path: Path | None = None
    near: str = ""


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


class WebServer:
    """Serves `pages` by path and the read API, as an async context manager or by run().

    Only the unix socket, whose callers the kernel identifies, serves `actions`.
    """

    def __init__(
        self,
        listeners: Listeners,
        pages: Mapping[str, Page],
        actions: Actions | None = None,
        api: ReadApi | None = None,
    ) -> None:
        self._listeners = listeners
        self._pages = pages
        self._actions = actions
        self._api = api
        self._stack = contextlib.AsyncExitStack()
        self._failed = Throttle(TELL_PERIOD)
        self._port: int | None = None

    @property
    def port(self) -> int | None:
        """The open TCP port; None before the start and without TCP."""
        return self._port

    async def run(self) -> NoReturn:
        """Serve until cancelled. Raises PermissionFault: an address cannot be bound."""
        async with self:
            while True:
                await asyncio.Event().wait()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            if self._listeners.port is not None:
                await self._listen_tcp(stack, self._listeners.host, self._listeners.port)
                await self._listen_near(stack)
            if self._listeners.socket_path is not None:
                await self._listen_unix(stack, self._listeners.socket_path)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._port = None
        if self._api is not None:
            self._api.stop()
        await self._stack.aclose()

    async def _listen_tcp(self, stack: contextlib.AsyncExitStack, host: str, port: int) -> None:
        gate = ConnectionGate(self._answer)
        try:
            server = await asyncio.get_running_loop().create_server(
                gate, host, port, backlog=AT_ONCE
            )
        except OSError as error:
            raise PermissionFault(
                f"{host_port(host, port)} cannot be bound: {error.strerror}; choose another "
                "web.address or web.port, or stop the process that listens there."
            ) from error
        stack.push_async_callback(_stop, server, gate)
        for listener in server.sockets:
            with listener.dup() as same:  # asyncio uses one number for AT_ONCE and QUEUE
                same.listen(QUEUE)
        self._port = server.sockets[0].getsockname()[1]
        log.info("web.listening", host=host, port=self._port)

    async def _listen_near(self, stack: contextlib.AsyncExitStack) -> None:
        if not self._listeners.near or self._port is None:
            return
        try:
            await self._listen_tcp(stack, self._listeners.near, self._port)
        except PermissionFault as error:
            log.warning("web.not_near", text=str(error))

    async def _listen_unix(self, stack: contextlib.AsyncExitStack, path: Path) -> None:
        gate = ConnectionGate(self._answer_local)
        opened = stack.enter_context(unix_socket(path))
        server = await asyncio.get_running_loop().create_unix_server(gate, sock=opened)
        stack.push_async_callback(_stop, server, gate)
        log.info("web.listening", path=str(path))

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._sent(request, None)

    async def _answer_local(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._sent(request, self._actions)

    async def _sent(self, request: web.BaseRequest, actions: Actions | None) -> web.StreamResponse:
        response: web.StreamResponse
        try:
            if actions is not None and request.method == "POST":
                response = await actions.answer(request)
            else:
                response = _unfit(request) or await self._read(request)
        except ConnectionError:  # the reader of a stream has gone
            raise
        except Exception as error:  # the outermost handler
            left_out = self._failed.admit()
            if left_out is not None:
                log.exception("web.failed", path=request.path, more=left_out)
            if request.writer.output_size > 0:
                raise ConnectionError("the answer has begun") from error
            response = web.Response(
                status=500, text="This page failed; the agent's log says why.\n"
            )
        return ours(response)

    async def _read(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._api is not None and self._api.covers(request.path):
            return _unread(request) or await self._api.answer(request, HEADERS)
        page = self._pages.get(request.path)
        if page is None:
            return web.Response(status=404, text=f"No such page. Pages: {' '.join(self._pages)}\n")
        return _unread(request) or page(request)


def _unfit(request: web.BaseRequest) -> web.Response | None:
    """The answer to a head that is too large."""
    if sum(len(name) + len(value) for name, value in request.raw_headers) > HEAD_LIMIT:
        return web.Response(status=431, text=f"The head may have {HEAD_LIMIT} bytes.\n")
    return None


def _unread(request: web.BaseRequest) -> web.Response | None:
    """The answer to a method that does not read."""
    if request.method in {"GET", "HEAD"}:
        return None
    return web.Response(
        status=405, headers={"Allow": METHODS}, text="Only GET and HEAD are answered.\n"
    )


async def _stop(server: asyncio.Server, gate: ConnectionGate) -> None:
    """Accept no more connections and end the open ones."""
    server.close()  # no wait_closed(): on Python 3.12 and later it waits for all clients
    gate.pre_shutdown()
    await gate.shutdown(STOP_TIMEOUT)
