"""The API server model: real HTTP on loopback over an `ObjectStore`.

It serves the paths, patch types, preconditions, errors and watches that the agent and kubectl use,
and nothing else. Faults are switched on from outside: `throttle`, `forget_history`, `end_watches`,
and `stop` with a later `start`.

Codes and reasons are those of kube-apiserver 1.36.3; tests/peers sends both the same requests. The
model differs in these points:

- It has no schemas and no admission. It stores objects as given, without defaults, generation and
  managed fields, and lets a node write more than NodeRestriction does.
- It has only nodes, pods, events, ResourceQuotas, namespaces and SelfSubjectAccessReview. PUT,
  deletecollection and server-side apply are refused.
- It answers with JSON, in the one version it has: no tables and no protobuf.
- A method that a path does not have is 404, a patch of an unknown kind 400.
- 429 with `Retry-After` is a fault that is switched on. The real server sends it under overload,
  which a test cannot cause.
- A Status has no details, and the text is the model's own. Health pages need no token.
- A path may begin with `/as/<token>`, which counts as the token: kubectl sends none over plain
  HTTP, and this model has no certificate.
"""

import asyncio
import contextlib
import json
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
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
PARTIAL: Final = "PartialObjectMetadata"
REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
DEFAULT_TIMEOUT: Final = 3000.0
BOOKMARK_INTERVAL: Final = 60.0
BEFORE_THE_END: Final = 2.0
"""Seconds before the timeout of a watch at which it gets its last bookmark."""
WRITES: Final = frozenset({"create", "patch", "update", "delete"})
_HOST: Final = "127.0.0.1"
_VERBS: Final = ("create", "delete", "get", "list", "patch", "watch")
DISCOVERY: Final[Mapping[str, Json]] = {
    "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.3"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            {
                "name": name,
                "singularName": kind.lower(),
                "namespaced": name not in CLUSTER_SCOPED,
                "kind": kind,
                "verbs": list(_VERBS),
            }
            for name, kind in KINDS.items()
        ],
    },
}
"""What a client asks before it asks for an object."""


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request and the code of its answer; `verb` is Kubernetes' (get, list, watch, …)."""

    user: str
    verb: str
    resource: str
    subresource: str
    name: str
    code: int


@dataclass(eq=False)
class Journal:
    """Keeps a bounded number of calls, and counts all calls since the start, refused ones too."""

    calls: deque[ApiCall] = field(default_factory=lambda: deque(maxlen=10_000))
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def note(self, call: ApiCall) -> None:
        """Record one call."""
        self.calls.append(call)
        self.counts[call.user, call.verb, call.resource] += 1

    def writes(self, user: str) -> int:
        """How many writes the user tried."""
        return self._count(user, WRITES)

    def watches(self, user: str) -> int:
        """How many watches the user started."""
        return self._count(user, {"watch"})

    def _count(self, user: str, verbs: Collection[str]) -> int:
        found = ((who, verb, count) for (who, verb, _), count in self.counts.items())
        return sum(count for who, verb, count in found if who == user and verb in verbs)


@dataclass(eq=False)
class ApiServerModel:
    """One API server; `tokens` maps bearer tokens to user names.

    `admin` may do everything, `system:node:<name>` what NodeRestriction allows a node,
    `system:serviceaccount:…` what the agent's ClusterRole grants, and others what `rights` grants.
    `admit` is the mutating webhook of new pods: it returns the pod to store, or raises a
    StatusError.
    """

    store: ObjectStore
    tokens: dict[str, str]
    admit: Callable[[Json], Json] | None = None
    rights: Rights = field(default_factory=dict)
    journal: Journal = field(default_factory=Journal)
    port: int = 0
    _throttled: int = 0
    _retry_after: int = 1
    _watches: set["WatchStream"] = field(default_factory=set)
    _server: web.Server | None = None
    _listener: asyncio.Server | None = None

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

    def throttle(self, count: int, retry_after: int) -> None:
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
        if request.raw_path.startswith(PREFIX):
            token, _, rest = request.raw_path.removeprefix(PREFIX).partition("/")
            headers = {**request.headers, "Authorization": f"Bearer {token}"}
            request = request.clone(rel_url=f"/{rest}", headers=headers)
        if request.path in ("/readyz", "/livez", "/healthz"):
            return web.Response(text="ok")
        user, target, headers = "", Target(request.method.lower(), request.path), {}
        try:
            user = requests.identify(self.tokens, request.headers.get("Authorization"))
            if self._throttled > 0:
                self._throttled -= 1
                headers = {"Retry-After": str(self._retry_after)}
                raise TooManyRequestsError("too many requests: try again later")
            if request.path == REVIEWS:
                target = Target("create", "selfsubjectaccessreviews")
                code, answer = 201, self._review(user, await request.content.read())
            elif request.path in DISCOVERY:
                code, answer = 200, DISCOVERY[request.path]
            else:
                target = requests.parse_target(request.method, request.path, request.query)
                authorize(user, target, self._find(target), self.rights)
                requests.require_served(target)
                is_partial = PARTIAL in request.headers.get("Accept", "")
                if target.verb == "watch":
                    return await self._watch(request, user, target, is_partial=is_partial)
                body = await request.content.read()
                code, answer = self._act(target, request.content_type, body)
                if is_partial and "items" not in answer:
                    answer = _partial(answer)
        except StatusError as refusal:
            code, answer = refusal.code, refusal.status()
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
                return 201, requests.create(self.store, target, body, self.admit)
            case "patch":
                return 200, requests.patch(self.store, target, content_type, body)
            case _:
                return 200, requests.delete(self.store, target, body)

    def _review(self, user: str, body: bytes) -> Json:
        review = requests.parse_body(body, dict)
        asked, is_allowed = requests.parse_review(review), True
        try:
            authorize(user, asked, self._find(asked), self.rights)
        except ForbiddenError:
            is_allowed = False
        return review | {"status": {"allowed": is_allowed}}

    async def _watch(
        self, request: web.BaseRequest, user: str, target: Target, *, is_partial: bool
    ) -> web.StreamResponse:
        watch = WatchStream(target, self.store, is_partial=is_partial)
        self._note(user, target, 200)
        self._watches.add(watch)
        try:
            return await watch.serve(request)
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
        at = (target.resource, target.subresource, target.name)
        self.journal.note(ApiCall(user, target.verb, *at, code))


class WatchStream:
    """Writes one watch to one client until it times out or is ended.

    Bookmarks come as from the real server's watch cache
    (apiserver/pkg/storage/cacher/cache_watcher.go) on a cluster with constant writes: every 60 s,
    and 2 s before the timeout. On a cluster without writes, the real server sends none for the
    first 2 minutes.

    Raises BadRequestError: an unknown field, a version or time that is not a number.
    """

    def __init__(self, target: Target, store: ObjectStore, *, is_partial: bool) -> None:
        self._resource = target.resource
        self._is_partial = is_partial
        self._bookmarks = requests.is_set(target.options, "allowWatchBookmarks")
        seconds = requests.number(target.options, "timeoutSeconds") or DEFAULT_TIMEOUT
        self._deadline = asyncio.timeout(seconds)
        self._is_ended = False
        since = requests.number(target.options, "resourceVersion") or None
        self._opened: Subscription | GoneError
        try:
            self._opened = store.subscribe(
                target.resource, since, namespace=target.namespace, fields=target.fields
            )
        except GoneError as gone:
            self._opened = gone

    def end(self) -> None:
        """End the watch now as if it had timed out, after a last bookmark.

        Before the watch has begun, this does nothing.
        """
        if self._deadline.when() is not None:
            self._is_ended = True
            self._deadline.reschedule(asyncio.get_running_loop().time())

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send frames. After a timeout the connection stays usable.

        A version that is too old gives an error frame, not an HTTP status, as in the real server
        (apiserver/pkg/storage/cacher).
        """
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        with contextlib.suppress(ConnectionResetError):  # the client is gone, which ends the watch
            await response.prepare(request)
            try:
                if isinstance(self._opened, GoneError):
                    raise self._opened
                async with self._deadline:
                    await self._send(response, self._opened)
            except TimeoutError:
                opened = self._opened
                if self._is_ended and isinstance(opened, Subscription) and opened.is_started:
                    await self._mark(response, opened)
            except GoneError as gone:
                await _write(response, "ERROR", gone.status())
            await response.write_eof()
        return response

    async def _send(self, response: web.StreamResponse, subscription: Subscription) -> None:
        loop = asyncio.get_running_loop()
        last = (self._deadline.when() or 0.0) - BEFORE_THE_END
        marking_at = loop.time()
        while True:
            if marking_at <= loop.time():
                regular = loop.time() + BOOKMARK_INTERVAL
                marking_at = min(last, regular) if last > loop.time() else regular
            try:
                async with asyncio.timeout_at(marking_at):
                    change = await anext(subscription)
            except TimeoutError:
                await self._mark(response, subscription)
            else:
                await self._tell(response, change.type, change.object)

    async def _mark(self, response: web.StreamResponse, subscription: Subscription) -> None:
        if self._bookmarks:
            metadata = {"resourceVersion": str(subscription.cursor)}
            mark = {"kind": KINDS[self._resource], "apiVersion": "v1", "metadata": metadata}
            await self._tell(response, "BOOKMARK", mark)

    async def _tell(self, response: web.StreamResponse, what: str, told: Json) -> None:
        await _write(response, what, _partial(told) if self._is_partial else told)


async def _write(response: web.StreamResponse, what: str, told: Json) -> None:
    frame = json.dumps({"type": what, "object": told}, separators=(",", ":"))
    await response.write(frame.encode() + b"\n")


def _partial(answer: Json) -> Json:
    return {"kind": PARTIAL, "apiVersion": "meta.k8s.io/v1", "metadata": answer["metadata"]}
