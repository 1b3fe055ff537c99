"""Posts Events of the core API about this Node or one of its pods."""

import asyncio
import datetime as dt

from agent.core.cluster.changes import NodeEvent
from agent.core.errors import ApiConflict, ApiError, ApiNotFound, cap
from agent.core.ports import Clock
from agent.host.kube.series import EventBook, EventSeries, SeriesStep
from agent.host.kube.session import MERGE_PATCH, ApiRequest, KubeSession, path_of
from agent.kit.tally import Tally

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
