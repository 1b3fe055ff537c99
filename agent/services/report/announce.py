"""Events about this Node: best effort, in order, never the only record of anything."""

import asyncio
from collections import deque
from typing import NoReturn

import structlog

from agent.core.cluster.changes import NodeEvent
from agent.core.errors import ApiError
from agent.core.ports import PodApi
from agent.kit.tally import Tally

log = structlog.get_logger(__name__)

LIMIT = 256
"""Events that may wait; the oldest is dropped, and counted, when more come."""

AGAIN = 5.0
"""Seconds until the first event in line is tried again."""


class NodeEventQueue:
    """Events in line. `say` may be called from anywhere on the loop and never waits."""

    def __init__(self) -> None:
        self._line: deque[NodeEvent] = deque()
        self._news = asyncio.Event()
        self.unposted = Tally(
            "events_unposted_total",
            "Events that no API server keeps, by what became of them instead.",
            ("reason", "outcome"),
        )

    def say(self, event: NodeEvent) -> None:
        """Put `event` in line; one that says the same as the last in line is dropped."""
        if self._line and self._line[-1] == event:
            return
        if len(self._line) >= LIMIT:
            self.unposted.add(self._line.popleft().reason, "dropped")
        self._line.append(event)
        self._news.set()

    async def first(self) -> NodeEvent:
        """The first event in line, which stays there."""
        while not self._line:
            self._news.clear()
            await self._news.wait()
        return self._line[0]

    @property
    def waiting(self) -> tuple[NodeEvent, ...]:
        """All that is in line, the first one first."""
        return tuple(self._line)

    def done(self, event: NodeEvent, outcome: str = "") -> None:
        """Take `event` out of line, if a full line has not pushed it out meanwhile.

        `outcome`: what became of it, where it was not posted; whoever posts counts that.
        """
        if outcome:
            self.unposted.add(event.reason, outcome)
        if self._line and self._line[0] is event:
            self._line.popleft()


class NoticeLog:
    """Says in the log what is in line, where there is no API server to post it to."""

    def __init__(self, notices: NodeEventQueue) -> None:
        self._notices = notices

    async def run(self) -> NoReturn:
        """Say one event after the other, for ever."""
        while True:
            event = await self._notices.first()
            level = log.warning if event.warning else log.info
            of = {"ns": event.namespace, "pod": event.pod} if event.pod else {}
            level("event.logged", reason=event.reason, **of, text=event.text)
            self._notices.done(event, "logged")


class Announcer:
    """Posts what is in line."""

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
