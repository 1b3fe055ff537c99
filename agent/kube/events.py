"""Posts Events, of which equal ones become a series."""

import datetime as dt
import functools
import hashlib

import msgspec

from agent.cluster import NodeEvent
from agent.errors import ApiConflict, ApiError, ApiNotFound, cap
from agent.hami.annotations import encode_stamp
from agent.kit.tasks import Allowance
from agent.kit.timing import Tally, loop_time
from agent.kube.client import MERGE_PATCH, WRITER, ApiRequest, KubeSession, path_of
from agent.ports import Clock

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


TEXT_LIMIT = 1024
NODE_NAMESPACE = "default"


class EventSeries(msgspec.Struct):
    """Equal Events about one object: their `count`, and the loop time of the last write."""

    name: str
    count: int = 0
    sent_at: float | None = None


class EventPoster:
    """Creates Events of the core API about this Node or one of its pods, and updates their series.

    It sends one object for each series, at a limited rate. `posted` counts by reason and outcome:
    `create`, `update`, `count` (its series was written less than 60 s ago) and `drop` (the object,
    or all pods together, used up their rate).
    """

    def __init__(self, session: KubeSession, node: str, clock: Clock) -> None:
        self.posted = Tally(
            "events_total",
            "Events by outcome; only create and update were written to the API server.",
            ("reason", "outcome"),
        )
        self._session = session
        self._node = node
        self._clock = clock
        self._pods = Allowance(PODS_BURST, PODS_REFILL)

        @functools.lru_cache(REMEMBERED)
        def series_of(event: NodeEvent) -> EventSeries:
            return EventSeries(event_name(event, event.pod or node))

        @functools.lru_cache(REMEMBERED)
        def allowance_of(_namespace: str, _name: str) -> Allowance:
            return Allowance(BURST, REFILL)

        self._series_of, self._allowance_of = series_of, allowance_of

    async def post(self, event: NodeEvent) -> None:
        """Create or update the Event; only count a too frequent one. Raises ApiError."""
        series = self._series_of(event)
        # Each reason of the Node has its own, so that Events caused by pods hide no bad GPU.
        own = self._allowance_of(event.namespace, event.pod or event.reason)
        allowances = (own, self._pods) if event.pod else (own,)

        series.count += 1
        if series.sent_at is not None and loop_time() - series.sent_at < UPDATE_GAP:
            outcome = "count"
        elif not all(allowance.allows(loop_time()) for allowance in allowances):
            outcome = "drop"
        else:
            try:
                outcome = await self._write(event, series)
            except ApiError:
                series.count -= 1  # its repetition is no new occurrence
                raise
            series.sent_at = loop_time()
            for allowance in allowances:
                allowance.spend(series.sent_at)

        self.posted.add(event.reason, outcome)

    async def _write(self, event: NodeEvent, series: EventSeries) -> str:
        """Create the Event, or update it if it was written before; return which."""
        space = ("namespaces", event.namespace or NODE_NAMESPACE, "events")
        body = event_object(event, series, self._node, self._clock.now())
        create = ApiRequest("create", "events", path_of(*space), body=body)
        if series.sent_at is None:
            try:
                await self._session.call(create)
            except ApiConflict:  # it was written before a restart, or by a try without an answer
                series.count = max(2, series.count)
            else:
                return "create"

        change = {"count": series.count, "lastTimestamp": body["lastTimestamp"]}
        path = path_of(*space, series.name)
        try:
            await self._session.call(ApiRequest("patch", "events", path, (), change, MERGE_PATCH))
        except ApiNotFound:  # the server deletes Events after an hour
            await self._session.call(create)
        return "update"


def event_name(event: NodeEvent, subject: str) -> str:
    """`<object>.<hash>`: equal Events of an object have the same name, also after a restart."""
    parts = (event.namespace, event.pod, event.pod_uid, event.reason, event.text)
    digest = hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()
    return f"{subject[:200].rstrip('.-')}.{digest[:16]}"


def event_object(
    event: NodeEvent, series: EventSeries, node: str, now: dt.datetime
) -> dict[str, object]:
    """The Event as a JSON object of the API.

    Like the kubelet, it uses the Node's name as uid of the Node: `kubectl describe node` selects by
    it (kubernetes pkg/kubelet/kubelet.go, nodeRef).
    """
    regarding = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node}
    if event.pod:
        pod = {"kind": "Pod", "namespace": event.namespace, "name": event.pod, "uid": event.pod_uid}
        regarding |= pod

    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": series.name, "namespace": event.namespace or NODE_NAMESPACE},
        "involvedObject": regarding,
        "reason": event.reason,
        "message": cap(event.text, TEXT_LIMIT),
        "type": "Warning" if event.warning else "Normal",
        "source": {"component": WRITER, "host": node},
        "reportingComponent": WRITER,
        "reportingInstance": node,
        "firstTimestamp": encode_stamp(now),
        "lastTimestamp": encode_stamp(now),
        "count": series.count,
    }
