"""The API server model: real HTTP on loopback over an `ObjectStore`.

It serves the paths, the patch types, the preconditions, the errors and the watches that an agent,
a kubelet and a scheduler use, and nothing else. Faults are switched on from outside: `throttle`,
`begin_outage`, `forget_history`, `end_watches`.

Codes, reasons and messages are those of kube-apiserver 1.36.3; tests/peers sends both the same
requests. The model differs in these points:

- It has no schemas. It stores objects as given, without defaults, generation and managed fields,
  and does not check a pod's spec. Its clients do not read these fields.
- It has only nodes, pods, events, ResourceQuotas and SelfSubjectAccessReview. A namespace exists
  if it has an object. Label selectors of watches, deletecollection, server-side apply, tables and
  protobuf are refused.
- 429 with `Retry-After` is a fault that is switched on. The real server sends it under overload,
  which a test cannot cause.
- A Status has no details, and the refusal of a pod update does not name the change.
- A version that is too new is refused at once, not after 3 s. `resourceVersionMatch` and
  `sendInitialEvents` are ignored.
- Health pages need no token, and a token may stand in the path: see `apiserver_kubectl`.
"""

import asyncio
import datetime as dt
import email.utils
import functools
from collections.abc import Callable, Mapping
from typing import Final

from aiohttp import web

from agent.host.clock import SystemClock
from agent.sandbox import apiserver_reviews, apiserver_writes
from agent.sandbox.api_errors import (
    BadRequestError,
    BodyTooLargeError,
    Json,
    NotFoundError,
    StatusError,
    TooManyRequestsError,
)
from agent.sandbox.apiserver_access import (
    Rights,
    Target,
    authorize,
    identify,
    restrict,
)
from agent.sandbox.apiserver_forms import form_of, packed, shaped
from agent.sandbox.apiserver_journal import ApiCall, Journal
from agent.sandbox.apiserver_kubectl import listed, unfolded
from agent.sandbox.apiserver_lists import list_objects, require_reached
from agent.sandbox.apiserver_paths import parse_target, require_served
from agent.sandbox.apiserver_watch import WatchStream
from agent.sandbox.store import KINDS, ObjectStore

BODY_LIMIT: Final = 3 * 1024 * 1024
BODY_DEADLINE: Final = 30.0
CLOSE_DEADLINE: Final = 1.0
_HOST: Final = "127.0.0.1"
_VERSION: Final = {"major": "1", "minor": "36", "gitVersion": "v1.36.3"}


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
        self._rights = rights
        self._admit = admit
        self.journal = Journal()
        self.port = 0
        self._tokens = dict(tokens)
        self.ahead = 0.0
        """Seconds by which the times in its answers are ahead of this machine's clock."""
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
        request = unfolded(request)
        if request.path in ("/readyz", "/livez", "/healthz"):
            return web.Response(text="ok")
        user, target = "", Target(request.method.lower(), request.path)
        packing = request.headers.get("Accept-Encoding", "")
        try:
            user = identify(self._tokens, request.headers.get("Authorization"))
            self._refuse_when_throttled()
            aside = await self._aside(request, user)
            if aside is not None:
                return self._finish(user, *aside)
            target = parse_target(request.method, request.path, request.query)
            authorize(user, target, self._find(target), self._rights)
            require_served(target)
            form = form_of(request.headers.get("Accept", ""))
            if target.verb == "watch":
                return await self._watch(request, user, target, form)
            body = await _read_body(request)
            code, answer = self._act(user, target, request.content_type, body)
            answer = shaped(form, answer)
        except StatusError as refusal:
            return self._finish(user, target, refusal.code, refusal.status(), refusal.headers)
        self._note(user, target, code)
        return self._dated(packed(code, answer, packing if target.verb in ("get", "list") else ""))

    async def _aside(self, request: web.BaseRequest, user: str) -> tuple[Target, int, Json] | None:
        """Answer the requests that every user may send and that are not for an object."""
        if request.path == "/version":
            return Target(request.method.lower(), request.path), 200, dict(_VERSION)
        if request.method == "GET" and (kinds := listed(request.path)) is not None:
            return Target("get", request.path), 200, kinds
        if (request.method, request.path) == ("POST", apiserver_reviews.PATH):
            body = await _read_body(request)
            return apiserver_reviews.TARGET, 201, apiserver_reviews.reviewed(user, body, self._find)
        return None

    def _act(self, user: str, target: Target, content_type: str, body: bytes) -> tuple[int, Json]:
        if target.verb in ("get", "list"):
            return 200, self._read(target)
        store, allowed = self.store, functools.partial(restrict, user, target)
        match target.verb:
            case "create":
                return 201, apiserver_writes.create(store, target, body, allowed, self._admit)
            case "patch":
                return 200, apiserver_writes.patch(store, target, content_type, body, allowed)
            case "update":
                return 200, apiserver_writes.replace(store, target, body, allowed)
            case _:
                return 200, apiserver_writes.delete(store, target, body)

    def _read(self, target: Target) -> Json:
        if target.verb == "list":
            return list_objects(self.store, target)
        require_reached(self.store, target)
        return self.store.get(target.resource, target.namespace, target.name)

    async def _watch(
        self, request: web.BaseRequest, user: str, target: Target, form: str
    ) -> web.StreamResponse:
        watch = WatchStream(target, form)
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

    def _refuse_when_throttled(self) -> None:
        if self._throttled > 0:
            self._throttled -= 1
            raise TooManyRequestsError(
                "the server has received too many requests and has asked us to try again later",
                {"Retry-After": str(self._retry_after)},
            )

    def _finish(
        self,
        user: str,
        target: Target,
        code: int,
        answer: Json,
        headers: Mapping[str, str] | None = None,
    ) -> web.Response:
        self._note(user, target, code)
        return self._dated(packed(code, answer, "", headers or {}))

    def _dated(self, response: web.Response) -> web.Response:
        if self.ahead:
            at = SystemClock().now() + dt.timedelta(seconds=self.ahead)
            response.headers["Date"] = email.utils.format_datetime(at, usegmt=True)
        return response

    def _note(self, user: str, target: Target, code: int) -> None:
        self.journal.note(
            ApiCall(
                user=user,
                verb=target.verb,
                resource=target.resource,
                subresource=target.subresource,
                namespace=target.namespace,
                name=target.name,
                code=code,
            )
        )


async def _read_body(request: web.BaseRequest) -> bytes:
    too_large = BodyTooLargeError(f"Request entity too large: limit is {BODY_LIMIT}")
    if (request.content_length or 0) > BODY_LIMIT:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_DEADLINE):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > BODY_LIMIT:
                    raise too_large
    except TimeoutError as slow:
        raise BadRequestError(f"the body did not arrive within {BODY_DEADLINE:g} s") from slow
    return bytes(body)
