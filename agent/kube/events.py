"""Posts Events, of which equal ones become a series."""

import asyncio
import datetime as dt
import enum
import hashlib
from collections import OrderedDict

import msgspec

from agent.cluster import NodeEvent
from agent.errors import ApiConflict, ApiError, ApiNotFound, cap
from agent.kit.tasks import Allowance
from agent.kit.timing import Tally
from agent.kube.client import MERGE_PATCH, ApiRequest, KubeSession, path_of
from agent.ports import Clock

# Decides which Events are sent: one object for each series, at a limited rate. Pure.

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


# Posts Events of the core API about this Node or one of its pods.

COMPONENT = "hami-agent"
TEXT_LIMIT = 1024
NODE_NAMESPACE = "default"


class EventPoster:
    """Creates Events and updates their series; `posted` counts them by reason and outcome."""

    def __init__(self, session: KubeSession, node: str, clock: Clock) -> None:
        self.posted = Tally(
            "events_total",
            "Events by outcome; only create and update were written to the API server.",
            ("reason", "outcome"),
        )
        self._session = session
        self._node = node
        self._clock = clock
        self._book = EventBook()

    async def post(self, event: NodeEvent) -> None:
        """Create or update the Event; only count a too frequent one. Raises ApiError."""
        loop = asyncio.get_running_loop()
        step, series = self._book.plan(event, event.pod or self._node, loop.time())
        if step in {SeriesStep.CREATE, SeriesStep.UPDATE}:
            try:
                step = await self._write(step, event, series)
            except ApiError:
                self._book.failed(series)
                raise
            self._book.sent(event, series, loop.time())
        self.posted.add(event.reason, step.value)

    async def _write(self, step: SeriesStep, event: NodeEvent, series: EventSeries) -> SeriesStep:
        if step is SeriesStep.UPDATE:
            try:
                await self._update(event, series)
            except ApiNotFound:  # the server deletes Events after an hour
                await self._create(event, series)
            return SeriesStep.UPDATE
        try:
            await self._create(event, series)
        except ApiConflict:  # the agent wrote it before it was restarted
            series.count += 1
            await self._update(event, series)
            return SeriesStep.UPDATE
        return SeriesStep.CREATE

    async def _create(self, event: NodeEvent, series: EventSeries) -> None:
        body = event_object(event, series, self._node, self._clock.now())
        namespace = event.namespace or NODE_NAMESPACE
        path = path_of("namespaces", namespace, "events")
        await self._session.call(ApiRequest("create", "events", path, body=body))

    async def _update(self, event: NodeEvent, series: EventSeries) -> None:
        body = {"count": series.count, "lastTimestamp": stamp(self._clock.now())}
        namespace = event.namespace or NODE_NAMESPACE
        path = path_of("namespaces", namespace, "events", series.name)
        await self._session.call(
            ApiRequest("patch", "events", path, body=body, content_type=MERGE_PATCH)
        )


def event_object(
    event: NodeEvent, series: EventSeries, node: str, now: dt.datetime
) -> dict[str, object]:
    """The Event as a JSON object of the API.

    Like the kubelet, it uses the Node's name as uid of the Node: `kubectl describe node` selects by
    it (kubernetes pkg/kubelet/kubelet.go, nodeRef).
    """
    if event.pod:
        kind, name, namespace, uid = "Pod", event.pod, event.namespace, str(event.pod_uid)
    else:
        kind, name, namespace, uid = "Node", node, "", node
    regarding = {"apiVersion": "v1", "kind": kind, "name": name, "uid": uid}
    if namespace:
        regarding["namespace"] = namespace
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": series.name, "namespace": namespace or NODE_NAMESPACE},
        "involvedObject": regarding,
        "reason": event.reason,
        "message": cap(event.text, TEXT_LIMIT),
        "type": "Warning" if event.warning else "Normal",
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
        "firstTimestamp": stamp(now),
        "lastTimestamp": stamp(now),
        "count": series.count,
    }


def stamp(now: dt.datetime) -> str:
    """Format a time as metav1.Time: RFC 3339 in UTC, in whole seconds."""
    return now.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
