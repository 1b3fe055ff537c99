"""The client of the API server: credentials, TLS, requests, deadlines and errors."""

import asyncio
import contextlib
import importlib
import importlib.util
import random
import socket
import stat
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec
import structlog
import yaml

from agent import __version__
from agent.errors import (
    ApiConflict,
    ApiError,
    ApiForbidden,
    ApiGone,
    ApiInvalid,
    ApiNotFound,
    ApiThrottled,
    MalformedText,
    SettingsError,
    cap,
)
from agent.kit.timing import Lag, Tally
from agent.kube.objects import WRITER, Raw, inside, objects_in, read_object, text_in

if TYPE_CHECKING:  # loaded by load()
    from aiohttp import ClientResponse, StreamReader

log = structlog.get_logger(__name__)

# Loads kubernetes_asyncio without its 900 model modules, which take 38 MB and 0.2 s.

ROOT = "kubernetes_asyncio"


class Library(msgspec.Struct, frozen=True):
    """The modules of aiohttp and kubernetes_asyncio that are in use, untyped."""

    aiohttp: Any
    configuration: Any
    rest: Any
    kube_config: Any
    incluster_config: Any

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What they raise for files that describe no connection and for peers without HTTP."""
        http = (self.aiohttp.ClientError, self.aiohttp.http_exceptions.LineTooLong)
        return (*http, self.kube_config.ConfigException)


def load() -> Library:
    """Import the libraries. The first call blocks for about 0.1 s: run it on a thread.

    Raises ImportError when kubernetes_asyncio is not installed.
    """
    client = f"{ROOT}.client"
    if ROOT not in sys.modules:
        # The files of these packages import everything, and only Basic authentication, which no
        # Kubernetes since 1.19 accepts, uses urllib3. They are not executed.
        for name in (ROOT, client, "urllib3"):
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise ImportError(f"{name} is not installed; install kubernetes-asyncio")
            sys.modules[name] = importlib.util.module_from_spec(spec)

        # The two names that the library itself takes from them; the first only for annotations.
        module = importlib.import_module(f"{client}.configuration")
        vars(sys.modules[client]).update(ApiClient=object, Configuration=module.Configuration)

    return Library(
        aiohttp=importlib.import_module("aiohttp"),
        configuration=importlib.import_module(f"{client}.configuration"),
        rest=importlib.import_module(f"{client}.rest"),
        kube_config=importlib.import_module(f"{ROOT}.config.kube_config"),
        incluster_config=importlib.import_module(f"{ROOT}.config.incluster_config"),
    )


# Finds the API server and our identity there: by a kubeconfig file or the service account.

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECTIONS = 16
"""Two watches, and two requests of each verb and resource that the agent uses.

These are get and patch of nodes, get, list and patch of pods, create and patch of events.
"""
UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""The errors that the library's loader raises for a file of another shape."""


class Connection(msgspec.Struct, frozen=True):
    """How to reach the API server.

    Without `kubeconfig`: in-cluster, with the files of `service_account` and the variables
    KUBERNETES_SERVICE_HOST and _PORT of `environment`. `context`: the context of the kubeconfig;
    empty for its current one.
    """

    kubeconfig: Path | None = None
    service_account: Path = SERVICE_ACCOUNT
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    context: str = ""
    remedy: str = (
        "give the path of a readable kubeconfig for this node; inside a pod with a service account "
        "give none"
    )
    """What to do where a file of it cannot be used."""

    @property
    def source(self) -> str:
        """The file or directory that describes the connection, for messages."""
        return str(self.kubeconfig or self.service_account)


def check(connection: Connection) -> None:
    """Check the files of the connection; it imports no library and uses no network.

    Raises SettingsError: a file is missing, unreadable, or not a kubeconfig.
    """
    if connection.kubeconfig is not None:
        _read_context(connection, connection.kubeconfig)
        return

    names = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
    if not all(connection.environment.get(name) for name in names):
        raise SettingsError(
            "no kubeconfig is set and this is not a pod (KUBERNETES_SERVICE_HOST is unset)",
            remedy="set node.kubeconfig to the kubeconfig of this node",
        )

    for name in ("token", "ca.crt"):
        path = connection.service_account / name
        if not _text(connection, path):
            raise _unusable(connection, "is empty", path)


def default_namespace(connection: Connection) -> str:
    """The namespace of the kubeconfig's context or of this pod, like kubectl; else `default`.

    Raises SettingsError: a file is missing, unreadable, or not a kubeconfig.
    """
    if connection.kubeconfig is None:
        own = connection.service_account / "namespace"
        return (_text(connection, own).strip() if own.is_file() else "") or "default"

    return text_in(_read_context(connection, connection.kubeconfig), "namespace") or "default"


def _read_context(connection: Connection, path: Path) -> Mapping[str, object]:
    """The connection's context in its kubeconfig, or the current one. Raises SettingsError."""
    name = connection.context
    try:
        content: object = yaml.safe_load(_text(connection, path))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2026-13-32
        # Only the place, not the text of the error: a kubeconfig holds secrets.
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise _unusable(connection, f"is not YAML{place}") from None

    if not isinstance(content, dict) or not content.get("clusters"):
        raise _unusable(connection, "names no cluster")
    wanted = name or text_in(content, "current-context")
    if not wanted:
        raise _unusable(connection, "has no current-context")

    entries = objects_in(content, "contexts")
    contexts = {known: entry for entry in entries if (known := text_in(entry, "name"))}
    if name and name not in contexts:
        known = ", ".join(cap(known, 64) for known in contexts)
        said = f"has no context {cap(name, 64)} (it has {known or 'none'})"
        raise _unusable(connection, said)
    return inside(contexts.get(wanted, {}), "context")


def _text(connection: Connection, path: Path) -> str:
    """The text of one of the connection's files. Raises SettingsError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe may block for ever
            raise _unusable(connection, "is not a regular file", path)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        # In the system's words, without the path.
        reason = cap(str(getattr(error, "strerror", None) or error), 128)
        raise _unusable(connection, f"cannot be read ({reason})", path) from error


async def configure(library: Library, connection: Connection) -> Any:  # noqa: ANN401 -- untyped library
    """The library's Configuration for this connection. Raises SettingsError."""
    check(connection)
    configuration = library.configuration.Configuration()
    configuration.connection_pool_maxsize = CONNECTIONS
    configuration.host = ""

    try:
        if connection.kubeconfig is None:
            library.incluster_config.load_incluster_config(
                configuration,
                token_filename=str(connection.service_account / "token"),
                cert_filename=str(connection.service_account / "ca.crt"),
                environ=dict(connection.environment),
            )
        else:
            await library.kube_config.load_kube_config(
                config_file=str(connection.kubeconfig),
                context=connection.context or None,
                client_configuration=configuration,
                persist_config=False,
            )
    # errors: also of an identity provider of the kubeconfig that does not answer
    except library.errors + UNUSABLE as error:
        raise unusable(connection, error) from error

    if not configuration.host:
        raise _unusable(connection, "names no server for its current-context")
    return configuration


def unusable(connection: Connection, error: Exception) -> SettingsError:
    """The SettingsError for a connection that the libraries cannot use."""
    reason = f"cannot be used ({cap(str(error) or type(error).__name__, 128)})"
    return _unusable(connection, reason)


def _unusable(connection: Connection, reason: str, path: Path | None = None) -> SettingsError:
    """The SettingsError for a file of the connection. `path`: which, if it has several."""
    return SettingsError(f"{path or connection.source}: {reason}", remedy=connection.remedy)


# Turns failed requests to the API server into the agent's errors.

CLASSES: Mapping[int, type[ApiError]] = {
    401: ApiForbidden,
    403: ApiForbidden,
    404: ApiNotFound,
    409: ApiConflict,
    410: ApiGone,
    422: ApiInvalid,
    429: ApiThrottled,
}
REMEDIES: Mapping[int, str] = {
    401: "; renew the credentials of this node's identity",
    403: "; grant this right to the identity that asks",
}
LONGEST_RETRY_AFTER = 3600.0


def refused(what: str, status: int, body: bytes = b"", retry_after: str | None = None) -> ApiError:
    """The error for an answer with `status`; `what` is the request, like `patch nodes node-a`."""
    is_proxys = False
    try:
        message = text_in(read_object(body), "message")
    except MalformedText:  # a proxy may answer in HTML
        message, is_proxys = body[:1024].decode(errors="replace"), True

    # client-go does not read its date form either (retryAfterSeconds).
    digits = (retry_after or "").strip()
    is_number = digits.isascii() and digits.isdigit()
    wait = min(float(digits), LONGEST_RETRY_AFTER) if is_number else None
    error = _error(what, status, message, wait)
    if is_proxys and isinstance(error, ApiNotFound):  # it says nothing of pods and Nodes
        return ApiError(str(error), status=status, retry_after=wait)
    return error


def error_frame(what: str, obj: Mapping[str, object]) -> ApiError:
    """The error for an ERROR frame of a watch, whose object `obj` is a Status."""
    code = obj.get("code")
    return _error(what, code if isinstance(code, int) else 0, text_in(obj, "message"))


def _error(what: str, status: int, message: str, retry_after: float | None = None) -> ApiError:
    text = f"{what}: the API server answered {status}"
    if message:
        text += f": {cap(message)}"
    text += REMEDIES.get(status, "")
    return CLASSES.get(status, ApiError)(text, status=status, retry_after=retry_after)


# Sends requests to the API server: deadlines, fresh credentials, counts, the agent's errors.

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
EXECUTION = 60.0
"""Seconds for a command in a container: `doctor` waits 34 s for peers of which none answers."""
EXEC_PROTOCOL = "v4.channel.k8s.io"
"""Binary frames whose first byte is the channel: 1 output, 2 errors, 3 the result (Status)."""
METHODS: Mapping[str, str] = {"create": "POST", "patch": "PATCH"}

T = TypeVar("T")


class AnswerTooLong(ApiError):  # noqa: N818 -- the answer is
    """The body of a successful answer is longer than the caller allows; its beginning."""

    def __init__(self, text: str, beginning: bytes) -> None:
        super().__init__(text)
        self.beginning = beginning


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


class Executed(msgspec.Struct, frozen=True):
    """What a command in a container wrote, and why it failed; empty: it ended with exit code 0."""

    out: bytes
    err: str
    failure: str


class KubeClient(msgspec.Struct):
    """The library's HTTP client, and its settings with the credentials."""

    library: Library
    configuration: Any
    rest: Any


class KubeSession:
    """The connection to one API server; the first request opens it.

    If it `observes`, it sends no request that writes. `requests` counts answers by verb, resource
    and code (`none`: no answer); `received` counts bytes.
    """

    def __init__(
        self,
        connection: Connection,
        random: random.Random,
        program: str = WRITER,
        *,
        observes: bool = False,
    ) -> None:
        self.random = random
        self._observes = observes
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
        self._failures: tuple[type[Exception], ...] = (OSError, SettingsError)
        """What becomes an ApiError; TimeoutError is an OSError. The libraries are loaded late."""
        self._client: KubeClient | None = None
        self._retired: KubeClient | None = None
        self._lag = Lag()
        self._closed = False
        self._lock = asyncio.Lock()
        self._rooms: dict[tuple[str, str], asyncio.Semaphore] = {}

    async def open(self) -> None:
        """Load the library and the credentials; a second call does nothing.

        Raises SettingsError: the connection's files cannot be used.
        """
        await self._other_than(None)

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
        if self._observes and request.method != "GET":
            # No service of an observer writes. If one did, its mistake would change nothing.
            raise ApiForbidden(f"{request.what}: not sent, because this agent only observes")

        limit = BODY_LIMIT if at_most is None else at_most
        kind = (request.verb, request.resource.partition("/")[0])
        room = self._rooms.setdefault(kind, asyncio.Semaphore(IN_FLIGHT))
        with self._failures_of(request):
            async with self._lag.within(DEADLINE), room:
                answer = await self._authorized(request)
                try:
                    return await self._successful(request, answer, limit), answer.headers
                finally:
                    answer.close()

    async def fetch(self, request: ApiRequest, read: Callable[[Raw], T]) -> T:
        """Return the object in a successful answer, as read. Raises ApiError."""
        return await aside(await self.call(request), request, read)

    @contextlib.asynccontextmanager
    async def stream(self, request: ApiRequest) -> AsyncIterator["StreamReader"]:
        """Open a successful answer and yield its body as it arrives; opening takes at most 10 s.

        Raises ApiError, also when the connection breaks while the caller reads.
        """
        with self._failures_of(request), contextlib.ExitStack() as stack:
            async with self._lag.within(DEADLINE):
                answer = await self._authorized(request)
                stack.callback(answer.close)
                if answer.status // 100 != 2:
                    await self._successful(request, answer, BODY_LIMIT)

            if answer.connection and answer.connection.transport:  # the answer has not ended
                # A NAT or a load balancer that forgets the connection tells nobody, and an idle
                # watch would wait for minutes: the kernel finds out.
                found = answer.connection.transport.get_extra_info("socket")
                found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in KEEPALIVE:
                    found.setsockopt(socket.IPPROTO_TCP, option, value)

            yield answer.content

    async def execute(self, request: ApiRequest) -> Executed:
        """Run a command in a container and return what it wrote, as `kubectl exec` does.

        `request`: to exec of the pod, with container and command. Raises ApiError: no answer in
        EXECUTION, more than 10 MiB, or a server that refuses.
        """
        written = defaultdict[int, bytearray](bytearray)
        with self._failures_of(request):
            client = await self._other_than(None)
            try:
                async with (
                    self._lag.within(EXECUTION),
                    client.rest.pool_manager.ws_connect(
                        client.configuration.host + request.path,
                        params=request.query,
                        headers=await self._identity(client),
                        protocols=(EXEC_PROTOCOL,),
                        proxy=client.rest.proxy,
                        proxy_headers=client.rest.proxy_headers,
                        server_hostname=client.rest.server_hostname,
                    ) as answer,
                ):
                    async for frame in answer:
                        if isinstance(frame.data, bytes) and frame.data:
                            written[frame.data[0]] += frame.data[1:]
                        if sum(map(len, written.values())) > BODY_LIMIT:
                            raise ApiError(f"{request.what}: the answer is longer than 10 MiB")
            except TimeoutError as error:
                text = f"{request.what}: the command has not ended within {EXECUTION:g} s"
                raise ApiError(text) from error
            except client.library.aiohttp.WSServerHandshakeError as error:
                # A handshake loses the text of its answer: without one the server refuses alike.
                await self.call(request)
                raise ApiError(f"{request.what}: the server opens no websocket: {error}") from error

        return _executed(request, written)

    async def _authorized(self, request: ApiRequest) -> "ClientResponse":
        """Send the request; after a 401 or a TLS error, once more with fresh credentials."""
        client, answer = await self._other_than(None), None
        with contextlib.suppress(client.library.aiohttp.ClientSSLError):
            answer = await self._send(client, request)

        if answer is not None:
            if answer.status != UNAUTHORIZED:
                return answer
            answer.close()

        client = await self._other_than(client, tls=answer is None)
        return await self._send(client, request)

    async def _send(self, client: KubeClient, request: ApiRequest) -> "ClientResponse":
        code = "none"
        try:
            headers = {"Accept": request.accept, "Content-Type": request.content_type}
            headers |= await self._identity(client)
            answer: ClientResponse = await client.rest.request(
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

    async def _identity(self, client: KubeClient) -> dict[str, str]:
        headers = {"User-Agent": f"{self._program}/{__version__}"}
        token = await client.configuration.get_api_key_with_prefix("BearerToken")
        return headers | {"Authorization": token} if token else headers

    async def _successful(
        self, request: ApiRequest, answer: "ClientResponse", at_most: int
    ) -> bytearray:
        body = bytearray()
        while len(body) <= at_most and (chunk := await answer.content.readany()):
            body += chunk

        self.received.add(request.resource, amount=len(body))
        if len(body) > at_most:
            text = f"{request.what}: the answer is longer than {at_most >> 20} MiB"
            beginning = bytes(body[:BEGINNING])
            body.clear()  # what handles the error keeps this frame until the next collection
            raise AnswerTooLong(text, beginning)

        if answer.status // 100 == 2:
            return body
        raise refused(request.what, answer.status, bytes(body), answer.headers.get("Retry-After"))

    async def _other_than(self, refused: KubeClient | None, *, tls: bool = False) -> KubeClient:
        """The present client; if it is `refused`, a new one with credentials that are read again.

        `tls`: the connection failed, not the identity. The client before the new one stays open,
        so open watches keep their connection. Raises SettingsError; ApiError: it is closed.
        """
        present = self._client
        if present is not None and present is not refused:
            return present  # no other request waits for a renewal, which may take seconds

        async with self._lock:
            if self._closed:
                raise ConnectionError("the session was closed")
            old = self._client
            if old is not None and old is not refused:
                return old

            library = old.library if old else await asyncio.to_thread(load)
            self._failures = (OSError, SettingsError, *library.errors)
            configuration = await configure(library, self._connection)
            # A token is sent with each request. Only a client certificate, as an identity, needs
            # another TLS context: a server that does not accept it answers 401, too.
            if old is not None and not tls and not configuration.cert_file:
                self._client = KubeClient(library, configuration, old.rest)
                return self._client

            try:
                rest = library.rest.RESTClientObject(configuration)
            except (OSError, ValueError) as error:  # invalid certificates
                raise unusable(self._connection, error) from error

            # The library's own HTTP session reads proxy variables and .netrc, on two threads,
            # before every request.
            theirs = rest.pool_manager
            rest.pool_manager = library.aiohttp.ClientSession(connector=theirs.connector)
            theirs.detach()
            client = self._client = KubeClient(library, configuration, rest)
            retired, self._retired = self._retired, old
            if retired is not None:
                await retired.rest.close()

        event = "kube.credentials_renewed" if old else "kube.opened"
        log.info(event, server=configuration.host, source=self._connection.source)
        return client

    @contextlib.contextmanager
    def _failures_of(self, request: ApiRequest) -> Iterator[None]:
        """Turn what the libraries raise in this block into an ApiError that names the request."""
        try:
            yield
        except self._failures as error:
            if isinstance(error, SettingsError):
                raise ApiError(f"{request.what}: {error}") from error
            reason = cap(str(error) or type(error).__name__, 160)
            raise ApiError(
                f"{request.what}: no answer from the API server ({reason}); reached through "
                f"{self._connection.source}"
            ) from error


async def aside(body: bytes | bytearray, request: ApiRequest, read: Callable[[Raw], T]) -> T:
    """Return `read(body)`; for a body of more than 1 MiB, run it on a thread.

    Raises ApiError, which names the request, for a MalformedText of `read`.
    """
    try:
        return await asyncio.to_thread(read, body) if len(body) > OFF_LOOP else read(body)
    except MalformedText as error:
        raise ApiError(f"{request.what}: {error}") from error


def _executed(request: ApiRequest, written: defaultdict[int, bytearray]) -> Executed:
    """What a command wrote by channel; the last channel has a Status. Raises ApiError: it broke."""
    try:
        status = read_object(written[3])
    except MalformedText as error:
        raise ApiError(f"{request.what}: it ended without a result") from error

    said = text_in(status, "message") or text_in(status, "reason") or "it failed"
    failure = "" if text_in(status, "status") == "Success" else cap(said)
    err = bytes(written[2]).decode(errors="replace")
    return Executed(bytes(written[1]), err, failure)
