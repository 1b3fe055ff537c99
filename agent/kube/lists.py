"""Lists in pages, and watches."""

import asyncio
import functools
import math
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, Generic, TypeVar

import msgspec
import structlog

from agent.errors import ApiError, ApiGone, MalformedText
from agent.kube import client as sessions
from agent.kube.client import (
    BODY_LIMIT,
    AnswerTooLong,
    ApiRequest,
    Chunks,
    KubeSession,
    aside,
    error_frame,
)
from agent.kube.narrow import (
    MOST_OBJECTS,
    ListPage,
    Raw,
    has_many_values,
    read_frame,
    read_object,
    read_page,
    read_page_head,
)

# Fetches a LIST of any size within bounded memory: at once if it is small, else in pages.

log = structlog.get_logger(__name__)
T = TypeVar("T")

PAGE_LIMIT = 8 * 1024 * 1024
"""Bytes of an answer with several objects; an answer with one object may have BODY_LIMIT."""
LIMITS: Final = (0, 500, 64, 16, 4, 1)
"""Objects in an answer; 0: all of them. 500 as in kubectl: 5,000 Nodes are 10 answers.

The first request asks for all: servers 1.31 to 1.33 answer it from their cache by the pods' node.
They answer a page from etcd, for which they read every pod of the cluster (kubernetes
apiserver/pkg/storage/cacher/delegator.go, shouldDelegateList).
"""
AFTER_ALL: Final = 4
"""The index in LIMITS after an answer with many was too long: one with four rarely is."""
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


class ObjectList(msgspec.Struct, Generic[T], frozen=True):
    """The objects of a list, as read, and the list's resourceVersion."""

    version: str
    items: tuple[T, ...]


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
        self._most = 0 if whole else 1
        """The index in LIMITS with which a small list begins."""
        self._place = self._most

    async def fetch(self, request: ApiRequest, read: Callable[[Raw], T]) -> ObjectList[T]:
        """Return all objects, as read; each answer has 10 s. Raises ApiError.

        If the server forgets the list between two pages, the list begins again, once.
        """
        budget = self._budget()
        try:
            return await self._all(request, read, budget)
        except ApiGone:
            return await self._all(request, read, budget)

    async def _all(
        self, request: ApiRequest, read: Callable[[Raw], T], budget: ListBudget
    ) -> ObjectList[T]:
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
            self._place = self._most
        return ObjectList(version, tuple(objects))

    async def _page(
        self, request: ApiRequest, rest: str, read: Callable[[Raw], T], budget: ListBudget
    ) -> tuple[ListPage, list[T], int]:
        """One page, its objects as read, and how many were asked for."""
        while True:
            limit = LIMITS[self._place]
            paged = msgspec.structs.replace(request, query=(*request.query, *_options(limit, rest)))
            at_most = sessions.BODY_LIMIT if limit == 1 else PAGE_LIMIT
            try:
                body = await self._session.call(paged, at_most)
            except AnswerTooLong as error:
                body = bytearray()
                if limit == 1:  # each counts as odd
                    return _skipped(paged, error), [], limit
            budget.bytes -= len(body) or at_most
            # Not for the agent itself: with one pod full of commas a tenant would slow each LIST.
            is_dense = budget.memory < math.inf and has_many_values(body)
            if limit != 1 and (is_dense or not body):
                self._place = max(AFTER_ALL, self._place + 1)
                continue
            read_all = functools.partial(_read, paged, read, is_dense)
            page, items = await sessions.aside(body, read_all)
            budget.objects -= len(items)
            if budget.memory < math.inf:
                budget.memory -= sum(map(size_of, items))
            # It asks for more only if as many objects of this length are half a page.
            larger = LIMITS[max(1, self._place - 1)]
            if page.rest and len(body) * larger < (limit or larger) * PAGE_LIMIT // 2:
                self._place = max(1, self._place - 1)
            return page, items, limit


def size_of(value: object) -> int:
    """The bytes of memory that a decoded value takes, with all that it holds."""
    inner: object = msgspec.structs.astuple(value) if isinstance(value, msgspec.Struct) else value
    if isinstance(inner, Mapping):
        inner = (*inner, *inner.values())
    parts = inner if isinstance(inner, tuple | list) else ()
    return sys.getsizeof(value) + sum(map(size_of, filter(None, parts)))


def _options(limit: int, rest: str) -> tuple[tuple[str, str], ...]:
    options = (("limit", str(limit or "")), ("continue", rest))
    return tuple((name, text) for name, text in options if text)


def _read(
    request: ApiRequest,
    read: Callable[[Raw], T],
    is_dense: bool,  # noqa: FBT001 -- called at once
    body: bytearray,
) -> tuple[ListPage, list[T]]:
    try:
        page = read_page(body, one=is_dense)
        return page, [read(item) for item in page.items]
    except MalformedText as error:
        kind = EndlessList if is_dense else ApiError
        raise kind(f"{request.what}: {error}") from error


def _skipped(request: ApiRequest, error: AnswerTooLong) -> ListPage:
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


class WatchTimes(msgspec.Struct, frozen=True):
    """How long a watch may last and be silent, in seconds.

    The server ends it after a random time between `shortest` and `longest`; the agent does so
    `grace` later. An idle server sends a bookmark after 120 s and then every 60 s. So `silence`
    without a byte means that the connection is dead.
    """

    shortest: float = 300.0
    longest: float = 600.0
    grace: float = 30.0
    silence: float = 150.0


class WatchFrame(msgspec.Struct, Generic[T], frozen=True):
    """One frame: `kind` is ADDED, MODIFIED, DELETED or BOOKMARK; `obj` is the object as read.

    The agent adds a first frame of kind OPENED, whose `obj` is None.
    """

    kind: str
    obj: T


OPENED = "OPENED"


async def frames(
    session: KubeSession, request: ApiRequest, pace: WatchTimes, read: Callable[[str, Raw], T]
) -> AsyncIterator[WatchFrame[T | None]]:
    """Yield OPENED, then frames until the server ends the watch or is silent for too long.

    `read` gets the kind and the object; for long ones it runs on a thread. Raises ApiGone and other
    ApiErrors: for an ERROR frame, a broken connection, or a MalformedText of `read`.
    """
    lasting = session.random.uniform(pace.shortest, pace.longest)
    request = msgspec.structs.replace(
        request, query=(*request.query, ("timeoutSeconds", str(max(1, round(lasting)))))
    )
    over_at = asyncio.get_running_loop().time() + lasting + pace.grace
    lines = WatchLines(request)
    async with session.stream(request) as chunks:
        yield WatchFrame(OPENED, None)
        while chunk := await _next(chunks, over_at, pace, request):
            session.received.add(request.resource, amount=len(chunk))
            for line in lines.feed(chunk):
                yield await aside(line, functools.partial(_frame, request, read))


async def _next(chunks: Chunks, over_at: float, pace: WatchTimes, request: ApiRequest) -> bytes:
    """The next bytes; none when the watch is over."""
    left = over_at - asyncio.get_running_loop().time()
    reading = asyncio.timeout(min(pace.silence, left))
    try:
        async with reading:
            return await chunks.readany()
    except TimeoutError:
        if not reading.expired():
            raise
        log.info("kube.watch_silent", resource=request.resource, silence=pace.silence)
        return b""


def _frame(request: ApiRequest, read: Callable[[str, Raw], T], line: Raw) -> WatchFrame[T | None]:
    try:
        kind, obj = read_frame(line)
        if kind != "ERROR":
            return WatchFrame(kind, read(kind, obj))
        status = read_object(obj)
    except MalformedText as error:
        raise ApiError(f"{request.what}: {error}") from error
    raise error_frame(request.what, status)


class WatchLines:
    """Splits arriving bytes into lines; skips a line that is longer than any object.

    No API server with etcd's own limits sends one. If it ended the watch, it would come again in
    the next watch.
    """

    def __init__(self, request: ApiRequest) -> None:
        self._request = request
        self._rest = bytearray()
        self._is_over = False

    def feed(self, chunk: bytes) -> list[bytearray]:
        """Return the lines that `chunk` completes."""
        head, newline, tail = chunk.rpartition(b"\n")
        if not newline:
            self._keep(chunk)
            return []
        self._rest += head
        lines = self._rest.split(b"\n")
        if self._is_over:
            del lines[0]
            log.error("kube.frame_too_long", resource=self._request.resource, limit=LINE_LIMIT)
        self._is_over = False
        self._rest = bytearray()
        self._keep(tail)
        return [line for line in lines if line.strip()]

    def _keep(self, part: bytes) -> None:
        if self._is_over:
            return
        self._rest += part
        if len(self._rest) > LINE_LIMIT:
            self._is_over = True
            self._rest.clear()
