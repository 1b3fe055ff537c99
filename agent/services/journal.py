"""Keeps what happened on this node in the last 24 h, in memory, for people to read."""

import dataclasses
import datetime as dt
from collections import deque
from typing import Final

from agent.core.cluster.changes import NodeEvent
from agent.core.errors import Refusal
from agent.core.ports import Clock
from agent.core.state.ledger import Row

KEPT: Final = dt.timedelta(hours=24)
LIMIT: Final = 500
"""Entries of each kind. The oldest give way, as when one pod is refused again and again."""


@dataclasses.dataclass(frozen=True, slots=True)
class JournalEntry:
    """One change or refusal. `reason`: the reason of the Event, or the id of the refusal.

    `namespace`, `pod` and `container` are empty if it is not about one, or if it is not known.
    """

    at: dt.datetime
    reason: str
    text: str
    warning: bool = True
    namespace: str = ""
    pod: str = ""
    container: str = ""


class NodeJournal:
    """The changes (Events about the Node or a pod) and the refusals of Allocate.

    A restart of the agent empties it: the log and the Events are the record.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changes: deque[JournalEntry] = deque(maxlen=LIMIT)
        self._refusals: deque[JournalEntry] = deque(maxlen=LIMIT)
        self.since = clock.now()

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

    @property
    def changes(self) -> tuple[JournalEntry, ...]:
        """The changes of the last 24 h, the newest first."""
        return self._recent(self._changes)

    @property
    def refusals(self) -> tuple[JournalEntry, ...]:
        """The refusals of the last 24 h, the newest first."""
        return self._recent(self._refusals)

    def _recent(self, entries: deque[JournalEntry]) -> tuple[JournalEntry, ...]:
        oldest = self._clock.now() - KEPT
        return tuple(entry for entry in reversed(entries) if entry.at > oldest)
