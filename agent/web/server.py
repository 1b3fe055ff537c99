"""The HTTP server for people and Prometheus: its answers, who may read them, its connections.

It is aiohttp's server. Ours are the limits of connections in number and time, the headers, and
errors that repeat nothing of the request. Only actions on GPUs wait, on the unix socket alone.
"""

import asyncio
import collections
import contextlib
import hashlib
import ipaddress
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec
import structlog
from aiohttp import HttpVersion10, HttpVersion11, web
from typing_extensions import override

from agent.errors import PermissionFault, cap, host_port
from agent.kit.tasks import Allowance
from agent.model import ReaderPolicy
from agent.node import STANDBY, Check, is_ready
from agent.status import StatusFacts, envelope, status_of
from agent.web.page import HTML, POLICY, page_html
from agent.web.runbook import runbook_text

log = structlog.get_logger(__name__)

T = TypeVar("T")
KEPT: Final = 0.5
"""Seconds for which a document is reused."""
JSON: Final = "application/json"
LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""The names by which a browser on this host may ask."""
REASON_LIMIT: Final = 4096
"""Characters of a failed check's reason."""
CONNECTIONS: Final = 256
"""Connections of each listener; each beyond that closes another."""
SHARE: Final = 32
"""Connections of one address that are safe from another's when full; the kubelet has two."""
HEAD_TIMEOUT: Final = 3.0
"""Seconds for a client to send its request: longer than the kubelet waits for a whole probe."""
ANSWER_TIMEOUT: Final = 30.0
"""Seconds for a client to read the answer."""
LINE_LIMIT: Final = 4096
"""Bytes of the first line of a request."""
RECEIVE_LIMIT: Final = 64 * 1024
"""Bytes after which reading stops: by its own limits aiohttp would keep a head of 1 MB for each
connection, and more requests behind it."""

STOP_TIMEOUT: Final = 2.0
"""Seconds for open answers at the end."""
TELL_PERIOD: Final = 60.0
"""Seconds between two log lines of one kind."""
AT_ONCE: Final = 32
"""Connections accepted in one turn of the loop, before open ones are read."""
QUEUE: Final = 4096
"""Connections that wait to be accepted, as net.core.somaxconn; the next tries again after 1 s."""
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


def plain(status: int, text: str, **headers: str) -> web.Response:
    """An answer that is a sentence."""
    return web.Response(status=status, text=text + "\n", headers=headers)


def tell(allowance: Allowance, say: Callable[..., object], event: str, **fields: object) -> None:
    """Log a line, if the last one of its kind is old enough: callers could cause a flood."""
    if (left_out := allowance.admit()) is not None:
        say(event, **fields, more=left_out)


class Reused(Generic[T]):
    """What `make` returns, for `kept` seconds: so many readers cost the loop no more than one."""

    def __init__(self, make: Callable[[], T], kept: float) -> None:
        self._make, self._kept = make, kept
        self._until = float("-inf")
        self._made: T

    def value(self) -> T:
        """The newest value, or one of the last `kept` seconds."""
        now = asyncio.get_running_loop().time()
        if self._until <= now:
            self._made, self._until = self._make(), now + self._kept

        return self._made


_Rendered: TypeAlias = tuple[bytes, bytes]
"""An answer, and what of it does not change with the time, as JSON: a hash of it is the ETag."""


def _page(facts: StatusFacts) -> _Rendered:
    status = status_of(facts)
    return page_html(status, facts.now).encode(), msgspec.json.encode(status)


def _document(kind: str, read: Callable[[StatusFacts], object], facts: StatusFacts) -> _Rendered:
    data = msgspec.json.encode(read(facts))
    return envelope(kind, msgspec.Raw(data), facts.now), data


READ: Final[Mapping[str, Callable[[StatusFacts], _Rendered]]] = {
    "/": _page,
    "/api/v1/status": partial(_document, "Status", status_of),
    "/api/v1/settings": partial(_document, "Settings", lambda facts: facts.settings()),
}
"""What names pods, by its path."""


def reading_pages(
    facts: Callable[[], StatusFacts], readers: ReaderPolicy = "local"
) -> dict[str, Page]:
    """The page at `/` and the documents of `/api/v1`, for those who may read what names pods.

    `facts` is read for each, without waiting. Whoever has the newest one gets 304.
    """

    def answer(rendered: Reused[_Rendered], request: web.BaseRequest) -> web.Response:
        if (refused := refuse_reader(request, readers)) is not None:
            return refused

        body, data = rendered.value()
        headers = {"ETag": f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'}
        # The header may list several ETags, and a weak one is as good here.
        if headers["ETag"] in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)

        headers["Content-Type"] = JSON
        if request.path == "/":
            headers |= {"Content-Security-Policy": POLICY, "Content-Type": HTML}
        return web.Response(body=body, headers=headers)

    def reused(render: Callable[[StatusFacts], _Rendered]) -> Reused[_Rendered]:
        return Reused(lambda: render(facts()), KEPT)

    return {path: partial(answer, reused(render)) for path, render in READ.items()}


RUNBOOK: Final = "/runbook/"
"""Before the id of an entry."""


def runbook_page(request: web.BaseRequest) -> web.Response:
    """Answer `/runbook/ID` with the text that `hami-agent runbook ID` prints."""
    try:
        return web.Response(text=runbook_text(request.path.removeprefix(RUNBOOK)))
    except LookupError as error:
        return plain(404, error.args[0])


def stands_by(_request: web.BaseRequest) -> web.Response:
    """Answer for a standby, which has nothing to read; a browser asks again by itself."""
    text = "This agent stands by; ask again when it serves. A browser does so every 3 s."
    return plain(503, text, Refresh="3", **{"Retry-After": "3"})


def refuse_reader(request: web.BaseRequest, readers: ReaderPolicy) -> web.Response | None:
    """Answer somebody who may not read what names pods; None: he may.

    The unix socket is guarded by its permissions. With LOCAL a browser must name this host as
    local: else a page from elsewhere could let its own name point here, and read the answer (DNS
    rebinding).
    """
    peer = request.transport.get_extra_info("peername") if request.transport else None
    if readers == "all" or isinstance(peer, str | bytes):  # of a unix socket
        return None

    is_near = False
    with contextlib.suppress(ValueError):  # a connection that is gone has no address
        address = ipaddress.ip_address((peer or [""])[0].partition("%")[0])
        # A socket for both families shows 127.0.0.1 as ::ffff:127.0.0.1.
        is_near = (getattr(address, "ipv4_mapped", None) or address).is_loopback

    if not is_near:
        text = "This page names pods, so only this host may read it: use `kubectl port-forward` to "
        text += "the agent's pod, or `hami-agent status`. With `web.readers: all`, everybody may "
        text += "who reaches this port: protect it with web.address or a NetworkPolicy."
        return plain(403, text)

    host = request.headers.get("Host", "")
    name, _, port = host.rpartition(":")
    if (name if name and port.isdigit() else host).lower() not in LOCAL_HOSTS:
        text = "Ask by the name localhost or 127.0.0.1: other names are not answered here."
        return plain(403, text)

    return None


def livez(request: web.BaseRequest) -> web.Response:
    """Answer `/livez` and `/healthz`, as long as the loop runs: no answer means a restart.

    A restart repairs no driver and no API server, and if a standing task ends, the process does.
    """
    return readyz(lambda: (Check("loop", ok=True),), request)


def readyz(checks: Callable[[], tuple[Check, ...]], request: web.BaseRequest) -> web.Response:
    """Answer `/readyz`: 503 while a required check fails; degraded checks are only listed.

    With `?standby` a standby is ready: an update ends a node's old agent once the new one is. The
    form is that of Kubernetes, also of `?verbose`.
    """
    found = checks()
    if "standby" in request.query:
        found = tuple(
            msgspec.structs.replace(one, required=one.required and one.name != STANDBY)
            for one in found
        )

    status, verdict = (200, "passed") if is_ready(found) else (503, "failed")
    is_long, lines = status == 503 or "verbose" in request.query, []
    for check in found:
        if not is_long and (check.ok or check.required):
            continue
        word = "[-]{} failed: {}" if check.required else "[!]{} degraded: {}"
        said = word.format(check.name, cap(check.text, REASON_LIMIT) or "no reason given")
        lines.append(f"[+]{check.name} ok" if check.ok else said)

    last = f"{request.path.removeprefix('/')} check {verdict}"
    lines = [*lines, last] if is_long else ["ok", *lines]
    ending = "\n" if len(lines) > 1 else ""  # `ok` alone is as Kubernetes writes it
    return web.Response(status=status, text="\n".join(lines) + ending)


# The listeners, and the connections of each.


def near(host: str) -> str:
    """The address of loopback if `host` is a single other address, such as a pod's, else empty.

    `kubectl port-forward` connects to it, and only from there the page and `/api/v1` are read.
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

    `near_by`: a second address for the same port; without it the first one serves, too. Raises
    PermissionFault: `host` cannot be bound.
    """
    async with contextlib.AsyncExitStack() as stack:
        for address in filter(None, (host, near_by)):
            gate, loop = ConnectionGate(pages), asyncio.get_running_loop()
            try:
                listener = await loop.create_server(gate, address, port, backlog=AT_ONCE)
            except OSError as error:
                text = f"{host_port(address, port)} cannot be bound: {error.strerror}; choose "
                text += "another web.address or web.port, or stop the process that listens there."
                if address == host:
                    raise PermissionFault(text) from error

                log.warning("web.not_near", text=text)
                continue

            stack.push_async_callback(gate.stop, listener)
            for opened in listener.sockets:
                with opened.dup() as same:  # asyncio uses one number for AT_ONCE and QUEUE
                    same.listen(QUEUE)

            port = listener.sockets[0].getsockname()[1]
            log.info("web.listening", host=address, port=port)

        yield port


@contextlib.asynccontextmanager
async def serve_socket(
    pages: Mapping[str, Page], path: Path, actions: Act | None = None
) -> AsyncIterator[None]:
    """Serve `pages` at a unix socket for the block; make its directory (0750).

    Only here `actions` are served: the kernel identifies the callers. A socket that is there was
    left by a dead agent, as the lock beside it says. Raises PermissionFault: it cannot be bound.
    """
    gate = ConnectionGate(pages, actions)
    try:
        path.parent.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(gate, path, start_serving=False)
        bound = _restrict(path)  # in time: no client can connect before it serves
    except OSError as error:
        raise PermissionFault(
            f"{path} cannot be bound: {error.strerror or error}; remove a file that is in its "
            "place, and let the agent's user own its directory."
        ) from error

    await server.start_serving()
    log.info("web.listening", path=str(path))
    try:
        yield
    finally:
        await gate.stop(server)
        _remove(path, bound)


def _restrict(path: Path) -> os.stat_result:
    path.chmod(SOCKET_MODE)
    return path.lstat()


def _remove(path: Path, bound: os.stat_result) -> None:
    with contextlib.suppress(OSError):
        if os.path.samestat(path.lstat(), bound):  # else the next agent serves there already
            path.unlink()


class _Guest(msgspec.Struct):
    """An open connection. `source`: the caller's address, empty on a unix socket.

    `is_heard`: its request was received; now it reads the answer.
    """

    transport: asyncio.Transport
    source: str
    timer: asyncio.TimerHandle
    is_heard: bool = False


class ConnectionGate(web.Server):
    """aiohttp's server of one listener, with limits on the number and time of connections.

    When it is full, a new connection replaces the oldest one without a request, else the oldest
    one. If an address has more than SHARE, only connections of the address with the most are
    candidates. So no client can keep out the kubelet, which sends its request at once.
    """

    def __init__(self, pages: Mapping[str, Page], actions: Act | None = None) -> None:
        self._pages = pages
        self._actions = actions
        super().__init__(self._answer)

        # aiohttp would log each malformed request with a traceback: a client could flood the log.
        self._quiet = logging.getLogger(f"{__name__}.clients")
        self._quiet.setLevel(logging.CRITICAL)
        self._guests: dict[web.RequestHandler, _Guest] = {}  # oldest first
        self._full, self._failed = Allowance(1, TELL_PERIOD), Allowance(1, TELL_PERIOD)

    @override
    def __call__(self) -> web.RequestHandler:
        """Make the protocol of a new connection."""
        return _Connection(
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # it asks whether there is one
            logger=self._quiet,
            max_line_size=LINE_LIMIT,
            lingering_time=0,
        )

    async def stop(self, server: asyncio.Server) -> None:
        """Close the listener, and give open answers some time."""
        server.close()  # no wait_closed(): on Python 3.12 and later it waits for all clients
        self.pre_shutdown()
        await self.shutdown(STOP_TIMEOUT)

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
            theirs = [
                one
                for one, guest in self._guests.items()
                if most <= SHARE or guest.source == greediest
            ]
            idle = (one for one in theirs if not self._guests[one].is_heard)
            closed = self._close(next(idle, theirs[0]))
            tell(self._full, log.warning, "web.full", connections=CONNECTIONS, peer=closed.source)

        self._guests[handler] = _Guest(transport, source, self._timer(HEAD_TIMEOUT, handler))

    @override
    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        if guest := self._guests.pop(handler, None):
            guest.timer.cancel()
        super().connection_lost(handler, exc)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        """Answer the only request of a connection; whatever fails, the client gets a sentence."""
        if guest := self._guests.get(request.protocol):  # now it has time to read the answer
            guest.is_heard = True
            guest.timer.cancel()
            guest.timer = self._timer(ANSWER_TIMEOUT, request.protocol)

        try:
            return _ours(await self._respond(request))
        except Exception:
            if (left_out := self._failed.admit()) is not None:
                log.exception("web.failed", path=request.path, more=left_out)

            return _ours(plain(500, "This page failed; the agent's log says why."))

    async def _respond(self, request: web.BaseRequest) -> web.Response:
        if request.version not in {HttpVersion10, HttpVersion11}:
            return plain(505, "Use HTTP/1.0 or HTTP/1.1.")

        if self._actions is not None and request.method == "POST":
            return await self._actions(request)

        path = RUNBOOK if request.path.startswith(RUNBOOK) else request.path
        if path not in self._pages:
            return plain(404, f"No such page. Pages: {' '.join(self._pages)}")

        if request.method not in {"GET", "HEAD"}:
            return plain(405, "Only GET and HEAD are answered.", Allow="GET, HEAD")

        return self._pages[path](request)

    def _timer(self, seconds: float, handler: web.RequestHandler) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self._close, handler)

    def _close(self, handler: web.RequestHandler) -> _Guest:
        guest = self._guests.pop(handler)
        guest.timer.cancel()
        guest.transport.abort()
        return guest


def _ours(response: web.Response) -> web.Response:
    """Add the headers that an answer does not set itself, and end its connection."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)

    response.force_close()
    return response


class _Connection(web.RequestHandler):
    """aiohttp's protocol; its errors repeat nothing of the request, and it reads at most 64 KiB."""

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

        return _ours(plain(status, HTTPStatus(status).phrase))
