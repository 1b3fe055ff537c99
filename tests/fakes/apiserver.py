"""The API server in memory, behind the two ports: real versions and preconditions, faults on call.

It counts every call, answers writes that change nothing without a new version, and delivers
watches late when told to (`lag`).
"""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Mapping

import msgspec

from agent.cluster import NodeEvent, NodeView, PodChange, PodList, PodUid, PodView
from agent.errors import ApiError, ApiGone, ApiInvalid, ApiNotFound, ApiThrottled
from tests.builders import NODE

BOOKMARKS = 60.0
WRITES = ("annotate_node", "release_lock", "annotate_pod")


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One write, as the watches see it."""

    version: int
    change: PodChange | NodeView | None


class FakeApi:
    """One Node and the pods bound to it."""

    def __init__(self, name: str = NODE) -> None:
        self.calls: Counter[str] = Counter()
        self.lag = 0.0
        self.delay = 0.0
        self.way_back = 0.0
        """Seconds that what a LIST found takes to arrive."""
        self.node: NodeView | None = None
        self.pods: dict[tuple[str, str], PodView] = {}
        self._name = name
        self._version = 1
        self._born = 0
        self._kept_from = 0
        self._records: list[Record] = []
        self._failures: list[tuple[str | None, ApiError]] = []
        self._down = False
        self._ended = 0
        self._news = asyncio.Event()

    @property
    def writes(self) -> int:
        """How many writes were asked for, refused ones too."""
        return sum(self.calls[name] for name in WRITES)

    def create_node(self, annotations: Mapping[str, str] | None = None) -> NodeView:
        """Somebody creates the Node, each time with another UID."""
        self._born += 1
        node = NodeView(self._name, f"node-uid-{self._born}", "", dict(annotations or {}))
        return self._put_node(node)

    def edit_node(self, annotations: Mapping[str, str | None]) -> NodeView:
        """Somebody else changes annotations (None removes); no difference is no write."""
        if self.node is None:
            raise ApiNotFound("no such Node", status=404)
        merged = {**self.node.annotations, **annotations}
        kept = {key: text for key, text in merged.items() if text is not None}
        if kept == self.node.annotations:
            return self.node
        return self._put_node(msgspec.structs.replace(self.node, annotations=kept))

    def label_node(self, labels: Mapping[str, str]) -> NodeView:
        """Somebody sets all labels."""
        if self.node is None:
            raise ApiNotFound("no such Node", status=404)
        return self._put_node(msgspec.structs.replace(self.node, labels=dict(labels)))

    def delete_node(self) -> None:
        """Somebody deletes the Node."""
        self.node = None
        self._record(None)

    def put_pod(self, pod: PodView) -> PodView:
        """Somebody creates or changes a pod of this node."""
        stored = msgspec.structs.replace(pod, resource_version=str(self._version + 1))
        self.pods[pod.key] = stored
        self._record(PodChange(stored.resource_version, stored))
        return stored

    def edit_pod(self, namespace: str, name: str, annotations: Mapping[str, str | None]) -> PodView:
        """Somebody changes annotations (None removes); no difference is no write."""
        pod = self.pods.get((namespace, name))
        if pod is None:
            raise ApiNotFound("no such pod", status=404)
        merged = {**pod.annotations, **annotations}
        kept = {key: text for key, text in merged.items() if text is not None}
        if kept == pod.annotations:
            return pod
        return self.put_pod(msgspec.structs.replace(pod, annotations=kept))

    def delete_pod(self, namespace: str, name: str) -> None:
        """The pod is gone for good."""
        pod = self.pods.pop((namespace, name))
        version = str(self._version + 1)
        last = msgspec.structs.replace(pod, resource_version=version)
        self._record(PodChange(version, last, deleted=True))

    def fail(self, error: ApiError, *, count: int = 1, call: str | None = None) -> None:
        """Answer the next `count` requests (of that name) with `error`."""
        self._failures += [(call, error)] * count

    def throttle(self, count: int, retry_after: float = 1.0) -> None:
        """Answer the next `count` requests with 429."""
        self.fail(ApiThrottled("too many", status=429, retry_after=retry_after), count=count)

    def begin_outage(self) -> None:
        """Refuse everything and cut the watches."""
        self._down = True
        self._tell()

    def end_outage(self) -> None:
        """Serve again."""
        self._down = False

    def end_watches(self) -> None:
        """End all watches as if their time were over."""
        self._ended += 1
        self._tell()

    def forget_history(self) -> None:
        """Compact: who continues from before is told Gone; open watches end."""
        self._version += 1
        self._kept_from = self._version
        self.end_watches()

    async def watch_node(self) -> AsyncIterator[NodeView | None]:
        await self._enter("watch_node")
        cursor, ended = self._version, self._ended
        is_shown = self.node is not None
        if is_shown:
            yield self.node
        async for record in self._follow(cursor, ended):
            if record is not None and not isinstance(record.change, PodChange):
                is_shown = True
                yield record.change
            elif record is None and not is_shown:  # the first bookmark
                is_shown = True
                yield None

    async def get_node(self) -> NodeView | None:
        await self._enter("get_node")
        return self.node

    async def annotate_node(self, annotations: Mapping[str, str | None]) -> NodeView:
        await self._enter("annotate_node")
        return self.edit_node(annotations)

    async def release_lock(self, key: str, value: str) -> None:
        await self._enter("release_lock")
        if self.node is None:
            raise ApiNotFound("no such Node", status=404)
        if self.node.annotations.get(key) != value:
            raise ApiInvalid("the test failed", status=422)
        self.edit_node({key: None})

    async def list_pods(self) -> PodList:
        await self._enter("list_pods")
        found = PodList(tuple(self.pods.values()), str(self._version))
        await asyncio.sleep(self.way_back)
        return found

    async def get_pod(self, namespace: str, name: str) -> PodView | None:
        await self._enter("get_pod")
        pod = self.pods.get((namespace, name))
        return pod if pod is not None and pod.node == NODE else None

    async def watch_pods(self, resource_version: str) -> AsyncIterator[PodChange]:
        await self._enter("watch_pods")
        cursor, ended = int(resource_version), self._ended
        yield PodChange(resource_version)
        if cursor < self._kept_from:
            raise ApiGone("too old", status=410)
        async for record in self._follow(cursor, ended):
            if record is None:
                yield PodChange(str(self._version))
            elif isinstance(record.change, PodChange):
                yield record.change

    async def annotate_pod(
        self, namespace: str, name: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        await self._enter("annotate_pod")
        pod = self.pods.get((namespace, name))
        if pod is not None and pod.uid != uid:
            raise ApiInvalid("metadata.uid: field is immutable", status=422)
        self.edit_pod(namespace, name, annotations)

    async def _enter(self, call: str) -> None:
        self.calls[call] += 1
        if self.delay:
            await asyncio.sleep(self.delay)
        if self._down:
            raise ApiError("connection refused")
        for place, (wanted, error) in enumerate(self._failures):
            if wanted in (None, call):
                del self._failures[place]
                raise error

    async def _follow(self, cursor: int, ended: int) -> AsyncIterator[Record | None]:
        """Records after `cursor`; None is a bookmark: each minute, and at the end."""
        while True:
            news = self._news
            for record in [record for record in self._records if record.version > cursor]:
                if self.lag:
                    await asyncio.sleep(self.lag)
                if self._down:
                    break
                cursor = record.version
                yield record
            if self._down:
                raise ApiError("connection reset")
            if self._ended != ended:
                yield None
                return
            try:
                async with asyncio.timeout(BOOKMARKS):
                    await news.wait()
            except TimeoutError:
                yield None

    def _put_node(self, node: NodeView) -> NodeView:
        self.node = msgspec.structs.replace(node, resource_version=str(self._version + 1))
        self._record(self.node)
        return self.node

    def _record(self, change: PodChange | NodeView | None) -> None:
        self._version += 1
        self._records.append(Record(self._version, change))
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class EventSink:
    """Takes Events and nothing else; `answers` are errors for the next ones."""

    def __init__(self, *answers: ApiError) -> None:
        self.answers = list(answers)
        self.posted: list[NodeEvent] = []

    async def post_event(self, event: NodeEvent) -> None:
        if self.answers:
            raise self.answers.pop(0)
        self.posted.append(event)
