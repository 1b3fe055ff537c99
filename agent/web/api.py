"""The read API `/api/v1`: JSON with an ETag, in parts, or as a stream of events."""

import asyncio
import contextlib
import datetime as dt
import hashlib
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from agent.codec.status_document import GpuStatus, encode, envelope, names_of
from agent.core.errors import cap
from agent.web import aiohttp_server as web
from agent.web.readers import Readers
from agent.web.status import (
    StatusFacts,
    allocations_of,
    container_histories_of,
    entries_of,
    gpus_of,
    node_of,
    status_of,
)

PREFIX: Final = "/api/v1/"
KEPT: Final = 0.5
"""Seconds for which an answer is reused: many readers cost the loop no more than one."""
LOOK: Final = 1.0
"""Seconds between two looks of a stream for something new."""
STREAM_SECONDS: Final = 25.0
"""Seconds after which a stream ends. A browser's EventSource opens the next one by itself."""
STREAMS: Final = 16
"""Streams at once."""
LARGEST: Final = 500
"""Items of a list in one answer, unless `limit` asks for fewer."""

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"

_PARTS: Final[Mapping[str, tuple[str, Callable[[StatusFacts], object]]]] = {
    "status": ("Status", status_of),
    "node": ("Node", node_of),
    "gpus": ("Gpus", gpus_of),
    "allocations": ("Allocations", allocations_of),
    "container-history": ("ContainerHistories", container_histories_of),
    "refusals": ("Refusals", lambda facts: entries_of(facts.refusals)),
    "changes": ("Changes", lambda facts: entries_of(facts.changes)),
    "settings": ("Settings", lambda facts: facts.settings()),
}
"""The documents by the last part of their path, each with its kind."""


class _Made(msgspec.Struct, frozen=True):
    """A document before it is cut. `at`: the wall time; `until`: the loop time of its reuse."""

    data: object
    at: dt.datetime
    until: float


class _Answer(msgspec.Struct, frozen=True):
    """A document's data as JSON, made of `made`. `following`: where the rest of a list begins."""

    data: bytes
    etag: str
    following: str
    made: _Made


class NoDocument(Exception):  # noqa: N818 -- an answer
    """There is no document to send. `status`: of HTTP. The text says what to do."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ReadApi:
    """Answers GET below `/api/v1/`. `facts` is read for each answer, without waiting."""

    def __init__(self, facts: Callable[[], StatusFacts | None], readers: Readers) -> None:
        self._facts = facts
        self._readers = readers
        self._documents: dict[str, _Made] = {}
        self._answers: dict[str, _Answer] = {}
        self._streams = 0
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End the streams, so that nobody waits for them."""
        self._stopping.set()

    def covers(self, path: str) -> bool:
        """Whether it answers this path."""
        return path.startswith(PREFIX)

    async def answer(
        self, request: web.BaseRequest, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Answer a GET or HEAD. `headers` go with a stream's head."""
        refused = self._readers.refused(request)
        if refused is not None:
            return refused
        try:
            return await self._sent(request, headers)
        except NoDocument as error:
            return web.Response(status=error.status, text=f"{error}\n")

    async def _sent(
        self, request: web.BaseRequest, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Send the document, what is new of it, or its stream. Raises NoDocument."""
        name, _, gpu = request.path.removeprefix(PREFIX).partition("/")
        if name not in _PARTS or (gpu and name != "gpus"):
            there = " ".join(PREFIX + part for part in _PARTS)
            raise NoDocument(404, f"No such document. There is: {there} {PREFIX}gpus/GPU")
        answer = self._made(name, gpu, request.query)
        if "watch" in request.query and request.method == "GET":
            return await self._stream(request, name, gpu, headers)
        if answer.etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers={"ETag": answer.etag})
        body = envelope(_kind(name, gpu), answer.data, answer.made.at, answer.following)
        return web.Response(body=body, content_type=JSON, headers={"ETag": answer.etag})

    def _made(self, name: str, gpu: str, query: Mapping[str, str]) -> _Answer:
        """The document, or the part that was asked for. Raises NoDocument."""
        first, limit = _number(query, "continue", 0), _number(query, "limit", LARGEST)
        made = self._document(name)
        if gpu:
            return _encoded(made, _named(made.data, gpu))
        if not isinstance(made.data, tuple):
            first, limit = 0, LARGEST
        whole = first == 0 and limit >= LARGEST
        kept = self._answers.get(name) if whole else None
        if kept is not None and kept.made is made:
            return kept
        answer = _encoded(made, made.data, first, limit)
        if whole:
            self._answers[name] = answer
        return answer

    def _document(self, name: str) -> _Made:
        """The document, made anew or of the last KEPT seconds. Raises NoDocument."""
        now = asyncio.get_running_loop().time()
        made = self._documents.get(name)
        if made is None or made.until <= now:
            facts = self._facts()
            if facts is None:
                raise NoDocument(503, "This agent stands by or is still loading; ask again.")
            made = _Made(_PARTS[name][1](facts), facts.now, now + KEPT)
            self._documents[name] = made
        return made

    async def _stream(
        self, request: web.BaseRequest, name: str, gpu: str, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Send the document when it changes, for STREAM_SECONDS; the id of an event is its ETag.

        With `watch=etag` an event has no more than that.
        """
        if self._streams >= STREAMS:
            text = f"There are {STREAMS} streams already; ask again without watch=1."
            raise NoDocument(503, text)
        self._streams += 1
        try:
            response = web.StreamResponse(headers={**headers, "Content-Type": EVENTS})
            response.force_close()
            await response.prepare(request)
            await response.write(b"retry: 500\n\n")
            seen = request.headers.get("Last-Event-ID", "")
            end = asyncio.get_running_loop().time() + STREAM_SECONDS
            while asyncio.get_running_loop().time() < end:
                try:
                    answer = self._made(name, gpu, request.query)
                except NoDocument:  # the GPU has left the node; the next request is told so
                    break
                if answer.etag != seen:
                    seen = answer.etag
                    body = seen.encode()
                    if request.query["watch"] != "etag":
                        kind = _kind(name, gpu)
                        body = envelope(kind, answer.data, answer.made.at, answer.following)
                    await response.write(b"id: %s\ndata: %s\n\n" % (seen.encode(), body))
                if await self._is_over(request):
                    break
            await response.write_eof()
            return response
        finally:
            self._streams -= 1

    async def _is_over(self, request: web.BaseRequest) -> bool:
        """Wait until the next look; True: the server stops, or the reader has gone."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK):
                await self._stopping.wait()
        return self._stopping.is_set() or request.transport is None


def _encoded(made: _Made, data: object, first: int = 0, limit: int = LARGEST) -> _Answer:
    """The answer; of a list at most `limit` items from `first` on."""
    following = ""
    if isinstance(data, tuple):
        end = first + max(1, min(limit, LARGEST))
        following = str(end) if end < len(data) else ""
        data = data[first:end]
    encoded = encode(data)
    digest = hashlib.blake2b(encoded, digest_size=12, salt=following.encode())
    return _Answer(encoded, f'"{digest.hexdigest()}"', following, made)


def _named(gpus: object, name: str) -> GpuStatus:
    """The GPU of that index or UUID. Raises NoDocument."""
    for gpu in gpus if isinstance(gpus, tuple) else ():
        if isinstance(gpu, GpuStatus) and name in names_of(gpu):
            return gpu
    raise NoDocument(404, f"No GPU of this node is named {cap(name, 64)}.")


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise NoDocument(400, f"{name}={cap(text, 64)} is not a whole number.")
    return int(text)


def _kind(name: str, gpu: str) -> str:
    return "Gpu" if gpu else _PARTS[name][0]
