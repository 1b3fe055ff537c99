"""The requests of the agent: its Node and the pods of its node."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
import structlog

from agent.cluster import (
    HANDSHAKE,
    NodeChange,
    NodeCondition,
    NodeEvent,
    NodeView,
    PodChange,
    PodList,
    PodUid,
    PodView,
)
from agent.errors import ApiError, ApiNotFound, MalformedText
from agent.kube.client import (
    MERGE_PATCH,
    METADATA_ONLY,
    STRATEGIC_PATCH,
    ApiRequest,
    KubeSession,
    aside,
    path_of,
)
from agent.kube.events import EventPoster, stamp
from agent.kube.lists import OPENED, Lists, WatchTimes, frames
from agent.kube.narrow import Raw, read_object, read_pod
from agent.kube.objects import decode_node, decode_pod
from agent.ports import NodeApi, PodApi

# The ports NodeApi, NodeStatusApi and PodApi over the API server.

log = structlog.get_logger(__name__)

JSON_PATCH = "application/json-patch+json"
DEFAULT_PACE = WatchTimes()


class KubeNode:
    """This Node at the API server (port NodeApi)."""

    def __init__(self, session: KubeSession, node: str, pace: WatchTimes = DEFAULT_PACE) -> None:
        self._session = session
        self._node = node
        self._pace = pace

    async def watch_node(self) -> AsyncIterator[NodeChange]:
        """Send one WATCH by name without a version: the server first sends the present Node."""
        query = (
            ("watch", "1"),
            ("fieldSelector", f"metadata.name={self._node}"),
            ("allowWatchBookmarks", "true"),
        )
        request = ApiRequest("watch", "nodes", path_of("nodes"), query=query, accept=METADATA_ONLY)
        async for frame in frames(self._session, request, self._pace, _shown):
            if frame.kind == OPENED:
                yield NodeChange(opened=True)
            elif frame.kind != "BOOKMARK":
                yield NodeChange(frame.obj)

    async def get_node(self) -> NodeView | None:
        """Send one GET; without a version the server answers from its storage, not from a cache."""
        request = ApiRequest("get", "nodes", path_of("nodes", self._node), accept=METADATA_ONLY)
        try:
            return _node(request, await self._session.fetch(request))
        except ApiNotFound:
            return None

    async def annotate_node(self, annotations: Mapping[str, str | None]) -> NodeView:
        """Send one merge patch of these annotations."""
        body = {"metadata": {"annotations": dict(annotations)}}
        request = self._patch(body, MERGE_PATCH)
        return _node(request, await self._session.fetch(request))

    async def annotate_as_seen(self, version: str, annotations: Mapping[str, str | None]) -> None:
        """Do as annotate_node() if the Node still has this resourceVersion.

        Raises ApiConflict: it has another one; ApiError.
        """
        body = {"metadata": {"resourceVersion": version, "annotations": dict(annotations)}}
        await self._session.call(self._patch(body, MERGE_PATCH))

    async def release_lock(self, key: str, value: str) -> None:
        """Send one JSON patch: nothing changes unless annotation `key` is exactly `value`."""
        pointer = "/metadata/annotations/" + key.replace("~", "~0").replace("/", "~1")
        body = (
            {"op": "test", "path": pointer, "value": value},
            {"op": "remove", "path": pointer},
        )
        await self._session.call(self._patch(body, JSON_PATCH))

    def _patch(
        self, body: Mapping[str, object] | Sequence[object], content_type: str
    ) -> ApiRequest:
        return ApiRequest(
            "patch",
            "nodes",
            path_of("nodes", self._node),
            body=body,
            content_type=content_type,
            accept=METADATA_ONLY,
        )


class KubeNodeStatus:
    """The status of this Node (port NodeStatusApi)."""

    def __init__(self, session: KubeSession, node: str) -> None:
        self._session = session
        self._node = node

    async def set_condition(self, condition: NodeCondition) -> None:
        """Send one strategic merge patch, which merges conditions by their type."""
        since = stamp(condition.since)
        entry = {
            "type": condition.kind,
            "status": str(condition.status),
            "reason": condition.reason,
            "message": condition.message,
            "lastHeartbeatTime": since,
            "lastTransitionTime": since,
        }
        path = path_of("nodes", self._node, "status")
        body = {"status": {"conditions": [entry]}}
        request = ApiRequest("patch", "nodes/status", path, (), body, STRATEGIC_PATCH)
        await self._session.call(request)


class KubePods:
    """The pods of this node at the API server (port PodApi).

    `resource` is the extended resource whose requests the views count.
    """

    def __init__(
        self,
        session: KubeSession,
        node: str,
        resource: str,
        events: EventPoster,
        pace: WatchTimes = DEFAULT_PACE,
    ) -> None:
        self._session = session
        self._lists = Lists(session)
        self._node = node
        self._selector = ("fieldSelector", f"spec.nodeName={node}")
        self._resource = resource
        self._events = events
        self._pace = pace

    async def list_pods(self) -> PodList:
        """Send one LIST, answered from the server's storage, in as many pages as needed."""
        request = ApiRequest("list", "pods", path_of("pods"), query=(self._selector,))
        listed = await self._lists.fetch(request, lambda item: self._view(read_pod(item)))
        return PodList(tuple(pod for pod in listed.items if pod is not None), listed.version)

    async def get_pod(self, namespace: str, name: str) -> PodView | None:
        """Send one GET; without a version the server answers from its storage, not from a cache."""
        path = path_of("namespaces", namespace, "pods", name)
        request = ApiRequest("get", "pods", path)
        try:
            body = await self._session.call(request)
            pod = await aside(body, lambda raw: decode_pod(read_pod(raw), self._resource))
        except ApiNotFound:
            return None
        except MalformedText as error:
            raise ApiError(f"{request.what}: {error}") from error
        return pod if pod.node == self._node else None

    async def watch_pods(self, resource_version: str) -> AsyncIterator[PodChange]:
        """Send one WATCH with bookmarks; a first change of the requested version: it is open."""
        query = (
            ("watch", "1"),
            self._selector,
            ("resourceVersion", resource_version),
            ("allowWatchBookmarks", "true"),
        )
        request = ApiRequest("watch", "pods", path_of("pods"), query=query)
        async for frame in frames(self._session, request, self._pace, self._change):
            yield frame.obj or PodChange(resource_version)

    async def annotate_pod(
        self, namespace: str, name: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        """Send one merge patch to pods/status, which a node's own identity may patch."""
        body = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        path = path_of("namespaces", namespace, "pods", name, "status")
        request = ApiRequest(
            "patch",
            "pods/status",
            path,
            body=body,
            content_type=MERGE_PATCH,
            accept=METADATA_ONLY,
        )
        await self._session.call(request)

    async def post_event(self, event: NodeEvent) -> None:
        """Create or update an Event; a too frequent one is only counted."""
        await self._events.post(event)

    def _change(self, kind: str, obj: Raw) -> PodChange:
        """The change that one frame reports. Raises MalformedText."""
        content = read_pod(obj)
        pod = None if kind == "BOOKMARK" else self._view(content)
        return PodChange(_version(content), pod, deleted=kind == "DELETED")

    def _view(self, obj: Mapping[str, Any]) -> PodView | None:
        try:
            return decode_pod(obj, self._resource)
        except MalformedText as error:
            log.warning("kube.pod_unreadable", err=str(error))
            return None


def _shown(kind: str, obj: Raw) -> NodeView | None:
    """The Node in one frame; None when it was deleted. Raises MalformedText."""
    return decode_node(read_object(obj)) if kind in {"ADDED", "MODIFIED"} else None


def _node(request: ApiRequest, obj: Mapping[str, Any]) -> NodeView:
    try:
        return decode_node(obj)
    except MalformedText as error:
        raise ApiError(f"{request.what}: {error}") from error


def _version(obj: Mapping[str, Any]) -> str:
    metadata = obj.get("metadata")
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    if not isinstance(version, str):
        raise MalformedText("an object of the answer has no resourceVersion")
    return version


# The ports NodeApi and PodApi of `run --observe`: reads pass, writes are only logged.
#
# Reads show the Node as it would be after the writes, so services find their writes done. They do
# not show what other programs would do with those annotations.


class ObservedNode:
    """This Node without a write (port NodeApi)."""

    def __init__(self, node: NodeApi) -> None:
        self._inner = node
        self._held: NodeView | None = None
        self._written: dict[str, str | None] = {}

    @property
    def pending(self) -> Mapping[str, str | None]:
        """The annotations that would be written to the Node now, without stamps; None removes."""
        held = {} if self._held is None else self._held.annotations
        return {
            key: text
            for key, text in self._written.items()
            if key != HANDSHAKE and held.get(key) != text
        }

    async def watch_node(self) -> AsyncIterator[NodeChange]:
        """Watch the Node, shown with the annotations not written."""
        async for change in self._inner.watch_node():
            if change.opened:
                yield change
                continue
            if change.node is None or (self._held and change.node.uid != self._held.uid):
                self._written.clear()
            self._held = change.node
            yield NodeChange(change.node and self._shown(change.node))

    async def get_node(self) -> NodeView | None:
        """Get the Node, shown with the annotations not written."""
        node = await self._inner.get_node()
        is_held = node is not None and self._held is not None and node.uid == self._held.uid
        return self._shown(node) if node is not None and is_held else node

    async def annotate_node(self, annotations: Mapping[str, str | None]) -> NodeView:
        """Remember the write, and log it if it adds something to write. Raises ApiNotFound."""
        if self._held is None:
            raise ApiNotFound("the Node has not been seen yet", status=404)
        before = self.pending
        self._written.update(annotations)
        pending = self.pending
        if pending and pending != before:
            log.info("observe.would_write", node=self._held.name, annotations=pending)
        return self._shown(self._held)

    async def release_lock(self, key: str, value: str) -> None:
        """Log it; the lock stays."""
        log.info("observe.would_release", key=key, value=value)

    def _shown(self, node: NodeView) -> NodeView:
        """The Node after the writes; without a version, which no server sent."""
        annotations = {**node.annotations, **self._written}
        kept = {key: text for key, text in annotations.items() if text is not None}
        return msgspec.structs.replace(node, annotations=kept, resource_version="")


class ObservedPods:
    """The pods of this node without a write (port PodApi)."""

    def __init__(self, pods: PodApi) -> None:
        self._inner = pods

    async def list_pods(self) -> PodList:
        """List the pods."""
        return await self._inner.list_pods()

    async def get_pod(self, namespace: str, name: str) -> PodView | None:
        """Get the pod."""
        return await self._inner.get_pod(namespace, name)

    def watch_pods(self, resource_version: str) -> AsyncIterator[PodChange]:
        """Watch the pods."""
        return self._inner.watch_pods(resource_version)

    async def annotate_pod(
        self, namespace: str, name: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        """Log it; the pod does not change."""
        keys = sorted(annotations)
        log.info("observe.would_annotate", ns=namespace, pod=name, pod_uid=uid, keys=keys)

    async def post_event(self, event: NodeEvent) -> None:
        """Log it; no Event is posted."""
        log.info("observe.would_post", reason=event.reason, text=event.text, pod=event.pod)
