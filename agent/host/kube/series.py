"""Which Events are sent: one object for each series, and few of them. Pure; time is an argument."""

import dataclasses
import enum
import hashlib
from collections import OrderedDict

from agent.core.cluster.changes import NodeEvent
from agent.kit.allowance import Allowance

UPDATE_GAP = 60.0
BURST = 25
REFILL = 300.0
"""As client-go's spam filter: 25 Events for one object at once, then one every five minutes.
For the Node that is so for each reason."""
PODS_BURST = 220
PODS_REFILL = 2.0
"""All pods of the node together: twice as many as a kubelet runs, then one every two seconds; a
tenant can make pods under new names without end."""
REMEMBERED = 4096


class SeriesStep(enum.StrEnum):
    """What to do with one more Event."""

    CREATE = "create"
    UPDATE = "update"
    COUNT = "count"
    """Only counted: its series was updated a moment ago."""
    DROP = "drop"
    """The object, or all pods together, have had too many."""


@dataclasses.dataclass(slots=True)
class EventSeries:
    """Equal Events about one object: `count` so far, `sent_at` the last write (loop time)."""

    name: str
    count: int = 0
    sent_at: float | None = None


class EventBook:
    """The series of this process and what each object may have, both bounded."""

    def __init__(self) -> None:
        self._series: OrderedDict[NodeEvent, EventSeries] = OrderedDict()
        self._objects: OrderedDict[tuple[str, str], Allowance] = OrderedDict()
        self._pods = Allowance(PODS_BURST, PODS_REFILL)

    def plan(self, event: NodeEvent, subject: str, now: float) -> tuple[SeriesStep, EventSeries]:
        """Count the event in and say what to do; `subject` is the name of its object."""
        series = self._series.get(event)
        if series is None:
            series = self._series[event] = EventSeries(event_name(event, subject))
            _bound(self._series)
        self._series.move_to_end(event)
        series.count += 1
        if series.sent_at is not None and now - series.sent_at < UPDATE_GAP:
            return SeriesStep.COUNT, series
        if not all(one.allows(now) for one in self._allowances(event)):
            return SeriesStep.DROP, series
        return (SeriesStep.CREATE if series.sent_at is None else SeriesStep.UPDATE), series

    def sent(self, event: NodeEvent, series: EventSeries, now: float) -> None:
        """The write went through: it counts against the object's allowance."""
        for allowance in self._allowances(event):
            allowance.spend(now)
        series.sent_at = now

    def failed(self, series: EventSeries) -> None:
        """The write did not go through: whoever repeats it is not a new occurrence."""
        series.count -= 1

    def _allowances(self, event: NodeEvent) -> tuple[Allowance, ...]:
        # Of the Node each reason has its own: what pods without end call for hides no bad GPU.
        key = (event.namespace, event.pod or event.reason)
        own = self._objects.setdefault(key, Allowance(BURST, REFILL))
        self._objects.move_to_end(key)
        _bound(self._objects)
        return (own, self._pods) if event.pod else (own,)


def event_name(event: NodeEvent, subject: str) -> str:
    """`<object>.<hash>`: the same event of the same object has the same name after a restart."""
    parts = (event.namespace, event.pod, event.pod_uid, event.reason, event.text)
    digest = hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()
    return f"{subject[:200].rstrip('.-')}.{digest[:16]}"


def _bound(
    kept: OrderedDict[NodeEvent, EventSeries] | OrderedDict[tuple[str, str], Allowance],
) -> None:
    while len(kept) > REMEMBERED:
        kept.popitem(last=False)
