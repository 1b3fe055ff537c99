"""Reads a watch: JSON frames, one a line, from an answer that lasts for minutes."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

import msgspec
import structlog

from agent.codec.narrow import Raw, read_frame, read_object
from agent.core.errors import ApiError, MalformedText
from agent.host.kube.session import BODY_LIMIT, ApiRequest, Chunks, KubeSession, aside
from agent.host.kube.translate import error_frame

log = structlog.get_logger(__name__)

T = TypeVar("T")

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
