"""A WATCH over HTTP: newline-separated JSON frames, bookmarks, a timeout, 410 as a frame.

Bookmarks come as from the real server's watch cache
(apiserver/pkg/storage/cacher/cache_watcher.go) on a cluster with constant writes: after the initial
objects, every 60 s, and 2 s before the timeout. On a cluster without writes, the real server sends
none for the first 2 minutes.
"""

import asyncio
import contextlib
import json
from typing import Final

from aiohttp import web

from agent.sandbox.api_errors import GoneError, Json, NotAcceptableError, UnclassifiedError
from agent.sandbox.apiserver_access import Target
from agent.sandbox.apiserver_forms import shaped
from agent.sandbox.apiserver_paths import is_set, number
from agent.sandbox.history import Change, Subscription
from agent.sandbox.store import KINDS, ObjectStore

DEFAULT_TIMEOUT: Final = 3000.0
BOOKMARK_INTERVAL: Final = 60.0
BEFORE_THE_END: Final = 2.0
"""Seconds before the timeout of a watch at which it gets its last bookmark."""

_COMPLETE: Final = {"k8s.io/initial-events-end": "true"}


def _start(store: ObjectStore, target: Target) -> Subscription:
    """Open the cursor that the query requests. No version, or `0`, begins with all objects.

    Raises:
        GoneError: the version is older than the history.
        UnclassifiedError: the version is not a number.
        BadRequestError: an unknown field.
    """
    version = target.options.get("resourceVersion", "")
    if version and not version.isdecimal():
        detail = f'"{version[:64]}": strconv.ParseUint: parsing "{version[:64]}": invalid syntax'
        raise UnclassifiedError(f"resourceVersion: Invalid value: {detail}")
    since = int(version) if version and version != "0" else None
    namespace = target.namespace or None
    return store.subscribe(target.resource, since, namespace=namespace, fields=target.fields)


class WatchStream:
    """Writes one watch to one client until it times out or is ended.

    `form` is that of each object, see apiserver_forms. Raises BadRequestError for a time that is
    no number.
    """

    def __init__(self, target: Target, form: str) -> None:
        self._target = target
        self._form = form
        self._bookmarks = is_set(target.options, "allowWatchBookmarks")
        seconds = number(target.options, "timeoutSeconds")
        self._deadline = asyncio.timeout(float(seconds) if seconds > 0 else DEFAULT_TIMEOUT)
        self._is_ended = False

    def end(self) -> None:
        """End the watch now as if it had timed out, after a last bookmark.

        Before the watch has begun, this does nothing.
        """
        if self._deadline.when() is not None:
            self._is_ended = True
            self._deadline.reschedule(asyncio.get_running_loop().time())

    async def serve(self, request: web.BaseRequest, store: ObjectStore) -> web.StreamResponse:
        """Send frames. After a timeout the connection stays usable.

        A version that is too old gives an error frame, not an HTTP status, as in the real server
        (apiserver/pkg/storage/cacher).

        Raises:
            BadRequestError, UnclassifiedError: an unknown field, a version that is not a number.
        """
        opened: Subscription | GoneError
        try:
            opened = _start(store, self._target)
        except GoneError as gone:
            opened = gone
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        with contextlib.suppress(ConnectionResetError):  # the client is gone, which ends the watch
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
            if self._is_ended and subscription.is_started:
                await self._mark(response, subscription, {})
        except GoneError as gone:
            await _write(response, {"type": "ERROR", "object": gone.status()})
        except NotAcceptableError:
            return  # no event is a list: the real server sends none, and ends

    async def _send(self, response: web.StreamResponse, subscription: Subscription) -> None:
        while not subscription.is_started:
            await self._tell(response, await anext(subscription))
        if self._target.options.get("resourceVersion", "") in ("", "0"):
            await self._mark(response, subscription, {"annotations": _COMPLETE})
        marking_at = self._next_mark()
        while True:
            try:
                async with asyncio.timeout_at(marking_at):
                    change = await anext(subscription)
            except TimeoutError:
                marking_at = self._next_mark()
                await self._mark(response, subscription, {})
            else:
                await self._tell(response, change)

    def _next_mark(self) -> float:
        now = asyncio.get_running_loop().time()
        last = (self._deadline.when() or 0.0) - BEFORE_THE_END
        regular = now + BOOKMARK_INTERVAL
        return min(last, regular) if last > now else regular

    async def _tell(self, response: web.StreamResponse, change: Change) -> None:
        shown = shaped(self._form, change.object)
        await _write(response, {"type": change.type, "object": shown})

    async def _mark(
        self, response: web.StreamResponse, subscription: Subscription, more: Json
    ) -> None:
        if self._bookmarks:
            metadata = {"resourceVersion": str(subscription.cursor)} | more
            found = {
                "kind": KINDS[self._target.resource],
                "apiVersion": "v1",
                "metadata": metadata,
            }
            await _write(response, {"type": "BOOKMARK", "object": shaped(self._form, found)})


async def _write(response: web.StreamResponse, frame: Json) -> None:
    await response.write(json.dumps(frame, separators=(",", ":")).encode() + b"\n")
