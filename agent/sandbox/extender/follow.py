"""Follows one resource of the whole cluster with LIST and WATCH."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn, Protocol

import structlog

from agent.codec.narrow import Raw, read_object
from agent.core.errors import ApiError, ApiGone
from agent.host.kube.session import ApiRequest, KubeSession, path_of
from agent.host.kube.watch import WatchTimes, frames
from agent.kit.reopening import Reopening
from agent.kit.tally import Tally
from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.client import ClientQueue

log = structlog.get_logger(__name__)
PAGE: Final = 500
PATIENCE: Final = 5
"""Consecutive failed watches before all is listed again."""


class Audience(Protocol):
    """Receives the objects of one resource."""

    def known(self) -> frozenset[str]:
        """The objects known before a list is requested. Only these can be missing in it."""
        ...

    async def replace(self, objects: Sequence[Json], known: frozenset[str]) -> None:
        """Replace all objects. Objects in `known` that are not among them are gone."""
        ...

    async def see(self, kind: str, obj: Json) -> None:
        """Take in one object that was ADDED, MODIFIED or DELETED."""
        ...


class Follower:
    """Passes all objects of one resource to one audience. `listed` is set after a list.

    Each page of a list and each watch is a request that waits in `queue`.
    """

    def __init__(
        self,
        session: KubeSession,
        resource: str,
        audience: Audience,
        rng: random.Random,
        pace: WatchTimes,
        queue: ClientQueue,
    ) -> None:
        self.listed = asyncio.Event()
        self.restarts = Tally("watch_restarts_total", "Watches that ended.", ("reason",))
        self._session = session
        self._resource = resource
        self._audience = audience
        self._pace = pace
        self._queue = queue
        self._watch = Reopening(self.restarts, rng)
        self._version = ""
        """The resource version of the audience; empty: a list is needed."""

    async def run(self) -> NoReturn:
        """List and watch for ever."""
        while True:
            self._watch.opening()
            try:
                if not self._version:
                    await self._list()
                await self._follow()
            except ApiGone as gone:
                self._version = ""
                log.info("extender.watch_gone", resource=self._resource, err=str(gone))
                delay = self._watch.gone()
            except ApiError as error:
                delay = self._give_up(error)
            else:
                delay = self._watch.ended()
            await asyncio.sleep(delay)

    def _give_up(self, error: ApiError) -> float:
        delay = self._watch.broke(at_least=error.retry_after or 0.0)
        log.warning("extender.watch_lost", resource=self._resource, err=str(error))
        if self._watch.failures % PATIENCE == 0:
            self._version = ""
        return delay

    async def _list(self) -> None:
        known, rest = self._audience.known(), ""
        objects: list[Json] = []
        while True:
            query = (("limit", str(PAGE)), *((("continue", rest),) if rest else ()))
            path = path_of(self._resource)
            request = ApiRequest("list", self._resource, path, query=query)
            await self._queue.turn()
            answer = await self._session.fetch(request)
            objects += answer.get("items") or ()
            metadata: Mapping[str, Any] = answer["metadata"]
            rest = metadata.get("continue") or ""
            if not rest:
                break
        await self._audience.replace(objects, known)
        self._version = metadata["resourceVersion"]
        self.listed.set()

    async def _follow(self) -> None:
        """Follow one watch to its end."""
        query = (
            ("watch", "1"),
            ("resourceVersion", self._version),
            ("allowWatchBookmarks", "true"),
        )
        path = path_of(self._resource)
        request = ApiRequest("watch", self._resource, path, query=query)
        await self._queue.turn()
        async for frame in frames(self._session, request, self._pace, _read):
            if frame.obj is None:  # it is open
                continue
            if frame.kind != "BOOKMARK":
                await self._audience.see(frame.kind, frame.obj)
            self._version = frame.obj["metadata"]["resourceVersion"]


def _read(_: str, obj: Raw) -> Json:
    return dict(read_object(obj))
