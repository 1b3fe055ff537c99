"""Decides which Events are sent: one object for each series, at a limited rate. Pure."""

import enum
import hashlib
from collections import OrderedDict

import msgspec

from agent.core.cluster.changes import NodeEvent
from agent.kit.backoff import Allowance

UPDATE_GAP = 60.0
BURST = 25
REFILL = 300.0
"""As client-go's spam filter: 25 Events for one object at once, then one every 300 s.
The Node has these for each reason."""
PODS_BURST = 220
PODS_REFILL = 2.0
"""All pods of the node together: twice as many as a kubelet runs, then one every 2 s. Without this
limit a tenant could cause Events without end by new pod names."""
REMEMBERED = 4096


class SeriesStep(enum.StrEnum):
    """What to do with one more Event."""

    CREATE = "create"
    UPDATE = "update"
    COUNT = "count"
    """Its series was written less than 60 s ago."""
    DROP = "drop"
    """The object, or all pods together, used up their rate."""


class EventSeries(msgspec.Struct):
    """Equal Events about one object: their `count`, and the loop time of the last write."""

    name: str
    count: int = 0
    sent_at: float | None = None


class EventBook:
    """The series of this process and the rate of each object, both bounded in number."""

    def __init__(self) -> None:
        self._series: OrderedDict[NodeEvent, EventSeries] = OrderedDict()
        self._objects: OrderedDict[tuple[str, str], Allowance] = OrderedDict()
        self._pods = Allowance(PODS_BURST, PODS_REFILL)

    def plan(self, event: NodeEvent, subject: str, now: float) -> tuple[SeriesStep, EventSeries]:
        """Count the event and decide what to do with it; `subject` is the name of its object."""
        series = self._series.get(event)
        if series is None:
            series = self._series[event] = EventSeries(event_name(event, subject))
            _bound(self._series)
        self._series.move_to_end(event)
        series.count += 1
        if series.sent_at is not None and now - series.sent_at < UPDATE_GAP:
            return SeriesStep.COUNT, series
        if not all(allowance.allows(now) for allowance in self._allowances(event)):
            return SeriesStep.DROP, series
        return (SeriesStep.CREATE if series.sent_at is None else SeriesStep.UPDATE), series

    def sent(self, event: NodeEvent, series: EventSeries, now: float) -> None:
        """Note a successful write, which counts against the object's rate."""
        for allowance in self._allowances(event):
            allowance.spend(now)
        series.sent_at = now

    def failed(self, series: EventSeries) -> None:
        """Note a failed write: its repetition is no new occurrence."""
        series.count -= 1

    def _allowances(self, event: NodeEvent) -> tuple[Allowance, ...]:
        # Each reason of the Node has its own, so that Events caused by pods hide no bad GPU.
        key = (event.namespace, event.pod or event.reason)
        own = self._objects.setdefault(key, Allowance(BURST, REFILL))
        self._objects.move_to_end(key)
        _bound(self._objects)
        return (own, self._pods) if event.pod else (own,)


def event_name(event: NodeEvent, subject: str) -> str:
    """`<object>.<hash>`: equal Events of an object have the same name, also after a restart."""
    parts = (event.namespace, event.pod, event.pod_uid, event.reason, event.text)
    digest = hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()
    return f"{subject[:200].rstrip('.-')}.{digest[:16]}"


def _bound(
    kept: OrderedDict[NodeEvent, EventSeries] | OrderedDict[tuple[str, str], Allowance],
) -> None:
    while len(kept) > REMEMBERED:
        kept.popitem(last=False)
