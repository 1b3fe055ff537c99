"""The API server model: real HTTP on loopback over an `ObjectStore`.

It serves the paths, patch types, preconditions, errors and watches that the agent and kubectl use,
and nothing else. Faults are switched on from outside: `throttle`, `begin_outage`, `forget_history`,
`end_watches`.

Codes and reasons are those of kube-apiserver 1.36.3; tests/peers sends both the same requests. The
model differs in these points:

- It has no schemas and no admission. It stores objects as given, without defaults, generation and
  managed fields, and lets a node write more than NodeRestriction does.
- It has only nodes, pods, events, ResourceQuotas, namespaces and SelfSubjectAccessReview. PUT,
  deletecollection, server-side apply, tables and protobuf are refused; versions that a GET or LIST
  asks for are ignored.
- A method that a path does not have is 404, a patch of an unknown kind 400.
- 429 with `Retry-After` is a fault that is switched on. The real server sends it under overload,
  which a test cannot cause.
- A Status has no details, and the text is the model's own.
- Health pages need no token, and a path may begin with `/as/<token>`, which counts as the token.
"""

import asyncio
import contextlib
import json
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from agent.sandbox import apiserver_requests as requests
from agent.sandbox.apiserver_requests import Rights, Target, authorize
from agent.sandbox.store import (
    CLUSTER_SCOPED,
    KINDS,
    ForbiddenError,
    GoneError,
    Json,
    NotFoundError,
    ObjectStore,
    StatusError,
    Subscription,
    TooManyRequestsError,
)

CLOSE_DEADLINE: Final = 1.0
PREFIX: Final = "/as/"
REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
PARTIAL: Final = "PartialObjectMetadata"
DEFAULT_TIMEOUT: Final = 3000.0
BOOKMARK_INTERVAL: Final = 60.0
BEFORE_THE_END: Final = 2.0
"""Seconds before the timeout of a watch at which it gets its last bookmark."""
WRITES: Final = frozenset({"create", "patch", "update", "delete"})
_HOST: Final = "127.0.0.1"
_VERBS: Final = ("create", "delete", "get", "list", "patch", "watch")


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request and the code of its answer; `verb` is Kubernetes' (get, list, watch, …)."""

    user: str
    verb: str
    resource: str
    subresource: str
    namespace: str
    name: str
    code: int


class Journal:
    """Keeps a bounded number of calls, and counts all calls since the start."""

    def __init__(self, limit: int = 10_000) -> None:
        self.calls: deque[ApiCall] = deque(maxlen=limit)
        self.counts: Counter[tuple[str, str, str]] = Counter()

    def note(self, call: ApiCall) -> None:
        """Record one call, also a refused one."""
        self.calls.append(call)
        self.counts[call.user, call.verb, call.resource] += 1

    def writes(self, user: str) -> int:
        """How many writes the user tried."""
        return self._count(user, WRITES)

    def reads(self, user: str) -> int:
        """How many reads the user tried, watches not included."""
        return self._count(user, {"get", "list"})

    def watches(self, user: str) -> int:
        """How many watches the user started."""
        return self._count(user, {"watch"})

    def _count(self, user: str, verbs: Collection[str]) -> int:
        found = ((who, verb, count) for (who, verb, _), count in self.counts.items())
        return sum(count for who, verb, count in found if who == user and verb in verbs)


class ApiServerModel:
    """One API server; `tokens` maps bearer tokens to user names.

    `admin` may do everything, `system:node:<name>` what NodeRestriction allows a node,
    `system:serviceaccount:…` what the agent's ClusterRole grants, and others what `rights` grants.
    `admit` is the mutating webhook of new pods: it returns the pod to store, or raises a
    StatusError.
    """

    def __init__(
        self,
        store: ObjectStore,
        tokens: Mapping[str, str],
        admit: Callable[[Json], Json] | None = None,
        rights: Rights | None = None,
    ) -> None:
        self.store = store
        self._rights = rights or {}
        self._admit = admit
        self.journal = Journal()
        self.port = 0
        self._tokens = dict(tokens)
        self._throttled = 0
        self._retry_after = 1
        self._watches: set[WatchStream] = set()
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The base address, without a slash at the end."""
        return f"http://{_HOST}:{self.port}"

    @property
    def open_watches(self) -> int:
        """The number of open watches."""
        return len(self._watches)

    async def start(self) -> None:
        """Listen: on a free port the first time, then always on the same port."""
        loop = asyncio.get_running_loop()
        self._server = web.Server(self._answer, handler_cancellation=True, access_log=None)
        self._listener = await loop.create_server(self._server, _HOST, self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the listener and cut every connection, even in the middle of an answer."""
        listener, server = self._listener, self._server
        self._listener = self._server = None
        if listener is not None:
            listener.close()
        if server is not None:
            for connection in server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
            await server.shutdown(CLOSE_DEADLINE)

    async def begin_outage(self) -> None:
        """Refuse new connections and cut the existing ones. The store stays."""
        await self.stop()

    async def end_outage(self) -> None:
        """Serve again on the same port."""
        await self.start()

    def throttle(self, count: int, retry_after: int = 1) -> None:
        """Answer the next `count` requests with 429 and `Retry-After: retry_after` seconds."""
        self._throttled = count
        self._retry_after = retry_after

    def end_watches(self) -> None:
        """End all open watches as if they had timed out."""
        for watch in self._watches:
            watch.end()

    def forget_history(self) -> None:
        """Compact the history and end all watches. A watch from an old version then gets 410."""
        self.store.forget_history()
        self.end_watches()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        request = _with_token_of_path(request)
        if request.path in ("/readyz", "/livez", "/healthz"):
            return web.Response(text="ok")
        user, target, headers = "", Target(request.method.lower(), request.path), {}
        try:
            user = requests.identify(self._tokens, request.headers.get("Authorization"))
            if self._throttled > 0:
                self._throttled -= 1
                again = {"Retry-After": str(self._retry_after)}
                raise TooManyRequestsError("too many requests: try again later", again)
            if request.path == REVIEWS and request.method == "POST":
                target = Target("create", "selfsubjectaccessreviews")
                code, answer = 201, self._review(user, await request.content.read())
            elif (known := _discovery(request.path)) is not None:
                code, answer = 200, known
            else:
                target = requests.parse_target(request.method, request.path, request.query)
                authorize(user, target, self._find(target), self._rights)
                requests.require_served(target)
                is_partial = PARTIAL in request.headers.get("Accept", "")
                if target.verb == "watch":
                    return await self._watch(request, user, target, is_partial=is_partial)
                body = await request.content.read()
                code, answer = self._act(target, request.content_type, body)
                if is_partial and "items" not in answer:
                    answer = _partial(answer)
        except StatusError as refusal:
            code, answer, headers = refusal.code, refusal.status(), refusal.headers
        self._note(user, target, code)
        body = json.dumps(answer, separators=(",", ":")).encode()
        return web.Response(
            status=code, body=body, headers=headers, content_type="application/json"
        )

    def _act(self, target: Target, content_type: str, body: bytes) -> tuple[int, Json]:
        match target.verb:
            case "get":
                return 200, self.store.get(target.resource, target.namespace, target.name)
            case "list":
                return 200, requests.list_objects(self.store, target)
            case "create":
                return 201, requests.create(self.store, target, body, self._admit)
            case "patch":
                return 200, requests.patch(self.store, target, content_type, body)
            case _:
                return 200, requests.delete(self.store, target, body)

    def _review(self, user: str, body: bytes) -> Json:
        review = requests.parse_object(body)
        asked, is_allowed = requests.parse_review(review), True
        try:
            authorize(user, asked, self._find(asked), self._rights)
        except ForbiddenError:
            is_allowed = False
        return review | {"status": {"allowed": is_allowed}}

    async def _watch(
        self, request: web.BaseRequest, user: str, target: Target, *, is_partial: bool
    ) -> web.StreamResponse:
        watch = WatchStream(target, is_partial=is_partial)
        self._note(user, target, 200)
        self._watches.add(watch)
        try:
            return await watch.serve(request, self.store)
        finally:
            self._watches.discard(watch)

    def _find(self, target: Target) -> Json | None:
        if not target.name or target.resource not in KINDS:
            return None
        try:
            return self.store.get(target.resource, target.namespace, target.name)
        except NotFoundError:
            return None

    def _note(self, user: str, target: Target, code: int) -> None:
        at = (target.resource, target.subresource, target.namespace, target.name)
        self.journal.note(ApiCall(user, target.verb, *at, code))


class WatchStream:
    """Writes one watch to one client until it times out or is ended.

    Bookmarks come as from the real server's watch cache
    (apiserver/pkg/storage/cacher/cache_watcher.go) on a cluster with constant writes: every 60 s,
    and 2 s before the timeout. On a cluster without writes, the real server sends none for the
    first 2 minutes. Raises BadRequestError for a time that is no number.
    """

    def __init__(self, target: Target, *, is_partial: bool) -> None:
        self._target = target
        self._is_partial = is_partial
        self._bookmarks = requests.is_set(target.options, "allowWatchBookmarks")
        seconds = requests.number(target.options, "timeoutSeconds")
        self._deadline = asyncio.timeout(float(seconds) if seconds > 0 else DEFAULT_TIMEOUT)
        self._is_ended = False

    def end(self) -> None:
        """End the watch now as if it had timed out, after a last bookmark.

        Before the watch has begun, this does nothing.
        """
        if self._deadline.when() is not None:
            self._is_ended = True
            self._deadline.reschedule(asyncio.get_running_loop().time())

    async def serve(self, request: web.BaseRequest, store: ObjectStore) -> web.StreamResponse:
        """Send frames. After a timeout the connection stays usable.

        A version that is too old gives an error frame, not an HTTP status, as in the real server
        (apiserver/pkg/storage/cacher). Raises BadRequestError: an unknown field, a version that is
        not a number.
        """
        since = requests.number(self._target.options, "resourceVersion") or None
        resource, namespace = self._target.resource, self._target.namespace
        opened: Subscription | GoneError
        try:
            opened = store.subscribe(
                resource, since, namespace=namespace, fields=self._target.fields
            )
        except GoneError as gone:
            opened = gone
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        with contextlib.suppress(ConnectionResetError):  # the client is gone, which ends the watch
            await response.prepare(request)
            if isinstance(opened, Subscription):
                await self._follow(response, opened)
            else:
                await _write(response, {"type": "ERROR", "object": opened.status()})
            await response.write_eof()
        return response

    async def _follow(self, response: web.StreamResponse, subscription: Subscription) -> None:
        try:
            async with self._deadline:
                await self._send(response, subscription)
        except TimeoutError:
            if self._is_ended and subscription.is_started:
                await self._mark(response, subscription)
        except GoneError as gone:
            await _write(response, {"type": "ERROR", "object": gone.status()})

    async def _send(self, response: web.StreamResponse, subscription: Subscription) -> None:
        marking_at = self._next_mark()
        while True:
            try:
                async with asyncio.timeout_at(marking_at):
                    change = await anext(subscription)
            except TimeoutError:
                marking_at = self._next_mark()
                await self._mark(response, subscription)
            else:
                await self._tell(response, change.type, change.object)

    def _next_mark(self) -> float:
        now = asyncio.get_running_loop().time()
        last = (self._deadline.when() or 0.0) - BEFORE_THE_END
        regular = now + BOOKMARK_INTERVAL
        return min(last, regular) if last > now else regular

    async def _mark(self, response: web.StreamResponse, subscription: Subscription) -> None:
        if self._bookmarks:
            metadata = {"resourceVersion": str(subscription.cursor)}
            kind = KINDS[self._target.resource]
            mark = {"kind": kind, "apiVersion": "v1", "metadata": metadata}
            await self._tell(response, "BOOKMARK", mark)

    async def _tell(self, response: web.StreamResponse, what: str, told: Json) -> None:
        shown = _partial(told) if self._is_partial else told
        await _write(response, {"type": what, "object": shown})


async def _write(response: web.StreamResponse, frame: Json) -> None:
    await response.write(json.dumps(frame, separators=(",", ":")).encode() + b"\n")


def _partial(answer: Json) -> Json:
    return {"kind": PARTIAL, "apiVersion": "meta.k8s.io/v1", "metadata": answer["metadata"]}


def _with_token_of_path(request: web.BaseRequest) -> web.BaseRequest:
    """The request with the token of its path, if it has one, moved to its headers.

    kubectl sends no token over plain HTTP, and this model has no certificate.
    """
    if not request.raw_path.startswith(PREFIX):
        return request
    token, _, rest = request.raw_path.removeprefix(PREFIX).partition("/")
    headers = {**request.headers, "Authorization": f"Bearer {token}"}
    return request.clone(rel_url=f"/{rest}", headers=headers)


def _discovery(path: str) -> Json | None:
    """What a client asks before it asks for an object; None: the path is another."""
    if path == "/version":
        return {"major": "1", "minor": "36", "gitVersion": "v1.36.3"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": []}
    if path != "/api/v1":
        return None
    resources = [
        {
            "name": name,
            "singularName": kind.lower(),
            "namespaced": name not in CLUSTER_SCOPED,
            "kind": kind,
            "verbs": list(_VERBS),
        }
        for name, kind in KINDS.items()
    ]
    return {"kind": "APIResourceList", "groupVersion": "v1", "resources": resources}
