"""The HTTP server for people and Prometheus, on TCP (read-only), a unix socket, or both."""

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
import structlog
from aiohttp import web

from agent.errors import PermissionFault, host_port
from agent.kit.tasks import Throttle
from agent.web.api import PREFIX, ReadApi
from agent.web.gate import TELL_PERIOD, ConnectionGate, ours

log = structlog.get_logger(__name__)

HEAD_LIMIT: Final = 16 * 1024
STOP_TIMEOUT: Final = 2.0
AT_ONCE: Final = 32
"""Connections accepted in one turn of the loop, before open ones are read."""
QUEUE: Final = 4096
"""Connections that wait to be accepted; beyond that, a client's kernel tries again after 1 s.

The kernel reduces it to net.core.somaxconn, which is 4096 from Linux 5.4 on.
"""
SOCKET_MODE: Final = 0o660
DIRECTORY_MODE: Final = 0o750

Page = Callable[[web.BaseRequest], web.Response]
"""Renders one path from values in memory, without waiting."""
Act = Callable[[web.BaseRequest], Awaitable[web.Response]]
"""Answers a POST on the unix socket."""


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
    """Serves `pages` by path and the read API, while its context is open.

    Only the unix socket, whose callers the kernel identifies, serves `actions`.
    """

    def __init__(
        self,
        listeners: Listeners,
        pages: Mapping[str, Page],
        actions: Act | None = None,
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

    async def __aenter__(self) -> Self:
        """Listen. Raises PermissionFault: an address cannot be bound."""
        wished = self._listeners
        async with contextlib.AsyncExitStack() as stack:
            if wished.port is not None:
                self._port = await self._listen_tcp(stack, wished.host, wished.port)
                try:
                    if wished.near:
                        await self._listen_tcp(stack, wished.near, self._port)
                except PermissionFault as error:
                    log.warning("web.not_near", text=str(error))
            if wished.socket_path is not None:
                gate = ConnectionGate(self._answer_local)
                opened = stack.enter_context(unix_socket(wished.socket_path))
                server = await asyncio.get_running_loop().create_unix_server(gate, sock=opened)
                stack.push_async_callback(_stop, server, gate)
                log.info("web.listening", path=str(wished.socket_path))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._port = None
        await self._stack.aclose()

    async def _listen_tcp(self, stack: contextlib.AsyncExitStack, host: str, port: int) -> int:
        """Listen, and return the port."""
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
        found: int = server.sockets[0].getsockname()[1]
        log.info("web.listening", host=host, port=found)
        return found

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        return await self._sent(request, None)

    async def _answer_local(self, request: web.BaseRequest) -> web.Response:
        return await self._sent(request, self._actions)

    async def _sent(self, request: web.BaseRequest, actions: Act | None) -> web.Response:
        try:
            if actions is not None and request.method == "POST":
                return ours(await actions(request))
            return ours(self._read(request))
        except Exception:
            left_out = self._failed.admit()
            if left_out is not None:
                log.exception("web.failed", path=request.path, more=left_out)
            text = "This page failed; the agent's log says why.\n"
            return ours(web.Response(status=500, text=text))

    def _read(self, request: web.BaseRequest) -> web.Response:
        if sum(len(name) + len(value) for name, value in request.raw_headers) > HEAD_LIMIT:
            return web.Response(status=431, text=f"The head may have {HEAD_LIMIT} bytes.\n")
        page = self._pages.get(request.path)
        if self._api is not None and request.path.startswith(PREFIX):
            page = self._api.answer
        if page is None:
            return web.Response(status=404, text=f"No such page. Pages: {' '.join(self._pages)}\n")
        if request.method not in {"GET", "HEAD"}:
            text, allowed = "Only GET and HEAD are answered.\n", {"Allow": "GET, HEAD"}
            return web.Response(status=405, headers=allowed, text=text)
        return page(request)


async def _stop(server: asyncio.Server, gate: ConnectionGate) -> None:
    """Accept no more connections and end the open ones."""
    server.close()  # no wait_closed(): on Python 3.12 and later it waits for all clients
    gate.pre_shutdown()
    await gate.shutdown(STOP_TIMEOUT)


@contextlib.contextmanager
def unix_socket(path: Path) -> Iterator[socket.socket]:
    """Bind a socket at `path`, not yet listening, for the block; make its directory (0750).

    A socket that a dead process left is replaced. At the end the file is removed, unless it was
    replaced. Raises PermissionFault: a process answers there, another file is there, or the agent
    may not write the directory.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            _clear(path)
            opened = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
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


def _clear(path: Path) -> None:
    """Remove a dead socket. Raises PermissionFault for a live one or another file."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_socket():
        raise PermissionFault(f"{path} is in the way of the socket and is not a socket: remove it.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:  # its queue is full: a busy process serves it
            pass
    raise PermissionFault(
        f"{path} is served by another process: stop it, or give this one another run directory."
    )
