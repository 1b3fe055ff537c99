"""Sends requests to the API server: deadlines, fresh credentials, counts, the agent's errors."""

import asyncio
import contextlib
import functools
import random
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import msgspec
import structlog

from agent import __version__
from agent.codec.managed import WRITER
from agent.codec.narrow import Raw, read_object
from agent.core.errors import ApiError, MalformedText, SettingsError
from agent.host.kube import shim
from agent.host.kube.connection import Connection, configure, fingerprint, unusable
from agent.host.kube.translate import refused, unanswered
from agent.kit.running_time import Lag
from agent.kit.tally import Tally

log = structlog.get_logger(__name__)

DEADLINE = 10.0
IN_FLIGHT = 2
"""Requests at a time for one verb and resource; watches do not count.

This limits the load on a slow server. A request that hangs delays no other kind: a GET in an
Allocate, which has 0.15 s, waits for at most two other GETs of its kind and for no LIST or PATCH.
"""
BODY_LIMIT = 10 * 1024 * 1024
"""Bytes of an answer, and of a frame of a watch: any one object fits.

etcd holds at most 1.5 MiB of an object (its --max-request-bytes), and JSON may write `<` with six
characters.
"""
BEGINNING = 64 * 1024
"""Bytes kept of an answer that is too long."""
OFF_LOOP = 1024 * 1024
"""Bytes: longer bodies are decoded on a thread."""
UNAUTHORIZED = 401
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""An idle connection of a watch is asked after 10 s, and given up after 15 s without an answer."""

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
"""Half the bytes of a Node, little of a pod; a server without support sends all."""
METHODS: Mapping[str, str] = {"create": "POST", "patch": "PATCH"}

T = TypeVar("T")


class AnswerTooLong(ApiError):  # noqa: N818 -- the answer is
    """The body of a successful answer is longer than the caller allows; its beginning."""

    def __init__(self, text: str, beginning: bytes) -> None:
        super().__init__(text)
        self.beginning = beginning


class Chunks(Protocol):
    """The body of an answer as it arrives."""

    async def readany(self) -> bytes:
        """Return the next bytes; empty at the end."""
        ...


class ApiAnswer(Protocol):
    """An HTTP answer whose body has not been read."""

    status: int
    headers: Mapping[str, str]
    content: Chunks
    connection: Any

    def close(self) -> None:
        """Close the connection, unless the body was read to its end."""
        ...


class ApiRequest(msgspec.Struct, frozen=True):
    """One request. `verb` and `resource` are Kubernetes' terms (list, pods/status)."""

    verb: str
    resource: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    body: Mapping[str, object] | Sequence[object] | None = None
    content_type: str = "application/json"
    accept: str = "application/json"

    @property
    def method(self) -> str:
        """The HTTP method."""
        return METHODS.get(self.verb, "GET")

    @property
    def what(self) -> str:
        """The request in words, for messages."""
        return f"{self.verb} {self.resource} ({self.path})"


def path_of(*segments: str) -> str:
    """The path below /api/v1 with these segments, each quoted."""
    return "/".join(("/api/v1", *(quote(segment, safe="") for segment in segments)))


class KubeClient(msgspec.Struct):
    """The library's HTTP client with its settings; a renewed token replaces only these."""

    configuration: Any
    rest: Any


class KubeSession:
    """The connection to one API server; the first request opens it.

    `requests` counts answers by verb, resource and code (`none`: no answer); `received` counts
    bytes.
    """

    def __init__(
        self, connection: Connection, random: random.Random, program: str = WRITER
    ) -> None:
        self.random = random
        self._program = program
        """The client's name, which the API server records as field manager."""
        self.requests = Tally(
            "api_requests_total",
            "Requests to the API server by the code of the answer (none: no answer).",
            ("verb", "resource", "code"),
        )
        self.received = Tally(
            "api_received_bytes_total", "Bytes received from the API server.", ("resource",)
        )
        self._connection = connection
        self._library: shim.Library | None = None
        self._client: KubeClient | None = None
        self._print: tuple[object, ...] = ()
        """The fingerprint of the connection with which the client was made."""
        self._retired: KubeClient | None = None
        self._lag = Lag()
        self._closed = False
        self._renewals = 0
        self._lock = asyncio.Lock()
        self._rooms: dict[tuple[str, str], asyncio.Semaphore] = {}

    async def open(self) -> None:
        """Load the library and the credentials; a second call does nothing.

        Raises SettingsError: the connection's files cannot be used.
        """
        async with self._lock:
            if self._client is not None or self._closed:
                return
            library = await asyncio.to_thread(shim.load)
            configuration = await configure(library, self._connection)
            self._print = fingerprint(configuration)  # before the client reads the files
            self._client = self._connect(library, configuration)
            self._library = library
        log.info("kube.opened", server=configuration.host, source=self._connection.source)

    async def close(self) -> None:
        """End all connections; a second call does nothing."""
        self._closed = True
        for client in (self._retired, self._client):
            if client is not None:
                await client.rest.close()
        self._retired = self._client = None

    async def call(self, request: ApiRequest, at_most: int | None = None) -> bytearray:
        """Return the body of a successful answer, within 10 s. Raises ApiError.

        Raises AnswerTooLong for more than `at_most` bytes (None: 10 MiB).
        """
        body, _ = await self.exchange(request, at_most)
        return body

    async def exchange(
        self, request: ApiRequest, at_most: int | None = None
    ) -> tuple[bytearray, Mapping[str, str]]:
        """Do as call(); also return the headers of the answer."""
        limit = BODY_LIMIT if at_most is None else at_most
        try:
            async with self._lag.within(DEADLINE), self._room(request):
                answer = await self._authorized(request)
                try:
                    return await self._successful(request, answer, limit), answer.headers
                finally:
                    answer.close()
        except self._failures() as error:
            raise self._unanswered(request, error) from error

    async def fetch(self, request: ApiRequest) -> Mapping[str, Any]:
        """Return the object in a successful answer. Raises ApiError."""
        return await aside(await self.call(request), functools.partial(decode, request))

    @contextlib.asynccontextmanager
    async def stream(self, request: ApiRequest) -> AsyncIterator[Chunks]:
        """Open a successful answer and yield its body as it arrives; opening takes at most 10 s.

        Raises ApiError, also when the connection breaks while the caller reads.
        """
        answer = None
        try:
            async with self._lag.within(DEADLINE):
                answer = await self._authorized(request)
                if not _is_success(answer):
                    await self._successful(request, answer, BODY_LIMIT)
            _keep_alive(answer)
            yield answer.content
        except self._failures() as error:
            raise self._unanswered(request, error) from error
        finally:
            if answer is not None:
                answer.close()

    async def _authorized(self, request: ApiRequest) -> ApiAnswer:
        """Send the request; after a 401 or a TLS error, once more with fresh credentials."""
        library, client = await self._ready(request)
        seen = self._renewals
        try:
            answer = await self._send(client, request)
        except library.tls_errors:
            answer = None
        if answer is not None and answer.status != UNAUTHORIZED:
            return answer
        if answer is not None:
            answer.close()
        await self._renew(seen)
        _, client = await self._ready(request)
        return await self._send(client, request)

    async def _send(self, client: KubeClient, request: ApiRequest) -> ApiAnswer:
        code = "none"
        headers = {
            "Accept": request.accept,
            "Content-Type": request.content_type,
            "User-Agent": f"{self._program}/{__version__}",
        }
        try:
            token = await client.configuration.get_api_key_with_prefix("BearerToken")
            if token:
                headers["Authorization"] = token
            answer: ApiAnswer = await client.rest.request(
                request.method,
                client.configuration.host + request.path,
                query_params=request.query,
                headers=headers,
                body=request.body,
                _preload_content=False,
            )
            code = str(answer.status)
        finally:
            self.requests.add(request.verb, request.resource, code)
        return answer

    async def _successful(self, request: ApiRequest, answer: ApiAnswer, at_most: int) -> bytearray:
        body = bytearray()
        while len(body) <= at_most and (chunk := await answer.content.readany()):
            body += chunk
        self.received.add(request.resource, amount=len(body))
        if len(body) > at_most:
            text = f"{request.what}: the answer is longer than {at_most >> 20} MiB"
            beginning = bytes(body[:BEGINNING])
            body.clear()  # what handles the error keeps this frame until the next collection
            raise AnswerTooLong(text, beginning)
        if _is_success(answer):
            return body
        raise refused(request.what, answer.status, bytes(body), answer.headers.get("Retry-After"))

    async def _ready(self, request: ApiRequest) -> tuple[shim.Library, KubeClient]:
        if self._client is None:
            try:
                await self.open()
            except SettingsError as error:
                raise ApiError(f"{request.what}: {error}") from error
        if self._closed or self._library is None or self._client is None:
            raise ApiError(f"{request.what}: the connection to the API server was closed")
        return self._library, self._client

    async def _renew(self, seen: int) -> None:
        """Read the credentials again, unless another request did since renewal number `seen`.

        The client before the new one stays open, so open watches keep their connection.
        """
        async with self._lock:
            library, old = self._library, self._client
            if self._renewals != seen or library is None or old is None:
                return
            configuration = await configure(library, self._connection)
            self._renewals += 1
            fresh = fingerprint(configuration)
            if fresh == self._print:
                old.configuration = configuration
                return
            self._client = self._connect(library, configuration)
            self._print = fresh
            retired, self._retired = self._retired, old
            if retired is not None:
                await retired.rest.close()
        log.info("kube.credentials_renewed", source=self._connection.source)

    def _connect(self, library: shim.Library, configuration: Any) -> KubeClient:  # noqa: ANN401 -- untyped library
        """Make a client whose HTTP session reads no proxy variables and no .netrc.

        The library's own session reads both, on two threads, before every request.
        """
        try:
            rest = library.rest_client(configuration)
        except (OSError, ValueError) as error:  # invalid certificates
            raise unusable(self._connection, error) from error
        theirs = rest.pool_manager
        rest.pool_manager = library.http_session(connector=theirs.connector)
        theirs.detach()
        return KubeClient(configuration, rest)

    def _room(self, request: ApiRequest) -> asyncio.Semaphore:
        kind = (request.verb, request.resource.partition("/")[0])
        return self._rooms.setdefault(kind, asyncio.Semaphore(IN_FLIGHT))

    def _failures(self) -> tuple[type[Exception], ...]:
        known = (OSError, SettingsError)  # TimeoutError is an OSError
        library = self._library
        return known if library is None else known + library.http_errors + library.config_errors

    def _unanswered(self, request: ApiRequest, error: Exception) -> ApiError:
        return unanswered(request.what, error, self._connection.source)


async def aside(body: bytearray, read: Callable[[bytearray], T]) -> T:
    """Return `read(body)`; for a body of more than 1 MiB, run it on a thread."""
    return await asyncio.to_thread(read, body) if len(body) > OFF_LOOP else read(body)


def decode(request: ApiRequest, body: Raw) -> Mapping[str, Any]:
    """Decode the JSON object in `body`. Raises ApiError."""
    try:
        return read_object(body)
    except MalformedText as error:
        raise ApiError(f"{request.what}: the answer is not a JSON object") from error


def _keep_alive(answer: ApiAnswer) -> None:
    """Let the kernel find out if what is between here and the server has forgotten the connection.

    A NAT or a load balancer that does tells nobody, and an idle watch would wait for minutes.
    """
    if answer.connection is not None:  # the answer has not ended
        found = answer.connection.transport.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            found.setsockopt(socket.IPPROTO_TCP, option, value)


def _is_success(answer: ApiAnswer) -> bool:
    return answer.status // 100 == 2
