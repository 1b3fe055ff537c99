"""A watch: JSON frames, one a line, from an answer that lasts for minutes."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any

import structlog

from agent.core.errors import ApiError
from agent.host.kube.session import Chunks, KubeSession, Request, decode
from agent.host.kube.translate import error_frame

log = structlog.get_logger(__name__)

LINE_LIMIT = 8 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """How long a watch may last and be silent, in seconds.

    The server ends it after a time between `shortest` and `longest`; we, `grace` later. A quiet
    server sends the first bookmark after two minutes and then one each minute: `silence` without a
    byte means that the connection is dead although nobody closed it. The patience with a lock's
    unseen owner rests on it (`core.settlement`).
    """

    shortest: float = 300.0
    longest: float = 600.0
    grace: float = 30.0
    silence: float = 150.0


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One frame: kind is ADDED, MODIFIED, DELETED or BOOKMARK. The first one is OPENED, of ours."""

    kind: str
    obj: Mapping[str, Any]


OPENED = "OPENED"


async def frames(session: KubeSession, request: Request, pace: Pace) -> AsyncIterator[Frame]:
    """OPENED, then frames until the server ends the watch or it was silent for too long.

    Raises ApiGone and others for an ERROR frame, ApiError when the answer breaks off.
    """
    lasting = session.random.uniform(pace.shortest, pace.longest)
    request = dataclasses.replace(
        request, query=(*request.query, ("timeoutSeconds", str(max(1, round(lasting)))))
    )
    over_at = asyncio.get_running_loop().time() + lasting + pace.grace
    lines = Lines(request)
    async with session.stream(request) as chunks:
        yield Frame(OPENED, {})
        while chunk := await _next(chunks, over_at, pace, request):
            session.received.add(request.resource, amount=len(chunk))
            for line in lines.feed(chunk):
                yield _frame(request, line)


async def _next(chunks: Chunks, over_at: float, pace: Pace, request: Request) -> bytes:
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


def _frame(request: Request, line: bytes) -> Frame:
    content = decode(request, line)
    kind, obj = content.get("type"), content.get("object")
    if not isinstance(kind, str) or not isinstance(obj, dict):
        raise ApiError(f"{request.what}: a frame of the watch has no type or no object")
    if kind == "ERROR":
        raise error_frame(request.what, obj)
    return Frame(kind, obj)


class Lines:
    """Cuts arriving bytes into lines of at most 8 MiB."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes. Raises ApiError for one that is too long."""
        head, newline, tail = chunk.rpartition(b"\n")
        if not newline:
            self._keep(chunk)
            return []
        lines = bytes(self._rest + head).split(b"\n")
        self._rest.clear()
        self._keep(tail)
        return [line for line in lines if line.strip()]

    def _keep(self, part: bytes) -> None:
        if len(self._rest) + len(part) > LINE_LIMIT:
            raise ApiError(f"{self._request.what}: a frame of the watch is longer than 8 MiB")
        self._rest += part
