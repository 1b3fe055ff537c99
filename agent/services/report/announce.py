"""Posts Events about this Node in order, with best effort. An Event is never the only record."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import structlog

from agent.core.cluster.changes import NodeEvent
from agent.core.errors import ApiError
from agent.core.ports import PodApi
from agent.kit.tally import Tally

log = structlog.get_logger(__name__)

LIMIT = 256
"""Events that may wait. When more come, the oldest is dropped and counted."""

AGAIN = 5.0
"""Seconds until a post that failed is tried again."""


class NodeEventQueue:
    """A queue of at most LIMIT Events. `noted` hears of each one that is queued."""

    def __init__(self, noted: Callable[[NodeEvent], None] = lambda _: None) -> None:
        self._noted = noted
        self._line: deque[NodeEvent] = deque()
        self._news = asyncio.Event()
        self.unposted = Tally(
            "events_unposted_total",
            "Events that no API server keeps, by what became of them instead.",
            ("reason", "outcome"),
        )

    def say(self, event: NodeEvent) -> None:
        """Queue the event unless it equals the last one in the queue. Never waits."""
        if self._line and self._line[-1] == event:
            return
        if len(self._line) >= LIMIT:
            self.unposted.add(self._line.popleft().reason, "dropped")
        self._line.append(event)
        self._noted(event)
        self._news.set()

    async def first(self) -> NodeEvent:
        """Wait for the first event in the queue; it stays in the queue."""
        while not self._line:
            self._news.clear()
            await self._news.wait()
        return self._line[0]

    @property
    def waiting(self) -> tuple[NodeEvent, ...]:
        """All events in the queue, the first one first."""
        return tuple(self._line)

    def done(self, event: NodeEvent, outcome: str = "") -> None:
        """Remove the event if it is the first one in the queue.

        `outcome`: what happened to an event that was not posted; empty: it was posted.
        """
        if outcome:
            self.unposted.add(event.reason, outcome)
        if self._line and self._line[0] is event:
            self._line.popleft()


class NoticeLog:
    """Logs the queued events if there is no API server to post them to."""

    def __init__(self, notices: NodeEventQueue) -> None:
        self._notices = notices

    async def run(self) -> NoReturn:
        """Log one event after the other, for ever."""
        while True:
            event = await self._notices.first()
            level = log.warning if event.warning else log.info
            of = {"ns": event.namespace, "pod": event.pod} if event.pod else {}
            level("event.logged", reason=event.reason, **of, text=event.text)
            self._notices.done(event, "logged")


class Announcer:
    """Posts the queued events."""

    def __init__(self, api: PodApi, notices: NodeEventQueue) -> None:
        self._api = api
        self._notices = notices

    async def run(self) -> NoReturn:
        """Post one event after the other, for ever."""
        while True:
            await self._post(await self._notices.first())

    async def _post(self, event: NodeEvent) -> None:
        try:
            await self._api.post_event(event)
        except ApiError as error:
            if error.status in range(400, 500) and error.status != 429:
                log.warning("event.refused", reason=event.reason, err=str(error))
                self._notices.done(event, "refused")
            else:
                await asyncio.sleep(error.retry_after or AGAIN)
        else:
            self._notices.done(event)
