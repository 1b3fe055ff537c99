"""A client of the API server for tests: plain HTTP, and a watch that remembers what it saw."""

import asyncio
import contextlib
import io
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import aiohttp

from agent.kit.cell import Cell

Object = dict[str, Any]
JSON: Final = "application/json"
MERGE: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
STRATEGIC: Final = "application/strategic-merge-patch+json"
_DEADLINE: Final = 20.0
_REFUSED: Final = 400

Refusal = tuple[int, str]
"""Code and reason of a Status."""


class RefusedError(Exception):
    """The API server said no."""

    def __init__(self, answer: "Answer") -> None:
        super().__init__(f"{answer.code} {answer.refusal[1]}: {answer.told[2]}")
        self.code: Final = answer.code


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its code, its headers and the JSON value of its body (or its text)."""

    code: int
    headers: Mapping[str, str]
    body: Any

    @property
    def refusal(self) -> Refusal:
        return self.code, self.body.get("reason", "") if isinstance(self.body, dict) else ""

    @property
    def told(self) -> tuple[int, str, str]:
        """Code, reason and message of a Status."""
        body = self.body if isinstance(self.body, dict) else {"message": self.body}
        return (*self.refusal, body.get("message", ""))


class Api:
    """One user at one API server. `server` is its URL, `context` None for plain HTTP."""

    def __init__(self, server: str, token: str, context: ssl.SSLContext | None) -> None:
        self._session = aiohttp.ClientSession(
            base_url=server,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            connector=aiohttp.TCPConnector(ssl=context or False, limit=0),
        )

    async def close(self) -> None:
        await self._session.close()

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        kind: str | None = None,
        accept: str = JSON,
        query: Mapping[str, str] | None = None,
    ) -> Answer:
        """One request; `kind` is the Content-Type (a merge patch's for PATCH).

        A body of bytes is sent as it is. Raises aiohttp.ClientError, TimeoutError: as all others.
        """
        headers = {"Content-Type": kind or (MERGE if method == "PATCH" else JSON), "Accept": accept}
        data = None
        if body is not None:
            data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        request = self._session.request(method, path, data=data, params=query, headers=headers)
        async with asyncio.timeout(_DEADLINE), request as answer:
            text = await answer.text()
            try:
                value = json.loads(text)
            except json.JSONDecodeError:
                value = text
            return Answer(answer.status, dict(answer.headers), value)

    async def have(self, method: str, path: str, body: object = None, **more: Any) -> Object:
        """The object of an answer. Raises RefusedError."""
        answer = await self.ask(method, path, body, **more)
        if answer.code >= _REFUSED:
            raise RefusedError(answer)
        found: Object = answer.body
        return found

    async def told(
        self, method: str, path: str, body: object = None, **more: Any
    ) -> tuple[int, str, str]:
        """Code, reason and message of an answer that must be a refusal."""
        answer = await self.ask(method, path, body, **more)
        assert answer.code >= _REFUSED, answer.body
        return answer.told

    async def refused(self, method: str, path: str, body: object = None, **more: Any) -> Refusal:
        """Code and reason of the same."""
        return (await self.told(method, path, body, **more))[:2]

    async def get(self, path: str, **query: str) -> Object:
        return await self.have("GET", path, query=query)

    async def create(self, path: str, body: object) -> Object:
        return await self.have("POST", path, body)

    async def patch(self, path: str, body: object, kind: str = MERGE) -> Object:
        """Patch, by default with a merge patch."""
        return await self.have("PATCH", path, body, kind=kind)

    async def delete(self, path: str, grace: int | None = None) -> Object:
        body = None if grace is None else {"gracePeriodSeconds": grace}
        return await self.have("DELETE", path, body)

    @contextlib.asynccontextmanager
    async def watch(
        self, path: str, accept: str = JSON, **query: str
    ) -> AsyncIterator["WatchEvents"]:
        """The events of one watch, for as long as the block runs. Raises RefusedError."""
        endless = aiohttp.ClientTimeout(total=None, sock_read=None)
        query, headers = {"watch": "1", **query}, {"Accept": accept}
        async with self._session.get(
            path, params=query, headers=headers, timeout=endless
        ) as answer:
            if answer.status >= _REFUSED:
                raise RefusedError(Answer(answer.status, answer.headers, await answer.json()))
            yield WatchEvents(answer)


class WatchEvents:
    """The events of a watch, one by one."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._chunks: Final = answer.content.iter_any()
        self._buffer = b""

    def __aiter__(self) -> "WatchEvents":
        return self

    async def __anext__(self) -> Object:
        while b"\n" not in self._buffer:
            self._buffer += await anext(self._chunks)
        line, _, self._buffer = self._buffer.partition(b"\n")
        event: Object = json.loads(line)
        return event

    async def take(self, count: int) -> list[Object]:
        async with asyncio.timeout(_DEADLINE):
            return [await anext(self) for _ in range(count)]

    async def rest(self) -> list[Object]:
        """All events until the server ends the watch. Raises TimeoutError."""
        async with asyncio.timeout(_DEADLINE):
            return [event async for event in self]


@dataclass(eq=False, slots=True)
class Watched:
    """The objects as one watch has told them, named `namespace/name`, or by name alone."""

    objects: dict[str, Object] = field(default_factory=dict)
    events: Cell[int] = field(default_factory=lambda: Cell(0))

    def take(self, what: str, item: Object) -> None:
        """One more event: its type and its object."""
        if what == "DELETED":
            self.objects.pop(key_of(item), None)
        else:
            self.objects[key_of(item)] = item
        self.events.set(self.events.value + 1)

    async def until(self, holds: Callable[[], object], within: float, what: str) -> None:
        try:
            async with asyncio.timeout(within):
                await self.events.until(lambda _: bool(holds()))
        except TimeoutError:
            raise TimeoutError(f"{what}: not within {within:g} s") from None


def key_of(item: Object) -> str:
    """`namespace/name`, or the name of what has no namespace."""
    metadata = item["metadata"]
    namespace = metadata.get("namespace")
    return f"{namespace}/{metadata['name']}" if namespace else str(metadata["name"])


def notes_of(item: Object) -> Mapping[str, str]:
    """The annotations of an object."""
    noted: Mapping[str, str] = item["metadata"].get("annotations") or {}
    return noted


W = TypeVar("W", bound=Watched)


@contextlib.asynccontextmanager
async def watching(api: Api, path: str, watched: W) -> AsyncIterator[W]:
    """List and watch until the block ends; opened again after the server was away."""
    async with asyncio.TaskGroup() as group:
        follower = group.create_task(_follow(api, path, watched))
        try:
            yield watched
        finally:
            follower.cancel()


async def _follow(api: Api, path: str, watched: Watched) -> None:
    while True:
        try:
            listed = await api.get(path)
            present = {key_of(item): item for item in listed["items"]}
            for key in watched.objects.keys() - present.keys():
                watched.take("DELETED", watched.objects[key])
            for key, item in present.items():
                if watched.objects.get(key) != item:
                    watched.take("ADDED", item)
            version = listed["metadata"]["resourceVersion"]
            async with api.watch(path, resourceVersion=version) as events:
                async for event in events:
                    if event["type"] == "ERROR":
                        break
                    watched.take(event["type"], event["object"])
        except (aiohttp.ClientError, OSError, RefusedError):
            await asyncio.sleep(0.1)
