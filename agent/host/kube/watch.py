"""A watch: JSON frames, one a line, from an answer that lasts for minutes."""

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

import structlog

from agent.codec.narrow import Raw, read_frame, read_object
from agent.core.errors import ApiError, MalformedText
from agent.host.kube.session import BODY_LIMIT, ApiRequest, Chunks, KubeSession, aside
from agent.host.kube.translate import error_frame

log = structlog.get_logger(__name__)

T = TypeVar("T")

LINE_LIMIT = BODY_LIMIT


@dataclasses.dataclass(frozen=True, slots=True)
class WatchTimes:
    """How long a watch may last and be silent, in seconds.

    The server ends it after a time between `shortest` and `longest`; we, `grace` later. A quiet
    server sends the first bookmark after two minutes and then one each minute: `silence` without a
    byte means that the connection is dead although nobody closed it.
    """

    shortest: float = 300.0
    longest: float = 600.0
    grace: float = 30.0
    silence: float = 150.0


@dataclasses.dataclass(frozen=True, slots=True)
class WatchFrame(Generic[T]):
    """One frame: kind is ADDED, MODIFIED, DELETED or BOOKMARK, `obj` what was read of the object.

    The first one is OPENED, of ours, and has None.
    """

    kind: str
    obj: T


OPENED = "OPENED"


async def frames(
    session: KubeSession, request: ApiRequest, pace: WatchTimes, read: Callable[[str, Raw], T]
) -> AsyncIterator[WatchFrame[T | None]]:
    """OPENED, then frames until the server ends the watch or it was silent for too long.

    `read` is given the kind and the object, long ones on a thread. Raises ApiGone and others for an
    ERROR frame, ApiError when the answer breaks off or MalformedText was raised.
    """
    lasting = session.random.uniform(pace.shortest, pace.longest)
    request = dataclasses.replace(
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
    """Cuts arriving bytes into lines. One that is longer than any object is passed over.

    No API server with etcd's own limits sends it; ending the watch would show it again and again.
    """

    def __init__(self, request: ApiRequest) -> None:
        self._request = request
        self._rest = bytearray()
        self._is_over = False

    def feed(self, chunk: bytes) -> list[bytearray]:
        """The lines that `chunk` completes."""
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
