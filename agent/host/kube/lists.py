"""A LIST of any size, within a bound of memory: whole where that is enough, else part by part."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import structlog

from agent.codec.narrow import ListPage, Raw, read_page, read_page_head
from agent.core.errors import ApiError, ApiGone, MalformedText
from agent.host.kube import session as sessions
from agent.host.kube.session import AnswerTooLong, ApiRequest, KubeSession

log = structlog.get_logger(__name__)
T = TypeVar("T")

PAGE_LIMIT = 8 * 1024 * 1024
"""Bytes of an answer with several objects; one object alone may have BODY_LIMIT."""
LIMITS: Final = (0, 64, 16, 4, 1)
"""Objects in an answer; 0: all of them.

All at once is the first thing asked for: servers 1.31 to 1.33 answer that from their cache by the
pods' node, and a part of a list from etcd, by looking at every pod of the cluster (kubernetes
apiserver/pkg/storage/cacher/delegator.go, shouldDelegateList).
"""
AFTER_ALL: Final = 3
"""The place in LIMITS behind an answer with all that was too long: one of four pods rarely is."""


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectList(Generic[T]):
    """Objects as they were read, and the version that they are of."""

    version: str
    items: tuple[T, ...]


class Lists:
    """LISTs of one kind. How many objects an answer may have is learnt from those before.

    An answer that is too long is asked for again with fewer objects, and a short one is followed by
    one with more; the server takes another `limit` with the same token (its own test of lists does
    nothing else: test/e2e/apimachinery/chunking.go). Not `whole`: parts are asked for at once.
    """

    def __init__(self, session: KubeSession, *, whole: bool = True) -> None:
        self._session = session
        self._most = 0 if whole else 1
        """The place in LIMITS that a list of few bytes begins with."""
        self._place = self._most

    async def fetch(self, request: ApiRequest, read: Callable[[Raw], T]) -> ObjectList[T]:
        """All objects, as read; 10 s an answer. Raises ApiError.

        A server that forgot the list in the middle is asked anew, once.
        """
        try:
            return await self._all(request, read)
        except ApiGone:
            return await self._all(request, read)

    async def _all(self, request: ApiRequest, read: Callable[[Raw], T]) -> ObjectList[T]:
        """Only what was read is kept, of all the parts."""
        found: list[T] = []
        rest = version = ""
        size = 0
        while True:
            page, items, length = await self._part(request, rest, read)
            found += items
            size += length
            version = version or page.version
            rest = page.rest
            if not rest:
                break
        if size < PAGE_LIMIT // 2:
            self._place = self._most
        return ObjectList(version, tuple(found))

    async def _part(
        self, request: ApiRequest, rest: str, read: Callable[[Raw], T]
    ) -> tuple[ListPage, list[T], int]:
        """One part, what was read of it, and its bytes."""
        while True:
            limit = LIMITS[self._place]
            asked = dataclasses.replace(request, query=(*request.query, *_options(limit, rest)))
            at_most = sessions.BODY_LIMIT if limit == 1 else PAGE_LIMIT
            try:
                body = await self._session.call(asked, at_most)
            except AnswerTooLong as error:
                if limit == 1:
                    return _passed_over(asked, error), [], at_most
                self._place = max(AFTER_ALL, self._place + 1)
                continue
            page, items = await sessions.aside(body, functools.partial(_read, asked, read))
            if page.rest and len(body) < PAGE_LIMIT // 4:
                self._place = max(1, self._place - 1)
            return page, items, len(body)


def _options(limit: int, rest: str) -> tuple[tuple[str, str], ...]:
    asked = (("limit", str(limit or "")), ("continue", rest))
    return tuple((name, text) for name, text in asked if text)


def _read(request: ApiRequest, read: Callable[[Raw], T], body: Raw) -> tuple[ListPage, list[T]]:
    try:
        page = read_page(body)
        return page, [read(item) for item in page.items]
    except MalformedText as error:
        raise ApiError(f"{request.what}: {error}") from error


def _passed_over(request: ApiRequest, error: AnswerTooLong) -> ListPage:
    """Go on behind an object that no API server with etcd's own limits can hold.

    It could blind the agent for all others. The kubelet's question for it finds it absent.
    """
    try:
        page = read_page_head(error.beginning)
    except MalformedText:
        raise error from None
    log.error("kube.object_too_long", resource=request.resource, err=str(error))
    return page
