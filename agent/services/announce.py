"""Events about this Node: best effort, in order, never the only record of anything."""

import asyncio
from collections import deque
from typing import NoReturn

import structlog

from agent.core.changes import NodeEvent
from agent.core.errors import ApiError
from agent.core.ports import PodApi
from agent.kit.tally import Tally

log = structlog.get_logger(__name__)

LIMIT = 64
"""Events that may wait; the oldest is dropped, and counted, when more come."""

AGAIN = 5.0
"""Seconds until the first event in line is tried again."""


class Announcer:
    """Posts Events. `say` may be called from anywhere on the loop and never waits."""

    def __init__(self, api: PodApi) -> None:
        self._api = api
        self._line: deque[NodeEvent] = deque()
        self._news = asyncio.Event()
        self.events = Tally("node_events_total", "Events about the Node.", ("reason", "result"))

    def say(self, event: NodeEvent) -> None:
        """Put `event` in line; one that says the same as the last in line is dropped."""
        if self._line and self._line[-1] == event:
            return
        if len(self._line) >= LIMIT:
            self.events.add(self._line.popleft().reason, "dropped")
        self._line.append(event)
        self._news.set()

    async def run(self) -> NoReturn:
        """Post what is in line, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._line:
                await self._post(self._line[0])

    async def _post(self, event: NodeEvent) -> None:
        try:
            await self._api.post_event(event)
        except ApiError as error:
            if error.status in range(400, 500) and error.status != 429:
                log.warning("event.refused", reason=event.reason, err=str(error))
                self.events.add(event.reason, "refused")
                self._drop(event)
                return
            await asyncio.sleep(error.retry_after or AGAIN)
            return
        self.events.add(event.reason, "posted")
        self._drop(event)

    def _drop(self, event: NodeEvent) -> None:
        """Take `event` out of line, if a full line has not pushed it out meanwhile."""
        if self._line and self._line[0] is event:
            self._line.popleft()
