"""The client of the API server: requests, lists, watches, this Node and the pods of its node."""

import asyncio
import contextlib
import functools
import random
import re
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

import msgspec
import structlog

from agent import __version__, errors
from agent.cluster import NodeCondition, NodeView, PodChange, PodList, PodUid, PodView
from agent.errors import ApiError, ApiNotFound, MalformedText, SettingsError, cap
from agent.hami.annotations import encode_stamp
from agent.kit.timing import Lag, Tally
from agent.kube.connection import Access, Connection, open_access
from agent.kube.objects import (
    MOST_OBJECTS,
    WRITER,
    ListMeta,
    Raw,
    decode_node,
    decode_pod,
    read_frame,
    read_object,
    read_page,
    text_in,
)

if TYPE_CHECKING:  # loaded by the first request
    from aiohttp import ClientResponse

log = structlog.get_logger(__name__)

DEADLINE = 10.0
CONNECTIONS = 16
"""Two watches, and two requests of each verb and resource that the agent uses.

These are get and patch of nodes, get, list and patch of pods, create and patch of events.
"""
IN_FLIGHT = 2
"""Requests at a time for one verb and resource; watches do not count.

This limits the load on a slow server. A request that hangs delays no other kind: a GET in an
Allocate, which has 0.15 s, waits for at most two other GETs of its kind and for no LIST or PATCH.
"""
BODY_LIMIT = 20 * 1024 * 1024
"""Bytes of an answer, and of a frame of a watch: any one object fits.

kube-apiserver takes at most 3 MiB of an object (MaxRequestBodyBytes), and JSON may write `<` with
six characters.
"""
OFF_LOOP = 1024 * 1024
"""Bytes: longer bodies are decoded on a thread."""
UNAUTHORIZED = 401
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
"""Seconds without a byte, after which the connection is dead: an idle server sends a bookmark after
120 s and then every 60 s."""
OPENED = "OPENED"
"""The kind of a first frame that the agent adds: the watch is open, and there is no object."""

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
"""Half the bytes of a Node, little of a pod; a server without support sends all."""
EXECUTION = 60.0
"""Seconds for a command in a container: `doctor` waits 34 s for peers of which none answers."""
EXEC_PROTOCOL = "v4.channel.k8s.io"
"""Binary frames whose first byte is the channel: 1 output, 2 errors, 3 the result (Status)."""
METHODS: Mapping[str, str] = {"create": "POST", "patch": "PATCH"}

T = TypeVar("T")


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


CLASSES: Mapping[int, type[ApiError]] = {
    401: errors.ApiForbidden,
    403: errors.ApiForbidden,
    404: ApiNotFound,
    409: errors.ApiConflict,
    410: errors.ApiGone,
    422: errors.ApiInvalid,
    429: errors.ApiThrottled,
}
REMEDIES: Mapping[int, str] = {
    401: "; renew the credentials of this node's identity",
    403: "; grant this right to the identity that asks",
}
LONGEST_RETRY_AFTER = 3600.0


def refused(what: str, status: int, body: Raw = b"", retry_after: str | None = None) -> ApiError:
    """The error for an answer with `status`; `what` is the request, like `patch nodes node-a`."""
    kind = CLASSES.get(status, ApiError)
    try:
        message = text_in(read_object(body), "message")
    except MalformedText:
        # A proxy may answer in HTML: its 404 says nothing of pods and Nodes.
        message = bytes(body)[:1024].decode(errors="replace")
        kind = ApiError if kind is ApiNotFound else kind

    # client-go does not read its date form either (retryAfterSeconds).
    digits = (retry_after or "").strip()
    is_number = digits.isascii() and digits.isdigit()
    text = f"{what}: the API server answered {status}" + (f": {cap(message)}" if message else "")
    return kind(
        text + REMEDIES.get(status, ""),
        status=status,
        retry_after=min(float(digits), LONGEST_RETRY_AFTER) if is_number else None,
    )


class Executed(msgspec.Struct, frozen=True):
    """What a command in a container wrote, and why it failed; empty: it ended with exit code 0."""

    out: bytes
    err: str
    failure: str


class KubeSession:
    """The connection to one API server; the first request opens it.

    If it `observes`, it sends no request that writes. `program`: the client's name, which the API
    server records as field manager. `requests` counts answers by verb, resource and code (`none`:
    no answer); `received` counts bytes.
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
        self.requests = Tally(
            "api_requests_total",
            "Requests to the API server by the code of the answer (none: no answer).",
            ("verb", "resource", "code"),
        )
        self.received = Tally(
            "api_received_bytes_total", "Bytes received from the API server.", ("resource",)
        )
        self.limits: dict[ApiRequest, int] = {}
        """How many objects the next answer to a long list may have."""
        self.date = ""
        """The time in the last answer, as its header has it."""
        self._connection = connection
        self._program = program
        self._observes = observes
        self._access: Access | None = None
        self._http: Any = None
        """aiohttp's ClientSession: it keeps connections apart by their TLS context."""
        self._failures: tuple[type[Exception], ...] = (OSError, SettingsError)
        """What becomes an ApiError; TimeoutError is an OSError. The libraries are loaded late."""
        self._is_closed = False
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
            # No service of an observer writes. If one did, its mistake would change nothing.
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

        A frame is its kind (ADDED, MODIFIED, DELETED or BOOKMARK) and its object as read. `read`
        gets the kind and the object; for long ones it runs on a thread. Raises ApiGone and other
        ApiErrors: for an ERROR frame, a broken connection, or a MalformedText of `read`.
        """

        def decode(line: Raw) -> tuple[str, T]:
            kind, obj = read_frame(line)
            if kind == "ERROR":
                code = read_object(obj).get("code")
                raise refused(request.what, code if isinstance(code, int) else 0, obj)
            return kind, read(kind, obj)

        seconds = str(round(self.random.uniform(SHORTEST, LONGEST)))
        options = (("watch", "1"), ("allowWatchBookmarks", "true"), ("timeoutSeconds", seconds))
        request = msgspec.structs.replace(request, query=(*request.query, *options))

        with self._failures_of(request), contextlib.ExitStack() as stack:
            async with self._lag.within(DEADLINE):
                answer = stack.enter_context(contextlib.closing(await self._answer(request)))
            if answer.connection and answer.connection.transport:  # the answer has not ended
                # A NAT or a load balancer that forgets the connection tells nobody, and an idle
                # watch would wait for minutes: the kernel finds out.
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
                self.received.add(request.resource, amount=len(line))
                if line.strip():
                    yield await aside(line, request, decode)

    async def execute(self, request: ApiRequest) -> Executed:
        """Run a command in a container and return what it wrote, as `kubectl exec` does.

        `request`: to exec of the pod, with container and command. Raises ApiError: no answer in
        EXECUTION, more than BODY_LIMIT, or a server that refuses.
        """
        written = defaultdict[int, bytearray](bytearray)
        with self._failures_of(request):
            access = await self.open()
            try:
                async with (
                    self._lag.within(EXECUTION),
                    self._http.ws_connect(
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
            except TimeoutError as error:
                text = f"{request.what}: the command has not ended within {EXECUTION:g} s"
                raise ApiError(text) from error
            except access.aiohttp.WSServerHandshakeError as error:
                # A handshake loses the text of its answer: without one the server refuses alike.
                await self.call(request)
                raise ApiError(f"{request.what}: the server opens no websocket: {error}") from error

        try:
            status = read_object(written[3])
        except MalformedText as error:
            raise ApiError(f"{request.what}: it ended without a result") from error
        said = text_in(status, "message") or text_in(status, "reason") or "it failed"
        failure = "" if text_in(status, "status") == "Success" else cap(said)
        return Executed(bytes(written[1]), written[2].decode(errors="replace"), failure)

    async def _answer(self, request: ApiRequest) -> "ClientResponse":
        """The successful answer; after a 401 or a TLS error, of a try with fresh credentials."""
        access = await self.open()
        with contextlib.suppress(access.aiohttp.ClientSSLError):
            try:
                return await self._send(access, request)
            except errors.ApiForbidden as error:
                if error.status != UNAUTHORIZED:
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
        with contextlib.closing(answer):
            body = await self._body(request, answer, BODY_LIMIT)
        raise refused(request.what, answer.status, body, answer.headers.get("Retry-After"))

    async def _identity(self, access: Access) -> dict[str, str]:
        headers = {"User-Agent": f"{self._program}/{__version__}"}
        token = await access.configuration.get_api_key_with_prefix("BearerToken")
        return headers | {"Authorization": token} if token else headers

    async def _body(self, request: ApiRequest, answer: "ClientResponse", at_most: int) -> bytearray:
        """The body of the answer. Raises AnswerTooLong."""
        body = bytearray()
        while len(body) <= at_most and (chunk := await answer.content.readany()):
            body += chunk

        self.received.add(request.resource, amount=len(body))
        self.date = answer.headers.get("Date", "")
        if len(body) > at_most:
            body.clear()  # what handles the error keeps this frame until the next collection
            raise AnswerTooLong(f"{request.what}: the answer is longer than {at_most >> 20} MiB")
        return body

    async def open(self, used: Access | None = None) -> Access:
        """Return the present access; if it is the `used` one, a new one from the files.

        Watches and requests that run keep their connections. Raises SettingsError: the connection's
        files cannot be used; ConnectionError: the session is closed.
        """
        if self._access is not None and self._access is not used:
            return self._access  # no other request waits for a renewal, which may take seconds

        async with self._lock:
            if self._is_closed:
                raise ConnectionError("the session was closed")
            if self._access is not None and self._access is not used:
                return self._access

            access = self._access = await open_access(self._connection)
            self._failures = access.failures
            if self._http is None:
                # The library's own session reads proxy variables and .netrc, on two threads,
                # before every request.
                self._http = access.aiohttp.ClientSession(
                    connector=access.aiohttp.TCPConnector(limit=CONNECTIONS),
                    timeout=access.aiohttp.ClientTimeout(),
                )

        event = "kube.credentials_renewed" if used else "kube.opened"
        log.info(event, server=access.configuration.host, source=self._connection.source)
        return access

    @contextlib.contextmanager
    def _failures_of(self, request: ApiRequest) -> Iterator[None]:
        """Turn what the libraries raise in this block into an ApiError that names the request."""
        try:
            yield
        except self._failures as error:
            if isinstance(error, SettingsError):
                raise ApiError(f"{request.what}: {error}") from error
            # aiohttp names its TLS context, as in "host a:443 ssl:<ssl.SSLContext object at 0x7f>".
            text = re.sub(r" ssl:(<[^>]*>|\w+)", "", str(error))
            reason = cap(text or type(error).__name__, 160)
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


# Lists in pages.

PAGE_LIMIT = 8 * 1024 * 1024
"""Bytes of an answer with several objects; an answer with one object may have BODY_LIMIT."""
MOST: Final = 500
"""Objects in an answer, as in kubectl: 5,000 Nodes are 10 answers.

The agent's first request asks for all (0): servers 1.31 to 1.33 answer that from their cache by the
pods' node. They answer a page from etcd, for which they read every pod of the cluster (kubernetes
apiserver/pkg/storage/cacher/delegator.go, shouldDelegateList).
"""
FEWER: Final = 8
"""A list asks for this fraction of the objects after an answer that was too long."""
MOST_ODD: Final = 2
"""Beyond these a list has no end.

An answer is odd if it promises more and has not as many objects as were asked for. The API allows
it, but the real server fills each answer (kubernetes apiserver/pkg/storage/etcd3/store.go,
GetList).
"""
LIST_LIMIT: Final = 1 << 30
LIST_LIMIT_OF_COMMANDS: Final = 192 << 20
"""Bytes of all answers of a list: 5,000 Nodes of 20 KB and 9,000 pods of 10 KB are 190 MB."""
LEAST_OBJECT: Final = LIST_LIMIT // MOST_OBJECTS
"""Bytes that an object counts at least, 7 KB, so that small ones without end come to an end."""


async def fetch_list(
    session: KubeSession,
    request: ApiRequest,
    read: Callable[[Raw], T],
    most: int = 0,
    list_limit: int = LIST_LIMIT,
) -> tuple[str, list[T]]:
    """Return the version and all objects, as read; each answer has 10 s. Raises ApiError.

    After a too long answer it asks again for fewer objects, with the same token (the server accepts
    another `limit`, as its own test does: test/e2e/apimachinery/chunking.go); after a short one it
    asks for more. `most`: how many objects a small list asks for at first; 0 for all.
    """
    objects: list[T] = []
    limit = session.limits.get(request, most)
    version, rest, odd, size = "", "", 0, 0
    while True:
        options = (("limit", str(limit or "")), ("continue", rest))
        query = (*request.query, *(option for option in options if option[1]))
        page = msgspec.structs.replace(request, query=query)
        try:
            body = await session.call(page, BODY_LIMIT if limit == 1 else PAGE_LIMIT)
        except AnswerTooLong:
            if limit == 1:
                raise
            limit = max(1, (limit or MOST) // FEWER)
            continue

        meta, items = await aside(body, page, functools.partial(_read_items, read))
        objects += items
        version = version or meta.version
        size += len(body)
        if not meta.rest:
            break
        odd += not items or len(items) != limit
        counted = max(size, len(objects) * LEAST_OBJECT)
        if meta.rest == rest or odd > MOST_ODD or counted > list_limit:
            raise ApiError(
                f"{request.what}: the list has no end: after {len(objects)} objects the server "
                "still promises more; check the API server and the proxies before it, or ask "
                "for one namespace or node"
            )
        rest = meta.rest
        if len(body) < PAGE_LIMIT // FEWER // 2:
            limit = min(limit * FEWER, MOST)

    # After a long one the next would ask in vain again.
    session.limits[request] = most if size < PAGE_LIMIT // 2 else limit
    return version, objects


def _read_items(read: Callable[[Raw], T], body: Raw) -> tuple[ListMeta, list[T]]:
    meta, items = read_page(body)
    return meta, [read(item) for item in items]


# The ports NodeApi and PodApi over the API server.


class KubeNode:
    """This Node at the API server (port NodeApi), and its condition."""

    def __init__(self, session: KubeSession, node: str) -> None:
        self._session = session
        self._node = node
        self._path = path_of("nodes", node)

    async def watch_node(self) -> AsyncIterator[NodeView | None]:
        """Send one WATCH by name without a version: the server first sends the present Node."""
        query = (("fieldSelector", f"metadata.name={self._node}"),)
        request = ApiRequest("watch", "nodes", path_of("nodes"), query, accept=METADATA_ONLY)
        is_shown = False
        async for kind, node in self._session.watch(request, _shown):
            # A bookmark says nothing, but the first one shows that there is no Node before it.
            if kind != OPENED and not (kind == "BOOKMARK" and is_shown):
                is_shown = True
                yield node

    async def get_node(self) -> NodeView | None:
        """Send one GET; without a version the server answers from its storage, not from a cache."""
        request = ApiRequest("get", "nodes", self._path, accept=METADATA_ONLY)
        with contextlib.suppress(ApiNotFound):
            return await self._session.fetch(request, read_node)
        return None

    async def annotate_node(
        self, annotations: Mapping[str, str | None], version: str = ""
    ) -> NodeView:
        """Send one merge patch of these annotations.

        With a resourceVersion, ApiConflict is raised if the Node has another one.
        """
        metadata = {"annotations": dict(annotations)}
        body = {"metadata": metadata | ({"resourceVersion": version} if version else {})}
        request = ApiRequest("patch", "nodes", self._path, (), body, MERGE_PATCH, METADATA_ONLY)
        return await self._session.fetch(request, read_node)

    async def release_lock(self, key: str, value: str) -> None:
        """Send one JSON patch: nothing changes unless annotation `key` is exactly `value`."""
        pointer = "/metadata/annotations/" + key.replace("~", "~0").replace("/", "~1")
        test = {"op": "test", "path": pointer, "value": value}
        body = (test, {"op": "remove", "path": pointer})
        request = ApiRequest("patch", "nodes", self._path, (), body, JSON_PATCH, METADATA_ONLY)
        await self._session.call(request)

    async def set_condition(self, condition: NodeCondition) -> None:
        """Create or replace the condition of its type."""
        since = encode_stamp(condition.since)
        await self.patch_condition(
            {
                "type": condition.kind,
                "status": str(condition.status),
                "reason": condition.reason,
                "message": condition.message,
                "lastHeartbeatTime": since,
                "lastTransitionTime": since,
            }
        )

    async def patch_condition(self, entry: Mapping[str, str]) -> None:
        """Send one strategic merge patch of one condition; `$patch: delete` removes it."""
        body = {"status": {"conditions": [entry]}}
        path = f"{self._path}/status"
        await self._session.call(
            ApiRequest("patch", "nodes/status", path, (), body, STRATEGIC_PATCH)
        )


class KubePods:
    """The pods of this node at the API server (port PodApi).

    `resource` is the extended resource whose requests the views count.
    """

    def __init__(self, session: KubeSession, node: str, resource: str) -> None:
        self._session = session
        self._node = node
        self._selector = ("fieldSelector", f"spec.nodeName={node}")
        self._resource = resource

    async def list_pods(self) -> PodList:
        """Send one LIST, answered from the server's storage, in as many pages as needed."""
        request = ApiRequest("list", "pods", path_of("pods"), (self._selector,))
        version, pods = await fetch_list(self._session, request, self._view)
        return PodList(tuple(pod for pod in pods if pod is not None), version)

    async def get_pod(self, namespace: str, name: str) -> PodView | None:
        """Send one GET; without a version the server answers from its storage, not from a cache."""
        request = ApiRequest("get", "pods", path_of("namespaces", namespace, "pods", name))
        with contextlib.suppress(ApiNotFound):
            pod = await self._session.fetch(
                request, lambda body: decode_pod(read_object(body), self._resource)
            )
            return pod if pod.node == self._node else None
        return None

    async def watch_pods(self, resource_version: str) -> AsyncIterator[PodChange]:
        """Send one WATCH with bookmarks; a first change of the requested version: it is open."""
        query = (self._selector, ("resourceVersion", resource_version))
        request = ApiRequest("watch", "pods", path_of("pods"), query)
        async for _, change in self._session.watch(request, self._change):
            yield change or PodChange(resource_version)

    async def annotate_pod(
        self, namespace: str, name: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        """Send one merge patch to pods/status, which a node's own identity may patch."""
        body = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        path = path_of("namespaces", namespace, "pods", name, "status")
        request = ApiRequest("patch", "pods/status", path, (), body, MERGE_PATCH, METADATA_ONLY)
        await self._session.call(request)

    def _change(self, kind: str, obj: Raw) -> PodChange:
        """The change that one frame reports. Raises MalformedText."""
        version = text_in(read_object(obj), "metadata", "resourceVersion")
        if not version:
            raise MalformedText("an object of the answer has no resourceVersion")
        pod = None if kind == "BOOKMARK" else self._view(obj)
        return PodChange(version, pod, deleted=kind == "DELETED")

    def _view(self, obj: Raw) -> PodView | None:
        """The pod; None if it cannot be read, for it must hide no other. Raises MalformedText."""
        content = read_object(obj)
        try:
            return decode_pod(content, self._resource)
        except MalformedText as error:
            log.warning("kube.pod_unreadable", err=str(error))
            return None


def read_node(body: Raw) -> NodeView:
    """Read a Node. Raises MalformedText."""
    return decode_node(read_object(body))


def _shown(kind: str, obj: Raw) -> NodeView | None:
    """The Node in one frame; None when it was deleted, or in a bookmark. Raises MalformedText."""
    return read_node(obj) if kind in {"ADDED", "MODIFIED"} else None
