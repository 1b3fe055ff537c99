"""The API server model: real HTTP on loopback over an `ObjectStore`.

It serves the paths, patch types, preconditions, errors and watches that the agent and kubectl use,
and nothing else. Faults are switched on from outside: `throttle`, `forget_history`, `end_watches`,
and `stop` with a later `start`.

Codes and reasons are those of kube-apiserver 1.36.3; tests/peers sends both the same requests. The
model differs in these points:

- It has no schemas and no admission. It stores objects as given, without defaults, generation and
  managed fields, and lets a node write more than NodeRestriction does. A field selector may name
  any field, and a pod's spec may be patched.
- It has only nodes, pods, events, ResourceQuotas, namespaces and SelfSubjectAccessReview. PUT,
  deletecollection and server-side apply are refused.
- It answers with JSON, in the one version it has: no tables and no protobuf. A list is whole
  whatever its limit.
- A method that a path does not have is 404, a patch of an unknown kind 400, a number that is none
  500.
- 429 with `Retry-After` is a fault that is switched on. The real server sends it under overload,
  which a test cannot cause.
- A Status has no details, and the text is the model's own.
- A watch gets a bookmark after a minute of silence and at its end: the real server sends one every
  minute and 2 s before the end, and on a cluster without writes none for the first 2 minutes.
- A path may begin with `/as/<token>`, which counts as the token: kubectl sends none over plain
  HTTP, and this model has no certificate.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from agent.sandbox import apiserver_requests as requests
from agent.sandbox.apiserver_requests import Rights, Target, authorize
from agent.sandbox.hardware import end_server
from agent.sandbox.store import (
    CLUSTER_SCOPED,
    KINDS,
    ForbiddenError,
    GoneError,
    Json,
    NotFoundError,
    ObjectStore,
    StatusError,
    TooManyRequestsError,
)

PREFIX: Final = "/as/"
PARTIAL: Final = "PartialObjectMetadata"
REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
DEFAULT_TIMEOUT: Final = 3000.0
BOOKMARK_INTERVAL: Final = 60.0
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


@dataclass(eq=False)
class ApiServerModel:
    """One API server; `tokens` maps bearer tokens to user names.

    `admin` may do everything, `system:node:<name>` what NodeRestriction allows a node,
    `system:serviceaccount:…` what the agent's ClusterRole grants, and others what `rights` grants.
    `admit` is the mutating webhook of new pods: it returns the pod to store, or raises a
    StatusError. `asked` counts the requests of known users by user, verb and resource, refused ones
    too; a verb is Kubernetes' (get, list, watch, …).
    """

    store: ObjectStore
    tokens: dict[str, str]
    admit: Callable[[Json], Json] | None = None
    rights: Rights = field(default_factory=dict)
    asked: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    port: int = 0
    _throttled: list[int] = field(default_factory=list)
    _watches: set[asyncio.Timeout] = field(default_factory=set)
    _running: tuple[web.Server, asyncio.Server] | None = None

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
        server = web.Server(self._answer, handler_cancellation=True, access_log=None)
        listener = await asyncio.get_running_loop().create_server(server, _HOST, self.port)
        self.port = listener.sockets[0].getsockname()[1]
        self._running = server, listener

    async def stop(self) -> None:
        """Close the listener and cut every connection, even in the middle of an answer."""
        running, self._running = self._running, None
        if running is not None:
            await end_server(*running)

    def throttle(self, count: int, retry_after: int) -> None:
        """Answer the next `count` requests with 429 and `Retry-After: retry_after` seconds."""
        self._throttled = [retry_after] * count

    def end_watches(self) -> None:
        """End all open watches as if they had timed out."""
        for watch in self._watches:
            watch.reschedule(asyncio.get_running_loop().time())

    def forget_history(self) -> None:
        """Compact the history and end all watches. A watch from an old version then gets 410."""
        self.store.forget_history()
        self.end_watches()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.raw_path.startswith(PREFIX):
            token, _, rest = request.raw_path.removeprefix(PREFIX).partition("/")
            headers = {**request.headers, "Authorization": f"Bearer {token}"}
            request = request.clone(rel_url=f"/{rest}", headers=headers)
        headers = dict[str, str]()
        try:
            user = requests.identify(self.tokens, request.headers.get("Authorization", ""))
            if self._throttled:
                headers = {"Retry-After": str(self._throttled.pop())}
                raise TooManyRequestsError("too many requests: try again later")
            if request.path in DISCOVERY:
                code, answer = 200, DISCOVERY[request.path]
            elif request.path == REVIEWS:
                self.asked[user, "create", "selfsubjectaccessreviews"] += 1
                review = requests.parse_body(await request.content.read(), dict)
                try:
                    authorize(user, requests.parse_review(review), self.store, self.rights)
                    code, answer = 201, review | {"status": {"allowed": True}}
                except ForbiddenError:
                    code, answer = 201, review | {"status": {"allowed": False}}
            else:
                target = requests.parse_target(request.method, request.path, request.query)
                self.asked[user, target.verb, target.resource] += 1
                authorize(user, target, self.store, self.rights)
                if target.resource not in KINDS:
                    raise NotFoundError(requests.NO_PATH)
                is_partial = PARTIAL in request.headers.get("Accept", "")
                if target.verb == "watch":
                    return await self._watch(request, target, is_partial=is_partial)
                body = await request.content.read()
                code, answer = self._act(target, request.content_type, body)
                if is_partial and "items" not in answer:
                    answer = _partial(answer)
        except StatusError as refusal:
            code, answer = refusal.code, refusal.status()
        body = json.dumps(answer).encode()
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
            case "delete":
                return 200, requests.delete(self.store, target, body)
            case _:
                raise NotFoundError(requests.NO_PATH)

    async def _watch(
        self, request: web.BaseRequest, target: Target, *, is_partial: bool
    ) -> web.StreamResponse:
        """Write one watch until it times out or is ended; then the connection stays usable.

        A version that is too old gives an error frame, not an HTTP status, as in the real server
        (apiserver/pkg/storage/cacher).
        """
        deadline = asyncio.timeout(float(target.options.get("timeoutSeconds", DEFAULT_TIMEOUT)))
        since = int(target.options.get("resourceVersion") or 0) or None
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()

        async def tell(what: str, told: Json) -> None:
            shown = _partial(told) if is_partial and what != "ERROR" else told
            frame = {"type": what, "object": shown}
            await response.write(json.dumps(frame).encode() + b"\n")

        async def mark() -> None:
            if changes.is_started and requests.is_set(target.options, "allowWatchBookmarks"):
                metadata = {"resourceVersion": str(changes.cursor)}
                kind = {"kind": KINDS[target.resource], "apiVersion": "v1"}
                await tell("BOOKMARK", kind | {"metadata": metadata})

        with contextlib.suppress(ConnectionResetError):  # the client is gone, which ends the watch
            await response.prepare(request)
            try:
                changes = self.store.subscribe(target.resource, since, fields=target.fields)
                async with deadline:
                    self._watches.add(deadline)
                    while True:
                        try:
                            async with asyncio.timeout(BOOKMARK_INTERVAL):
                                change = await anext(changes)
                        except TimeoutError:
                            await mark()
                        else:
                            await tell(change.type, change.object)
            except GoneError as gone:
                await tell("ERROR", gone.status())
            except TimeoutError:
                await mark()
            finally:
                self._watches.discard(deadline)
            await response.write_eof()
        return response


def _partial(answer: Json) -> Json:
    return {"kind": PARTIAL, "apiVersion": "meta.k8s.io/v1", "metadata": answer["metadata"]}
