"""The requests of the agent: lists in pages, watches, its Node and the pods of its node."""

import asyncio
import functools
import math
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
import structlog

from agent.cluster import (
    NodeCondition,
    NodeView,
    PodChange,
    PodList,
    PodUid,
    PodView,
)
from agent.errors import ApiError, ApiGone, ApiNotFound, MalformedText
from agent.hami.pod import encode_stamp
from agent.kit.timing import loop_time
from agent.kube import client
from agent.kube.client import (
    BODY_LIMIT,
    MERGE_PATCH,
    METADATA_ONLY,
    STRATEGIC_PATCH,
    AnswerTooLong,
    ApiRequest,
    KubeSession,
    aside,
    error_frame,
    path_of,
)
from agent.kube.objects import (
    MOST_OBJECTS,
    ListMeta,
    Raw,
    decode_node,
    decode_pod,
    has_many_values,
    inside,
    read_frame,
    read_object,
    read_page,
    read_page_head,
)

log = structlog.get_logger(__name__)
T = TypeVar("T")

PAGE_LIMIT = 8 * 1024 * 1024
"""Bytes of an answer with several objects; an answer with one object may have BODY_LIMIT."""
MOST: Final = 500
"""Objects in an answer, as in kubectl: 5,000 Nodes are 10 answers.

The first request may ask for all (0): servers 1.31 to 1.33 answer that from their cache by the
pods' node. They answer a page from etcd, for which they read every pod of the cluster (kubernetes
apiserver/pkg/storage/cacher/delegator.go, shouldDelegateList).
"""
FEW: Final = 4
"""Objects in an answer after one with more was too long: one with four rarely is."""
MOST_ODD: Final = 2
"""Beyond these a list has no end.

An answer is odd if it promises more and has not as many objects as were asked for. The API allows
it, but the real server fills each answer (kubernetes apiserver/pkg/storage/etcd3/store.go,
GetList).
"""


class ListBudget(msgspec.Struct):
    """What lists may still have; `memory`: bytes of their objects as read.

    The defaults are for the agent: a tenant could use up a bound of memory. MOST_OBJECTS pods of 7
    KB are a GiB.
    """

    objects: int = MOST_OBJECTS
    bytes: int = 1 << 30
    memory: float = math.inf

    @property
    def exceeded(self) -> str:
        """What there is too much of; empty for nothing."""
        return next((name for name in self.__struct_fields__ if getattr(self, name) < 0), "")


command_budget = functools.partial(ListBudget, 30_000, 192 << 20, 32 << 20)
"""5,000 Nodes of 20 KB, as Kubernetes supports, and 9,000 pods of 10 KB are 190 MB."""


class EndlessList(ApiError):  # noqa: N818 -- the list is
    """The server always promises more, the same again, or more than is read."""


class Lists:
    """Fetches LISTs of one kind. Earlier answers set how many objects the next one may have.

    After a too long answer it asks again for fewer objects; after a short one it asks for more. The
    server accepts another `limit` with the same token (as its own test of lists does:
    test/e2e/apimachinery/chunking.go). Without `whole` even the first request asks for a page.
    `budget` gives each fetch its budget: a new one, or one that it shares with others.
    """

    def __init__(
        self,
        session: KubeSession,
        *,
        whole: bool = True,
        budget: Callable[[], ListBudget] = ListBudget,
    ) -> None:
        self._session = session
        self._budget = budget
        self._most = 0 if whole else MOST
        """How many objects a small list asks for."""
        self._limit = self._most

    async def fetch(self, request: ApiRequest, read: Callable[[Raw], T]) -> tuple[str, list[T]]:
        """Return the version and all objects, as read; each answer has 10 s. Raises ApiError.

        If the server forgets the list between two pages, the list begins again, once.
        """
        budget = self._budget()
        try:
            return await self._all(request, read, budget)
        except ApiGone:
            return await self._all(request, read, budget)

    async def _all(
        self, request: ApiRequest, read: Callable[[Raw], T], budget: ListBudget
    ) -> tuple[str, list[T]]:
        objects: list[T] = []
        rest = version = ""
        answers, odd, left = 0, 0, budget.bytes
        while True:
            page, items, asked = await self._page(request, rest, read, budget)
            objects += items
            answers += 1
            odd += len(items) != asked
            version = version or page.version
            if not page.rest:
                break
            if page.rest == rest or odd > MOST_ODD or budget.exceeded:
                why = f"more {budget.exceeded} than are read" if budget.exceeded else "no end"
                raise EndlessList(
                    f"{request.what}: the list has {why}: after {len(objects)} objects in "
                    f"{answers} answers the server still promises more; check the API server and "
                    "the proxies before it, or ask for one namespace or node"
                )
            rest = page.rest
        if left - budget.bytes < PAGE_LIMIT // 2:
            self._limit = self._most
        return version, objects

    async def _page(
        self, request: ApiRequest, rest: str, read: Callable[[Raw], T], budget: ListBudget
    ) -> tuple[ListMeta, list[T], int]:
        """One page, its objects as read, and how many were asked for."""
        while True:
            limit = self._limit
            options = (("limit", str(limit or "")), ("continue", rest))
            query = (*request.query, *(option for option in options if option[1]))
            paged = msgspec.structs.replace(request, query=query)
            at_most = client.BODY_LIMIT if limit == 1 else PAGE_LIMIT
            try:
                body = await self._session.call(paged, at_most)
            except AnswerTooLong as error:
                body = bytearray()
                if limit == 1:
                    return _skipped(paged, error), [], limit  # it counts as odd
            budget.bytes -= len(body) or at_most
            # Not for the agent itself: with one pod full of commas a tenant would slow each LIST.
            is_dense = budget.memory < math.inf and has_many_values(body)
            if limit != 1 and (is_dense or not body):
                self._limit = 1 if 0 < limit <= FEW else FEW
                continue
            read_all = functools.partial(_read, paged, read, is_dense)
            page, items = await aside(body, paged, read_all)
            budget.objects -= len(items)
            if budget.memory < math.inf:
                budget.memory -= sum(map(size_of, items))
            # It asks for more only if as many objects of this length are half a page.
            larger = min(MOST, 4 * limit) or MOST
            if page.rest and len(body) * larger < (limit or larger) * PAGE_LIMIT // 2:
                self._limit = larger
            return page, items, limit


def size_of(value: object) -> int:
    """The bytes of memory that a decoded value takes, with all that it holds."""
    inner: object = msgspec.structs.astuple(value) if isinstance(value, msgspec.Struct) else value
    if isinstance(inner, Mapping):
        inner = (*inner, *inner.values())
    parts = inner if isinstance(inner, tuple | list) else ()
    return sys.getsizeof(value) + sum(map(size_of, filter(None, parts)))


def _read(
    request: ApiRequest,
    read: Callable[[Raw], T],
    is_dense: bool,  # noqa: FBT001 -- called at once
    body: bytes | bytearray,
) -> tuple[ListMeta, list[T]]:
    try:
        page, items = read_page(body, one=is_dense)
        return page, [read(item) for item in items]
    except MalformedText as error:
        if not is_dense:
            raise
        raise EndlessList(f"{request.what}: {error}") from error


def _skipped(request: ApiRequest, error: AnswerTooLong) -> ListMeta:
    """Skip an object that no API server with etcd's own limits can hold.

    To fail would hide all other objects. An Allocate for this one finds it absent.
    """
    try:
        page = read_page_head(error.beginning)
    except MalformedText:
        raise error from None
    log.error("kube.object_too_long", resource=request.resource, err=str(error))
    return page


# Reads a watch: JSON frames, one a line, from an answer that lasts for minutes.

LINE_LIMIT = BODY_LIMIT
"""Bytes of a frame. No API server with etcd's own limits sends a longer one: the watch breaks, and
when it has broken several times the pods are listed, without such an object."""

SHORTEST, LONGEST = 300.0, 600.0
"""Seconds between which the server ends a watch, at random."""
GRACE = 30.0
"""Seconds after which the agent ends a watch that the server should have ended."""
SILENCE = 150.0
"""Seconds without a byte, after which the connection is dead: an idle server sends a bookmark after
120 s and then every 60 s."""

OPENED = "OPENED"
"""The kind of a first frame that the agent adds: the watch is open, and there is no object."""


async def frames(
    session: KubeSession, request: ApiRequest, read: Callable[[str, Raw], T]
) -> AsyncIterator[tuple[str, T | None]]:
    """Yield OPENED, then frames until the server ends the watch or is silent for too long.

    A frame is its kind (ADDED, MODIFIED, DELETED or BOOKMARK) and its object as read. `read` gets
    the kind and the object; for long ones it runs on a thread. Raises ApiGone and other
    ApiErrors: for an ERROR frame, a broken connection, or a MalformedText of `read`.
    """
    lasting = session.random.uniform(SHORTEST, LONGEST)
    options = (
        ("watch", "1"),
        ("allowWatchBookmarks", "true"),
        ("timeoutSeconds", str(max(1, round(lasting)))),
    )
    request = msgspec.structs.replace(request, query=(*request.query, *options))
    over_at = loop_time() + lasting + GRACE

    async with session.stream(request) as body:
        yield OPENED, None
        while True:
            try:
                async with asyncio.timeout(min(SILENCE, over_at - loop_time())):
                    line = await body.readuntil(b"\n", max_size=LINE_LIMIT)
            except TimeoutError:
                log.info("kube.watch_silent", resource=request.resource, silence=SILENCE)
                return

            if not line.endswith(b"\n"):  # the watch has ended
                return
            session.received.add(request.resource, amount=len(line))
            if line.strip():
                yield await aside(line, request, functools.partial(_frame, request, read))


def _frame(request: ApiRequest, read: Callable[[str, Raw], T], line: Raw) -> tuple[str, T | None]:
    kind, obj = read_frame(line)
    if kind == "ERROR":
        raise error_frame(request.what, read_object(obj))
    return kind, read(kind, obj)


# The ports NodeApi and PodApi over the API server.

JSON_PATCH = "application/json-patch+json"


class KubeNode:
    """This Node at the API server (port NodeApi), and its condition."""

    def __init__(self, session: KubeSession, node: str) -> None:
        self._session = session
        self._node = node

    async def watch_node(self) -> AsyncIterator[NodeView | None]:
        """Send one WATCH by name without a version: the server first sends the present Node."""
        query = (("fieldSelector", f"metadata.name={self._node}"),)
        request = ApiRequest("watch", "nodes", path_of("nodes"), query=query, accept=METADATA_ONLY)
        is_shown = False
        async for kind, node in frames(self._session, request, _shown):
            # A bookmark says nothing, but the first one shows that there is no Node before it.
            if kind != OPENED and not (kind == "BOOKMARK" and is_shown):
                is_shown = True
                yield node

    async def get_node(self) -> NodeView | None:
        """Send one GET; without a version the server answers from its storage, not from a cache."""
        request = ApiRequest("get", "nodes", path_of("nodes", self._node), accept=METADATA_ONLY)
        try:
            return await self._session.fetch(request, read_node)
        except ApiNotFound:
            return None

    async def annotate_node(
        self, annotations: Mapping[str, str | None], version: str = ""
    ) -> NodeView:
        """Send one merge patch of these annotations.

        With a resourceVersion, ApiConflict is raised if the Node has another one.
        """
        metadata: dict[str, object] = {"annotations": dict(annotations)}
        if version:
            metadata["resourceVersion"] = version
        request = self._patch({"metadata": metadata}, MERGE_PATCH)
        return await self._session.fetch(request, read_node)

    async def release_lock(self, key: str, value: str) -> None:
        """Send one JSON patch: nothing changes unless annotation `key` is exactly `value`."""
        pointer = "/metadata/annotations/" + key.replace("~", "~0").replace("/", "~1")
        body = (
            {"op": "test", "path": pointer, "value": value},
            {"op": "remove", "path": pointer},
        )
        await self._session.call(self._patch(body, JSON_PATCH))

    async def set_condition(self, condition: NodeCondition) -> None:
        """Create or replace the condition of its type."""
        since = encode_stamp(condition.since)
        entry = {
            "type": condition.kind,
            "status": str(condition.status),
            "reason": condition.reason,
            "message": condition.message,
            "lastHeartbeatTime": since,
            "lastTransitionTime": since,
        }
        await self.patch_condition(entry)

    async def patch_condition(self, entry: Mapping[str, str]) -> None:
        """Send one strategic merge patch of one condition; `$patch: delete` removes it."""
        path = path_of("nodes", self._node, "status")
        body = {"status": {"conditions": [entry]}}
        request = ApiRequest("patch", "nodes/status", path, (), body, STRATEGIC_PATCH)
        await self._session.call(request)

    def _patch(
        self, body: Mapping[str, object] | Sequence[object], content_type: str
    ) -> ApiRequest:
        path = path_of("nodes", self._node)
        return ApiRequest("patch", "nodes", path, (), body, content_type, METADATA_ONLY)


class KubePods:
    """The pods of this node at the API server (port PodApi).

    `resource` is the extended resource whose requests the views count.
    """

    def __init__(self, session: KubeSession, node: str, resource: str) -> None:
        self._session = session
        self._lists = Lists(session)
        self._node = node
        self._selector = ("fieldSelector", f"spec.nodeName={node}")
        self._resource = resource

    async def list_pods(self) -> PodList:
        """Send one LIST, answered from the server's storage, in as many pages as needed."""
        request = ApiRequest("list", "pods", path_of("pods"), query=(self._selector,))
        version, pods = await self._lists.fetch(request, lambda item: self._view(read_object(item)))
        return PodList(tuple(pod for pod in pods if pod is not None), version)

    async def get_pod(self, namespace: str, name: str) -> PodView | None:
        """Send one GET; without a version the server answers from its storage, not from a cache."""
        path = path_of("namespaces", namespace, "pods", name)
        request = ApiRequest("get", "pods", path)
        try:
            # As Raw, as in a list: many braces in a text of its tenant are no values.
            pod = await self._session.fetch(
                request, lambda body: decode_pod(read_object(msgspec.Raw(body)), self._resource)
            )
        except ApiNotFound:
            return None
        return pod if pod.node == self._node else None

    async def watch_pods(self, resource_version: str) -> AsyncIterator[PodChange]:
        """Send one WATCH with bookmarks; a first change of the requested version: it is open."""
        query = (self._selector, ("resourceVersion", resource_version))
        request = ApiRequest("watch", "pods", path_of("pods"), query=query)
        async for _, change in frames(self._session, request, self._change):
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
        content = read_object(obj)
        pod = None if kind == "BOOKMARK" else self._view(content)
        version = inside(content, "metadata").get("resourceVersion")
        if not isinstance(version, str):
            raise MalformedText("an object of the answer has no resourceVersion")
        return PodChange(version, pod, deleted=kind == "DELETED")

    def _view(self, obj: Mapping[str, Any]) -> PodView | None:
        try:
            return decode_pod(obj, self._resource)
        except MalformedText as error:
            log.warning("kube.pod_unreadable", err=str(error))
            return None


def read_node(body: Raw) -> NodeView:
    """Read a Node. Raises MalformedText."""
    return decode_node(read_object(body))


def _shown(kind: str, obj: Raw) -> NodeView | None:
    """The Node in one frame; None when it was deleted, or in a bookmark. Raises MalformedText."""
    return read_node(obj) if kind in {"ADDED", "MODIFIED"} else None
