"""The ports NodeApi and PodApi of `run --observe`: reads pass, writes are only logged.

Reads show the Node as it would be after the writes, so services find their writes done. They do not
show what other programs would do with those annotations.
"""

from collections.abc import AsyncIterator, Mapping

import msgspec
import structlog

from agent.core.cluster.annotations import HANDSHAKE
from agent.core.cluster.changes import NodeChange, NodeEvent, PodChange, PodList
from agent.core.cluster.pods import NodeView, PodUid, PodView
from agent.core.errors import ApiNotFound
from agent.core.ports import NodeApi, PodApi

log = structlog.get_logger(__name__)


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
