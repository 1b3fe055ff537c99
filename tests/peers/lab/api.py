"""A client of the API server for tests: plain HTTP, and a watch that remembers what it saw."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from agent.sandbox.lab.cluster import Pulse

Object = dict[str, Any]
MERGE: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
STRATEGIC: Final = "application/strategic-merge-patch+json"
_DEADLINE: Final = 20.0


class RefusedError(Exception):
    """The API server said no."""

    def __init__(self, code: int, status: Object) -> None:
        super().__init__(f"{code} {status.get('reason')}: {status.get('message')}")
        self.code: Final = code
        self.status: Final = status


class Api:
    """One user at one API server. `server` is its URL, `context` None for plain HTTP."""

    def __init__(self, server: str, token: str, context: ssl.SSLContext | None) -> None:
        self.server: Final = server
        self._session = aiohttp.ClientSession(
            base_url=server,
            headers={"Authorization": f"Bearer {token}"},
            connector=aiohttp.TCPConnector(ssl=context or False, limit=0),
        )

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    async def get(self, path: str, **query: str) -> Object:
        """Read. Raises RefusedError, aiohttp.ClientError, TimeoutError: as all others do."""
        return await self.call("GET", path, query=query)

    async def create(self, path: str, body: object) -> Object:
        """Create in a collection, or post to a subresource."""
        return await self.call("POST", path, body)

    async def replace(self, path: str, body: object) -> Object:
        """Update."""
        return await self.call("PUT", path, body)

    async def patch(self, path: str, body: object, kind: str = MERGE) -> Object:
        """Patch, by default with a merge patch."""
        return await self.call("PATCH", path, body, kind=kind)

    async def delete(self, path: str, grace: int | None = None) -> Object:
        """Delete; `grace` in seconds."""
        return await self.call("DELETE", path, _grace(grace))

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        kind: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Object:
        """One request; the object that the answer holds."""
        data = None if body is None else json.dumps(body)
        async with (
            asyncio.timeout(_DEADLINE),
            self._session.request(
                method, path, data=data, params=query, headers={"Content-Type": kind}
            ) as answer,
        ):
            text = await answer.text()
            try:
                value: Object = json.loads(text)
            except json.JSONDecodeError:
                value = {"message": text}
            if answer.status >= 400:
                raise RefusedError(answer.status, value)
            return value

    async def events(self, path: str, **query: str) -> AsyncIterator[Object]:
        """The events of one watch until the server ends it.

        Raises RefusedError: it was not opened.
        """
        settings = aiohttp.ClientTimeout(total=None, sock_read=None)
        async with self._session.get(
            path, params={"watch": "1", **query}, timeout=settings
        ) as answer:
            if answer.status >= 400:
                raise RefusedError(answer.status, await answer.json())
            buffer = b""
            async for chunk in answer.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    yield json.loads(line)

    async def is_ready(self) -> bool:
        """Whether the server says that it is."""
        try:
            async with asyncio.timeout(2.0), self._session.get("/readyz") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError):
            return False


def _grace(seconds: int | None) -> Object | None:
    return None if seconds is None else {"gracePeriodSeconds": seconds}


@dataclass(frozen=True, slots=True)
class Sighting:
    """One event of a watch; `at` in seconds of the loop's clock."""

    at: float
    type: str
    object: Object


@dataclass(eq=False, slots=True)
class Watched:
    """What one watch has told: the objects as they are, and everything that was seen of them."""

    objects: dict[str, Object] = field(default_factory=dict)
    history: dict[str, list[Sighting]] = field(default_factory=dict)
    pulse: Pulse = field(default_factory=Pulse)

    def take(self, sighting: Sighting) -> None:
        """One more event. Objects are named `namespace/name`, or by name alone."""
        key = key_of(sighting.object)
        self.history.setdefault(key, []).append(sighting)
        if sighting.type == "DELETED":
            self.objects.pop(key, None)
        else:
            self.objects[key] = sighting.object
        self.pulse.beat()

    def when(
        self, key: str, holds: Callable[[Object], bool], *, since: float = 0.0
    ) -> float | None:
        """When an event first showed an object in a state, not before `since`; None: not yet.

        Both are seconds of the loop's clock. An object whose name was used before, or that comes
        into a state twice, needs `since`.
        """
        seen = (one for one in self.history.get(key, ()) if one.at >= since)
        return next((one.at for one in seen if holds(one.object)), None)

    def forget(self) -> None:
        """Forget everything that was seen; the objects stay as they are."""
        self.history.clear()

    async def until(self, holds: Callable[[], object], within: float, what: str) -> None:
        """Return once `holds()` is true; it is looked at after each event.

        Raises TimeoutError: it was not within so many seconds.
        """
        try:
            async with asyncio.timeout(within):
                await self.pulse.until(lambda: bool(holds()))
        except TimeoutError:
            raise TimeoutError(f"{what}: not within {within:g} s") from None


def key_of(item: Object) -> str:
    """`namespace/name`, or the name of what has no namespace."""
    metadata = item["metadata"]
    namespace = metadata.get("namespace")
    return f"{namespace}/{metadata['name']}" if namespace else str(metadata["name"])


@contextlib.asynccontextmanager
async def watching(api: Api, path: str, **query: str) -> AsyncIterator[Watched]:
    """List and watch until the block ends; opened again after the server was away."""
    watched = Watched()
    async with asyncio.TaskGroup() as group:
        follower = group.create_task(_follow(api, path, query, watched))
        try:
            yield watched
        finally:
            follower.cancel()


async def _follow(api: Api, path: str, query: Mapping[str, str], watched: Watched) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            listed = await api.get(path, **query)
            present = {key_of(item): item for item in listed["items"]}
            for key in watched.objects.keys() - present.keys():
                watched.take(Sighting(loop.time(), "DELETED", watched.objects[key]))
            for key, item in present.items():
                if watched.objects.get(key) != item:
                    watched.take(Sighting(loop.time(), "ADDED", item))
            version = listed["metadata"]["resourceVersion"]
            async for event in api.events(path, resourceVersion=version, **query):
                if event["type"] == "ERROR":
                    break
                watched.take(Sighting(loop.time(), event["type"], event["object"]))
        except (aiohttp.ClientError, OSError, RefusedError):
            await asyncio.sleep(0.1)
