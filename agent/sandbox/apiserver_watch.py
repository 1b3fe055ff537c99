"""A WATCH over HTTP: newline-separated JSON frames, bookmarks, an end in time, 410 as a frame."""

import asyncio
import contextlib
import json
from collections.abc import Mapping

from aiohttp import web

from agent.sandbox.api_errors import BadRequestError, GoneError, Json
from agent.sandbox.apiserver_access import Target
from agent.sandbox.history import Subscription
from agent.sandbox.store import KINDS, ObjectStore

DEFAULT_TIMEOUT = 3000.0
BOOKMARK_INTERVAL = 60.0


def _start(store: ObjectStore, target: Target, query: Mapping[str, str]) -> Subscription:
    """Open the cursor that the query asks for; no version, or `0`, begins with all objects.

    Raises:
        GoneError: the version is older than the history.
        BadRequestError: a version that is no number, or an unknown field.
    """
    version = query.get("resourceVersion", "")
    if version and not version.isdecimal():
        raise BadRequestError(f'resourceVersion: Invalid value: "{version[:64]}"')
    since = int(version) if version and version != "0" else None
    namespace = target.namespace or None
    return store.subscribe(target.resource, since, namespace=namespace, fields=target.fields)


class WatchStream:
    """Writes one watch to one client until its time is over, or until it is ended."""

    def __init__(self, target: Target, query: Mapping[str, str]) -> None:
        self._target = target
        self._query = query
        self._bookmarks = query.get("allowWatchBookmarks", "") in ("true", "1")
        seconds = query.get("timeoutSeconds", "")
        self._deadline = asyncio.timeout(float(seconds) if seconds.isdecimal() else DEFAULT_TIMEOUT)

    def end(self) -> None:
        """End the watch now, as if its time were over; before it began, this does nothing."""
        if self._deadline.when() is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time())

    async def serve(self, request: web.BaseRequest, store: ObjectStore) -> web.StreamResponse:
        """Send frames; the connection stays usable after a watch that ended in time.

        A version that is too old is told in a frame, not by the code of the answer, as the real
        server does (apiserver/pkg/storage/cacher).

        Raises:
            BadRequestError: a version that is no number, or an unknown field.
        """
        opened: Subscription | GoneError
        try:
            opened = _start(store, self._target, self._query)
        except GoneError as gone:
            opened = gone
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        with contextlib.suppress(ConnectionResetError):  # the client is gone: so is its watch
            await response.prepare(request)
            if isinstance(opened, GoneError):
                await _write(response, {"type": "ERROR", "object": opened.status()})
            else:
                await self._follow(response, opened)
            await response.write_eof()
        return response

    async def _follow(self, response: web.StreamResponse, subscription: Subscription) -> None:
        try:
            async with self._deadline:
                await self._send(response, subscription)
        except TimeoutError:
            await self._mark(response, subscription)
        except GoneError as gone:
            await _write(response, {"type": "ERROR", "object": gone.status()})

    async def _send(self, response: web.StreamResponse, subscription: Subscription) -> None:
        while True:
            try:
                async with asyncio.timeout(BOOKMARK_INTERVAL):
                    change = await anext(subscription)
            except TimeoutError:
                await self._mark(response, subscription)
            else:
                await _write(response, {"type": change.type, "object": change.object})

    async def _mark(self, response: web.StreamResponse, subscription: Subscription) -> None:
        if self._bookmarks and subscription.is_started:
            await _write(response, self._bookmark(subscription))

    def _bookmark(self, subscription: Subscription) -> Json:
        metadata = {"resourceVersion": str(subscription.cursor), "creationTimestamp": None}
        found = {"kind": KINDS[self._target.resource], "apiVersion": "v1", "metadata": metadata}
        return {"type": "BOOKMARK", "object": found}


async def _write(response: web.StreamResponse, frame: Json) -> None:
    await response.write(json.dumps(frame, separators=(",", ":")).encode() + b"\n")
