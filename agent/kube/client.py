"""The client of the API server: the connection, requests, lists and watches, and their JSON."""

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import os
import random
import re
import socket
import ssl
import stat
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar
from urllib.parse import quote

import msgspec
import structlog
import yaml

from agent import __version__, errors
from agent.errors import ApiError, MalformedText, SettingsError, cap
from agent.kit.timing import Lag, Tally

if TYPE_CHECKING:  # loaded by the first request
    from aiohttp import ClientResponse

log = structlog.get_logger(__name__)

T = TypeVar("T")

WRITER: Final = "hami-agent"
"""The agent's field manager (its User-Agent up to the slash), and the component of its Events."""

# Reads JSON of the API server; of a list and of a watch one object at a time.

Raw = bytes | bytearray | msgspec.Raw
MOST_OBJECTS: Final = 150_000
"""In a list: Kubernetes supports so many pods, and fewer of every other kind that is listed."""


class _ListMeta(msgspec.Struct, frozen=True):
    """The metadata of a page. `rest`: the token for the next page, empty for none."""

    version: str = msgspec.field(default="", name="resourceVersion")
    rest: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct):
    metadata: _ListMeta
    items: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MOST_OBJECTS)] | None = None


class _Frame(msgspec.Struct):
    type: str
    object: msgspec.Raw


def read_object(body: Raw) -> Mapping[str, Any]:
    """Read an object. Raises MalformedText."""
    return _read(dict[str, Any], body, "it is not a JSON object")


def _read(form: type[T], body: Raw, otherwise: str) -> T:
    try:
        return msgspec.json.decode(body, type=form)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedText(otherwise) from error


def inside(parent: Mapping[str, object], *keys: str) -> Mapping[str, object]:
    """The object below these keys, one below the other; an empty one if there is none."""
    for key in keys:
        value = parent.get(key)
        parent = value if isinstance(value, Mapping) else {}
    return parent


def text_in(parent: Mapping[str, object], *keys: str) -> str:
    """The text below these keys; empty if there is none."""
    value = inside(parent, *keys[:-1]).get(keys[-1])
    return value if isinstance(value, str) else ""


def objects_in(parent: Mapping[str, object], *keys: str) -> tuple[Mapping[str, object], ...]:
    """The objects of the list below these keys; none if there is no list."""
    value = inside(parent, *keys[:-1]).get(keys[-1])
    items = value if isinstance(value, list | tuple) else ()
    return tuple(item for item in items if isinstance(item, Mapping))


def texts_in(parent: Mapping[str, object], *keys: str) -> dict[str, str]:
    """The texts of the object below these keys, by their own keys."""
    return {key: text for key, text in inside(parent, *keys).items() if isinstance(text, str)}


# Where the API server is and who we are there: a kubeconfig, or the service account of a pod.

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
IN_POD = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
LIBRARY = "kubernetes_asyncio"
UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
"""The errors that the library's loader raises for a file of another shape."""


class Connection(msgspec.Struct, frozen=True):
    """How to reach the API server.

    Without `kubeconfig`: in-cluster, with the files of `service_account` and the variables IN_POD
    of `environment`. `context`: that of the kubeconfig; empty for its current one. `remedy`: what
    to do where a file of it cannot be used.
    """

    kubeconfig: Path | None = None
    service_account: Path = SERVICE_ACCOUNT
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    context: str = ""
    remedy: str = (
        "give the path of a readable kubeconfig for this node; inside a pod with a service account "
        "give none"
    )

    @property
    def source(self) -> str:
        """The file or directory that describes the connection, for messages."""
        return str(self.kubeconfig or self.service_account)


class Access(msgspec.Struct, frozen=True):
    """What requests need of the connection's files.

    - `configuration`: the library's, which renews a token that is about to expire.
    - `transport`: TLS and proxy, as aiohttp takes them. `aiohttp`: the module, loaded late.
    - `failures`: what the libraries raise where no answer comes.
    """

    configuration: Any
    transport: Mapping[str, Any]
    aiohttp: Any
    failures: tuple[type[Exception], ...]


def check(connection: Connection) -> None:
    """Check the files of the connection, without a library or the network. Raises SettingsError."""
    if connection.kubeconfig is not None:
        _read_context(connection, connection.kubeconfig)
    elif all(map(connection.environment.get, IN_POD)):
        for name in ("token", "ca.crt"):
            _text(connection, connection.service_account / name)
    else:
        raise SettingsError(
            "no kubeconfig is set and this is not a pod (KUBERNETES_SERVICE_HOST is unset)",
            remedy="set node.kubeconfig to the kubeconfig of this node",
        )


def default_namespace(connection: Connection) -> str:
    """That of the context or of this pod, like kubectl; else `default`. Raises SettingsError."""
    if connection.kubeconfig is not None:
        context = _read_context(connection, connection.kubeconfig)
        return text_in(context, "namespace") or "default"
    own = connection.service_account / "namespace"
    return _text(connection, own).strip() if os.access(own, os.F_OK) else "default"


def _read_context(connection: Connection, path: Path) -> Mapping[str, object]:
    """The context in the kubeconfig. Raises SettingsError."""
    try:
        content: object = yaml.safe_load(_text(connection, path))
    except (yaml.YAMLError, ValueError):  # ValueError: a date such as 2026-13-32
        # Not the text of the error: a kubeconfig holds secrets.
        raise _unusable(connection, "is not YAML") from None

    parts = content if isinstance(content, dict) else {}
    name = connection.context or text_in(parts, "current-context")
    for entry in objects_in(parts, "contexts"):
        if name and text_in(entry, "name") == name:
            return inside(entry, "context")
    missing = f"context {cap(name, 64)}" if name else "current-context"
    raise _unusable(connection, f"has no {missing}")


def _text(connection: Connection, path: Path) -> str:
    """The text of one of the connection's files. Raises SettingsError."""
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return path.read_text(encoding="utf-8")
        reason = "is not a regular file"  # a pipe may block for ever
    except (OSError, UnicodeDecodeError) as error:
        # In the system's words, without the path.
        reason = f"cannot be read ({cap(str(getattr(error, 'strerror', None) or error), 128)})"
    raise _unusable(connection, reason, path)


def _unusable(connection: Connection, reason: str, path: Path | None = None) -> SettingsError:
    """The error for a file of the connection. `path`: which, if it has several."""
    return SettingsError(f"{path or connection.source}: {reason}", remedy=connection.remedy)


def load() -> None:
    """Import aiohttp, and kubernetes_asyncio without its 900 model modules. Blocks for 0.1 s."""
    if LIBRARY not in sys.modules:
        # The files of these packages import everything; only Basic authentication, which no
        # Kubernetes since 1.19 accepts, uses urllib3.
        for name in (LIBRARY, f"{LIBRARY}.client", "urllib3"):
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise ImportError(f"{name} is not installed; install kubernetes-asyncio")
            sys.modules[name] = importlib.util.module_from_spec(spec)

        # The two names that the library itself takes from them; the first only for annotations.
        module = importlib.import_module(f"{LIBRARY}.client.configuration")
        names = {"ApiClient": object, "Configuration": module.Configuration}
        vars(sys.modules[f"{LIBRARY}.client"]).update(names)

    for name in ("aiohttp", f"{LIBRARY}.config.kube_config"):
        importlib.import_module(name)


async def open_access(connection: Connection) -> Access:
    """Read the files of the connection. Raises SettingsError: they cannot be used."""
    check(connection)
    await asyncio.to_thread(load)
    aiohttp = importlib.import_module("aiohttp")
    kube_config = importlib.import_module(f"{LIBRARY}.config.kube_config")
    failures = (
        *(OSError, SettingsError, kube_config.ConfigException),  # TimeoutError is an OSError
        *(aiohttp.ClientError, aiohttp.http_exceptions.LineTooLong),
    )
    known = importlib.import_module(f"{LIBRARY}.client.configuration").Configuration()
    known.host = ""  # a kubeconfig may name no server, and localhost gets no token

    try:
        if connection.kubeconfig is None:
            importlib.import_module(f"{LIBRARY}.config.incluster_config").load_incluster_config(
                known,
                token_filename=str(connection.service_account / "token"),
                cert_filename=str(connection.service_account / "ca.crt"),
                environ=dict(connection.environment),
            )
        else:
            await kube_config.load_kube_config(
                config_file=str(connection.kubeconfig),
                context=connection.context or None,
                client_configuration=known,
                persist_config=False,
            )

        # TLS as RESTClientObject of the library sets it up.
        tls = ssl.create_default_context(cafile=known.ssl_ca_cert)
        if known.cert_file:
            tls.load_cert_chain(known.cert_file, keyfile=known.key_file)
        if not known.verify_ssl:
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    # failures: also of an identity provider of the kubeconfig that does not answer
    except (*failures, *UNUSABLE) as error:
        reason = str(error) or type(error).__name__
        raise _unusable(connection, f"cannot be used ({cap(reason, 128)})") from error

    if not known.host:
        raise _unusable(connection, "names no server for its current-context")
    transport = {"ssl": tls, "server_hostname": known.tls_server_name, "proxy": known.proxy}
    return Access(known, transport, aiohttp, failures)


# Requests and watches.

DEADLINE = 10.0
CONNECTIONS = 16
"""Two watches, and two requests of each of the seven verbs and resources that the agent uses."""
IN_FLIGHT = 2
"""Requests at a time for one verb and resource; watches do not count. A request that hangs delays
no other kind: a GET in an Allocate, which has 0.15 s, waits for no LIST or PATCH."""
BODY_LIMIT = 20 * 1024 * 1024
"""Bytes of an answer, and of a frame of a watch. Any one object fits: kube-apiserver takes at most
3 MiB of it (MaxRequestBodyBytes), and JSON may write `<` with six characters."""
OFF_LOOP = 1024 * 1024
"""Bytes: longer bodies are decoded on a thread."""
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""An idle connection of a watch is asked after 10 s, and given up after 15 s without an answer."""

SHORTEST, LONGEST = 300.0, 600.0
"""Seconds between which the server ends a watch, at random."""
SILENCE = 150.0
"""Seconds without a byte, after which a watch is dead: an idle server sends bookmarks sooner."""
OPENED = "OPENED"
"""The kind of a first frame, without an object, that the agent adds: the watch is open."""

MERGE_PATCH = "application/merge-patch+json"
EXECUTION = 60.0
"""Seconds for a command in a container: `doctor` waits 34 s for peers of which none answers."""
EXEC_PROTOCOL = "v4.channel.k8s.io"
"""Binary frames whose first byte is the channel: 1 output, 2 errors, 3 the result (Status)."""


class AnswerTooLong(ApiError):  # noqa: N818 -- the answer is
    """The body of an answer is longer than the caller allows."""


class ApiRequest(msgspec.Struct, frozen=True):
    """One request. `verb` and `resource` are Kubernetes' terms (list, pods/status)."""

    verb: str
    resource: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    body: Mapping[str, object] | Sequence[object] | None = None
    content_type: str = "application/json"
    accept: str = "application/json"

    def asking(self, **options: str) -> "ApiRequest":
        """The same request with these options, but for empty ones, in its query."""
        query = (*self.query, *((key, text) for key, text in options.items() if text))
        return msgspec.structs.replace(self, query=query)

    @property
    def method(self) -> str:
        """The HTTP method."""
        return {"create": "POST", "patch": "PATCH"}.get(self.verb, "GET")

    @property
    def what(self) -> str:
        """The request in words, for messages."""
        return f"{self.verb} {self.resource} ({self.path})"


def path_of(*segments: str) -> str:
    """The path below /api/v1 with these segments, each quoted."""
    return "/".join(("/api/v1", *(quote(segment, safe="") for segment in segments)))


CLASSES: Mapping[int, type[ApiError]] = {
    401: errors.ApiForbidden,
    403: errors.ApiForbidden,
    404: errors.ApiNotFound,
    409: errors.ApiConflict,
    410: errors.ApiGone,
    422: errors.ApiInvalid,
    429: errors.ApiThrottled,
}


def refused(what: str, status: int, body: Raw = b"", retry_after: str | None = None) -> ApiError:
    """The error for an answer with `status`; `what` is the request, like `patch nodes node-a`."""
    kind = CLASSES.get(status, ApiError)
    try:
        message = text_in(read_object(body), "message")
    except MalformedText:
        # A proxy may answer in HTML: its 404 says nothing of pods and Nodes.
        message = bytes(body)[:1024].decode(errors="replace")
        kind = ApiError if status == 404 else kind

    # client-go does not read its date form either (retryAfterSeconds).
    digits = (retry_after or "").strip()
    is_number = digits.isascii() and digits.isdigit()
    text = f"{what}: the API server answered {status}" + (f": {cap(message)}" if message else "")
    return kind(text, status=status, retry_after=min(float(digits), 3600.0) if is_number else None)


class KubeSession:
    """The connection to one API server; the first request opens it.

    If it `observes`, it sends no request that writes. `program`: the client's name, which the API
    server records as field manager. `requests` counts answers.
    """

    def __init__(
        self,
        connection: Connection,
        random: random.Random,
        program: str = WRITER,
        *,
        observes: bool = False,
    ) -> None:
        self.requests = Tally(
            "api_requests_total",
            "Requests to the API server by the code of the answer (none: no answer).",
            ("verb", "resource", "code"),
        )
        self.random = random
        self._connection = connection
        self._program = program
        self._observes = observes
        self._access: Access | None = None
        self._http: Any = None
        """aiohttp's ClientSession: it keeps connections apart by their TLS context."""
        self._failures: tuple[type[Exception], ...] = (OSError, SettingsError)
        """What becomes an ApiError; TimeoutError is an OSError. The libraries are loaded late."""
        self._is_closed = False
        self.skip: Callable[[str], None] = functools.lru_cache(REMEMBERED)(
            lambda why: log.error("kube.object_skipped", err=why)
        )
        """Says once for each text that an object of a list or watch is left out."""
        self._lag = Lag()
        self._lock = asyncio.Lock()
        self._rooms = defaultdict[tuple[str, str], asyncio.Semaphore](
            lambda: asyncio.Semaphore(IN_FLIGHT)
        )

    async def close(self) -> None:
        """End all connections; a second call does nothing."""
        self._is_closed, self._access = True, None
        if self._http is not None:
            await self._http.close()

    async def call(self, request: ApiRequest, at_most: int = BODY_LIMIT) -> bytearray:
        """Return the body of a successful answer, within 10 s. Raises ApiError.

        Raises AnswerTooLong for more than `at_most` bytes.
        """
        if self._observes and request.method != "GET":
            raise errors.ApiForbidden(f"{request.what}: not sent, because this agent only observes")

        room = self._rooms[request.verb, request.resource.partition("/")[0]]
        with self._failures_of(request):
            async with self._lag.within(DEADLINE), room:
                with contextlib.closing(await self._answer(request)) as answer:
                    return await self._body(request, answer, at_most)

    async def fetch(self, request: ApiRequest, read: Callable[[Raw], T]) -> T:
        """Return the object in a successful answer, as read. Raises ApiError."""
        return await aside(await self.call(request), request, read)

    async def watch(
        self, request: ApiRequest, read: Callable[[str, Raw], T]
    ) -> AsyncIterator[tuple[str, T | None]]:
        """Yield OPENED, then frames until the server ends the watch or is silent for too long.

        A frame is its kind (ADDED, MODIFIED, DELETED or BOOKMARK) and its object as read by `read`.
        Raises ApiError: an ERROR frame, a broken connection, or a MalformedText of `read`.
        """

        def decode(line: Raw) -> tuple[str, T]:
            frame = _read(_Frame, line, "a frame of the watch has no type or no object")
            if frame.type == "ERROR":
                code = read_object(frame.object).get("code")
                raise refused(request.what, code if isinstance(code, int) else 0, frame.object)
            return frame.type, read(frame.type, frame.object)

        lasts = str(round(self.random.uniform(SHORTEST, LONGEST)))
        request = request.asking(watch="1", allowWatchBookmarks="true", timeoutSeconds=lasts)
        with self._failures_of(request), contextlib.ExitStack() as stack:
            async with self._lag.within(DEADLINE):
                answer = stack.enter_context(contextlib.closing(await self._answer(request)))
            if answer.connection and answer.connection.transport:  # the answer has not ended
                # A NAT that forgets the connection tells nobody: the kernel finds out.
                for option in KEEPALIVE:
                    answer.connection.transport.get_extra_info("socket").setsockopt(*option)

            yield OPENED, None
            while True:
                try:
                    async with asyncio.timeout(SILENCE):
                        line = await answer.content.readuntil(b"\n", max_size=BODY_LIMIT)
                except TimeoutError:
                    log.info("kube.watch_silent", resource=request.resource, silence=SILENCE)
                    return

                if not line.endswith(b"\n"):  # the watch has ended
                    return
                if line.strip():
                    yield await aside(line, request, decode)

    async def execute(self, request: ApiRequest) -> bytes:
        """Run a command in a container, as `kubectl exec` does, and return its output.

        Raises ApiError: no output in EXECUTION, more than BODY_LIMIT, or a server that refuses.
        """
        written = defaultdict[int, bytearray](bytearray)

        async def require_upgrade(answer: "ClientResponse") -> None:
            # The error that aiohttp raises has the status alone.
            if answer.status != 101:
                raise await self._refused(request, answer)

        with self._failures_of(request):
            access = await self.open()
            async with (
                self._lag.within(EXECUTION),
                access.aiohttp.ClientSession(raise_for_status=require_upgrade) as http,
                http.ws_connect(
                    access.configuration.host + request.path,
                    params=request.query,
                    headers=await self._identity(access),
                    protocols=(EXEC_PROTOCOL,),
                    **access.transport,
                ) as answer,
            ):
                async for frame in answer:
                    if isinstance(frame.data, bytes) and frame.data:
                        written[frame.data[0]] += frame.data[1:]
                    if sum(map(len, written.values())) > BODY_LIMIT:
                        raise ApiError(f"{request.what}: the answer is longer than 20 MiB")

        if not written[1]:
            said = (written[2] or written[3]).decode(errors="replace").strip()
            raise ApiError(f"{request.what}: {cap(said) or 'the command wrote nothing'}")
        return bytes(written[1])

    async def _answer(self, request: ApiRequest) -> "ClientResponse":
        """The successful answer; after a 401 or a TLS error, of a try with fresh credentials."""
        access = await self.open()
        with contextlib.suppress(access.aiohttp.ClientSSLError):
            try:
                return await self._send(access, request)
            except errors.ApiForbidden as error:
                if error.status != 401:
                    raise
        return await self._send(await self.open(access), request)

    async def _send(self, access: Access, request: ApiRequest) -> "ClientResponse":
        """Send the request once. Raises ApiError: the answer is no success."""
        code = "none"
        try:
            headers = {"Accept": request.accept, "Content-Type": request.content_type}
            answer: ClientResponse = await self._http.request(
                request.method,
                access.configuration.host + request.path,
                params=request.query,
                headers=headers | await self._identity(access),
                json=request.body,
                **access.transport,
            )
            code = str(answer.status)
        finally:
            self.requests.add(request.verb, request.resource, code)

        if answer.status // 100 == 2:
            return answer
        raise await self._refused(request, answer)

    async def _refused(self, request: ApiRequest, answer: "ClientResponse") -> ApiError:
        """The error for an answer that is no success, with the server's words."""
        with contextlib.closing(answer):
            body = await self._body(request, answer, BODY_LIMIT)
        return refused(request.what, answer.status, body, answer.headers.get("Retry-After"))

    async def _identity(self, access: Access) -> dict[str, str]:
        headers = {"User-Agent": f"{self._program}/{__version__}"}
        token = await access.configuration.get_api_key_with_prefix("BearerToken")
        return headers | {"Authorization": token} if token else headers

    async def _body(self, request: ApiRequest, answer: "ClientResponse", at_most: int) -> bytearray:
        """The body of the answer. Raises AnswerTooLong."""
        body = bytearray()
        while len(body) <= at_most and (chunk := await answer.content.readany()):
            body += chunk

        if len(body) > at_most:
            body.clear()  # what handles the error keeps this frame until the next collection
            raise AnswerTooLong(f"{request.what}: the answer is longer than {at_most >> 20} MiB")
        return body

    async def open(self, used: Access | None = None) -> Access:
        """Return the present access; if it is the `used` one, a new one from the files.

        Watches and requests that run keep their connections. Raises SettingsError; ConnectionError:
        the session is closed.
        """
        if self._access is not None and self._access is not used:
            return self._access  # no other request waits for a renewal, which may take seconds

        async with self._lock:
            if self._is_closed:
                raise ConnectionError("the session was closed")
            if self._access is None or self._access is used:
                self._access = access = await open_access(self._connection)
                self._failures = access.failures
                if self._http is None:
                    # The library's own session reads .netrc on a thread before every request.
                    self._http = access.aiohttp.ClientSession(
                        connector=access.aiohttp.TCPConnector(limit=CONNECTIONS),
                        timeout=access.aiohttp.ClientTimeout(),
                    )
                event = "kube.credentials_renewed" if used else "kube.opened"
                log.info(event, server=access.configuration.host, source=self._connection.source)
            return self._access

    @contextlib.contextmanager
    def _failures_of(self, request: ApiRequest) -> Iterator[None]:
        """Turn what the libraries raise in this block into an ApiError that names the request."""
        try:
            yield
        except self._failures as error:
            # aiohttp names its TLS context, as in "host a:443 ssl:<ssl.SSLContext object at 0x7f>".
            reason = re.sub(r" ssl:(<[^>]*>|\w+)", "", str(error)) or type(error).__name__
            text = f"no answer from the API server ({cap(reason, 160)})"
            through = f"reached through {self._connection.source}"
            raise ApiError(f"{request.what}: {text}; {through}") from error


async def aside(body: bytes | bytearray, request: ApiRequest, read: Callable[[Raw], T]) -> T:
    """Return `read(body)`, for a long body by a thread. Raises ApiError for its MalformedText."""
    try:
        return await asyncio.to_thread(read, body) if len(body) > OFF_LOOP else read(body)
    except MalformedText as error:
        raise ApiError(f"{request.what}: {error}") from error


# Lists in pages.

PAGE_LIMIT = 8 * 1024 * 1024
"""Bytes of an answer with several objects; an answer with one object may have BODY_LIMIT."""
MOST: Final = 500
"""Objects in an answer, as in kubectl. The agent's first request asks for all (0): servers 1.31 to
1.33 answer that from their cache by the pods' node, and for a page read every pod of the cluster
(kubernetes apiserver/pkg/storage/cacher/delegator.go, shouldDelegateList)."""
REMEMBERED: Final = 256
"""Texts about objects that cannot be used, each of which is logged once."""
FEWER: Final = 8
"""A list asks for this fraction of the objects after an answer that was too long."""
LIST_LIMIT: Final = 1 << 30
LEAST_PAGE: Final = 1 << 16
"""Bytes of all answers of a list, and what an answer counts at least, so that small ones end."""


async def fetch_list(
    session: KubeSession, request: ApiRequest, read: Callable[[Raw], T], most: int = 0
) -> tuple[str, list[T]]:
    """Return the version and all objects, as read; each answer has 10 s. Raises ApiError.

    `most`: how many objects an answer may have at first; 0 for all. After a too long answer it asks
    for fewer with the same token, as test/e2e/apimachinery/chunking.go does; after a short one, for
    more.
    """
    objects: list[T] = []
    limit, version, rest, size = most, "", "", 0
    while True:
        page = request.asking(limit=str(limit or ""), **{"continue": rest})
        try:
            body = await session.call(page, BODY_LIMIT if limit == 1 else PAGE_LIMIT)
        except AnswerTooLong:
            if limit == 1:
                raise
            limit = max(1, (limit or MOST) // FEWER)
            continue

        meta, items = await aside(body, page, functools.partial(_read_items, read, session.skip))
        objects += items
        version = version or meta.version
        if not meta.rest:
            return version, objects

        # The real server fills each answer (apiserver/pkg/storage/etcd3/store.go, GetList).
        size += max(len(body), LEAST_PAGE)
        if not items or meta.rest == rest or size > LIST_LIMIT:
            raise ApiError(
                f"{request.what}: the list has no end: after {len(objects)} objects the server "
                "still promises more; check the API server and the proxies before it"
            )
        rest = meta.rest
        if len(body) < PAGE_LIMIT // FEWER // 2:
            limit = min(limit * FEWER, MOST)


def _read_items(
    read: Callable[[Raw], T], skip: Callable[[str], None], body: Raw
) -> tuple[_ListMeta, list[T]]:
    page = _read(_Page, body, "it is not a list of objects")
    if not page.metadata.version:
        raise MalformedText("the list has no resourceVersion")

    items, odd = list[T](), list[str]()
    for raw in page.items or ():
        try:
            items.append(read(raw))
        except MalformedText as error:
            odd.append(str(error))

    # One object must not hide the others. If none can be read, this is no such list: an empty one
    # would mean that all pods are gone.
    if odd and not items:
        raise MalformedText(odd[0])
    for text in odd:
        skip(text)
    return page.metadata, items
