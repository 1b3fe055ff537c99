"""Fetches a LIST of any size within bounded memory: at once if it is small, else in pages."""

import functools
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import msgspec
import structlog

from agent.codec.narrow import ListPage, Raw, read_page, read_page_head
from agent.core.errors import ApiError, ApiGone, MalformedText
from agent.host.kube import session as sessions
from agent.host.kube.session import AnswerTooLong, ApiRequest, KubeSession

log = structlog.get_logger(__name__)
T = TypeVar("T")

PAGE_LIMIT = 8 * 1024 * 1024
"""Bytes of an answer with several objects; an answer with one object may have BODY_LIMIT."""
LIMITS: Final = (0, 64, 16, 4, 1)
"""Objects in an answer; 0: all of them.

The first request asks for all: servers 1.31 to 1.33 answer it from their cache by the pods' node.
They answer a page from etcd, for which they read every pod of the cluster (kubernetes
apiserver/pkg/storage/cacher/delegator.go, shouldDelegateList).
"""
AFTER_ALL: Final = 3
"""The index in LIMITS after an answer with all was too long: one with four rarely is."""


class ObjectList(msgspec.Struct, Generic[T], frozen=True):
    """The objects of a list, as read, and the list's resourceVersion."""

    version: str
    items: tuple[T, ...]


class Lists:
    """Fetches LISTs of one kind. Earlier answers set how many objects the next one may have.

    After a too long answer it asks again for fewer objects; after a short one it asks for more. The
    server accepts another `limit` with the same token (as its own test of lists does:
    test/e2e/apimachinery/chunking.go). Without `whole` even the first request asks for a page.
    `limits`: objects in an answer, as LIMITS.
    """

    def __init__(
        self, session: KubeSession, *, whole: bool = True, limits: Sequence[int] = LIMITS
    ) -> None:
        self._session = session
        self._limits = limits
        self._most = 0 if whole else 1
        """The index in LIMITS with which a small list begins."""
        self._place = self._most

    async def fetch(self, request: ApiRequest, read: Callable[[Raw], T]) -> ObjectList[T]:
        """Return all objects, as read; each answer has 10 s. Raises ApiError.

        If the server forgets the list between two pages, the list begins again, once.
        """
        try:
            return await self._all(request, read)
        except ApiGone:
            return await self._all(request, read)

    async def _all(self, request: ApiRequest, read: Callable[[Raw], T]) -> ObjectList[T]:
        objects: list[T] = []
        rest = version = ""
        size = 0
        while True:
            page, items, length = await self._page(request, rest, read)
            objects += items
            size += length
            version = version or page.version
            rest = page.rest
            if not rest:
                break
        if size < PAGE_LIMIT // 2:
            self._place = self._most
        return ObjectList(version, tuple(objects))

    async def _page(
        self, request: ApiRequest, rest: str, read: Callable[[Raw], T]
    ) -> tuple[ListPage, list[T], int]:
        """One page, its objects as read, and its length in bytes."""
        while True:
            limit = self._limits[self._place]
            paged = msgspec.structs.replace(request, query=(*request.query, *_options(limit, rest)))
            at_most = sessions.BODY_LIMIT if limit == 1 else PAGE_LIMIT
            try:
                body = await self._session.call(paged, at_most)
            except AnswerTooLong as error:
                if limit == 1:
                    return _skipped(paged, error), [], at_most
                self._place = max(AFTER_ALL, self._place + 1)
                continue
            page, items = await sessions.aside(body, functools.partial(_read, paged, read))
            if page.rest and len(body) < PAGE_LIMIT // 4:
                self._place = max(1, self._place - 1)
            return page, items, len(body)


def _options(limit: int, rest: str) -> tuple[tuple[str, str], ...]:
    options = (("limit", str(limit or "")), ("continue", rest))
    return tuple((name, text) for name, text in options if text)


def _read(request: ApiRequest, read: Callable[[Raw], T], body: Raw) -> tuple[ListPage, list[T]]:
    try:
        page = read_page(body)
        return page, [read(item) for item in page.items]
    except MalformedText as error:
        raise ApiError(f"{request.what}: {error}") from error


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
