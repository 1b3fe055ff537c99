"""Keeps what happened on this node in the last 24 h, for people to read."""

import asyncio
import contextlib
import datetime as dt
from collections import deque
from typing import Final

import structlog

from agent.codec.journal import decode_journal, encode_journal
from agent.core.cluster.changes import NodeEvent
from agent.core.errors import Refusal, StateError
from agent.core.ports import Clock, Disk
from agent.core.state.journal import JournalEntry, JournalRecord
from agent.core.state.ledger import Row

log = structlog.get_logger(__name__)

FILE: Final = "journal.json"
KEPT: Final = dt.timedelta(hours=24)
LIMIT: Final = 500
"""Entries of each kind. The oldest give way, as when one pod is refused again and again."""
PERIOD: Final = 30.0
"""Seconds between two writes at least: answers to the kubelet use the same disk."""
LAST: Final = 1.0
"""Seconds for the last write of a process that stops."""


class NodeJournal:
    """The changes (Events about the Node or a pod) and the refusals of Allocate.

    It is on disk with best effort: a kill loses what happened in the last PERIOD. The log and the
    Events are the record.
    """

    def __init__(self, clock: Clock, disk: Disk) -> None:
        self._clock = clock
        self._disk = disk
        self._changes: deque[JournalEntry] = deque(maxlen=LIMIT)
        self._refusals: deque[JournalEntry] = deque(maxlen=LIMIT)
        self._news = asyncio.Event()
        self.started = clock.now()
        self._since = self.started

    @property
    def since(self) -> dt.datetime:
        """What was before is not known."""
        return max(self._since, self._clock.now() - KEPT)

    def changed(self, event: NodeEvent) -> None:
        """Record an Event of the agent."""
        self._changes.append(
            JournalEntry(
                self._clock.now(),
                event.reason,
                event.text,
                event.warning,
                event.namespace,
                event.pod,
            )
        )
        self._news.set()

    def refused(self, refusal: Refusal, row: Row | None) -> None:
        """Record a refusal. `row`: what would have been answered, if it is known."""
        holder = row.holder if row else None
        names = (holder.namespace, holder.pod, holder.container) if holder else ("", "", "")
        namespace, pod, container = names
        self._refusals.append(
            JournalEntry(
                self._clock.now(),
                refusal.gate.value,
                refusal.sentence,
                namespace=namespace,
                pod=pod,
                container=container,
            )
        )
        self._news.set()

    @property
    def changes(self) -> tuple[JournalEntry, ...]:
        """The changes of the last 24 h, the newest first."""
        return self._recent(self._changes)

    @property
    def refusals(self) -> tuple[JournalEntry, ...]:
        """The refusals of the last 24 h, the newest first."""
        return self._recent(self._refusals)

    async def recall(self) -> None:
        """Read what an earlier process kept. What cannot be read is logged, and begins anew."""
        try:
            content = await self._disk.read(FILE)
            record = None if content is None else decode_journal(content)
        except StateError as error:
            log.warning("journal.unreadable", file=FILE, err=str(error))
            return
        if record is not None:
            self._since = min(record.since, self._since)
            self._changes.extendleft(reversed(record.changes))
            self._refusals.extendleft(reversed(record.refusals))

    async def run(self) -> None:
        """Write the journal when something happened, once each PERIOD, and when it ends."""
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                await self._save()
                await asyncio.sleep(PERIOD)
        finally:
            if self._news.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST):
                        await self._save()

    async def _save(self) -> None:
        record = JournalRecord(
            self.since, tuple(reversed(self.changes)), tuple(reversed(self.refusals))
        )
        try:
            await self._disk.replace(FILE, encode_journal(record))
        except StateError as error:
            log.info("journal.unwritten", file=FILE, err=str(error))

    def _recent(self, entries: deque[JournalEntry]) -> tuple[JournalEntry, ...]:
        oldest = self._clock.now() - KEPT
        return tuple(entry for entry in reversed(entries) if entry.at > oldest)
