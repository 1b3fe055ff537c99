"""The API server of a replay: the trace's events and the agent's own writes, in one order.

LIST and GET show the present; both watches show each write so many seconds after it was made.
"""

import asyncio
import copy
import dataclasses
from collections.abc import AsyncIterator, Mapping

from agent.cluster import MUTEX_LOCK, NodeView, PodChange, PodList, PodUid, PodView
from agent.errors import ApiInvalid, ApiNotFound
from agent.kube.objects import decode_node, decode_pod
from tests.traces.trace import RESOURCE, Json, Notes, PodEvent, TracedNodeEvent

TRIP = 0.003
"""Seconds from the agent to the server, and as many back.

A recorder sees a write a little after it was made. So what a trace tells within this time of a
request is there when the request arrives.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One write, for the watches. `at`: on the loop's clock."""

    version: int
    at: float
    obj: Json
    deleted: bool = False


@dataclasses.dataclass(slots=True)
class TracedHolding:
    """A lock that stood on the Node. `by`: who ended it, empty while it stands."""

    text: str
    since: float
    until: float = 0.0
    by: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """A patch of a pod that the agent asked for. `done`: it was accepted."""

    at: float
    name: str
    uid: str
    notes: Notes
    done: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Removal:
    """The removal of a lock that the agent asked for. `done`: the lock had this text."""

    at: float
    key: str
    text: str
    done: bool


class TracedCluster:
    """The objects, and what the agent asked for."""

    def __init__(self, node: Json) -> None:
        self.node = copy.deepcopy(node)
        self.pods: dict[tuple[str, str], Json] = {}
        self.gone: dict[str, float] = {}
        """When each pod was deleted, by UID."""
        self.locks: list[TracedHolding] = []
        self.patches: list[Patch] = []
        self.removals: list[Removal] = []
        self.others: list[str] = []
        """Other writes, in words."""
        self.reads: list[tuple[float, str]] = []
        self._version = 1
        self._frames: dict[str, list[Frame]] = {"pods": [], "node": []}
        self._changed = asyncio.Event()
        self.node["metadata"]["resourceVersion"] = "1"

    @property
    def version(self) -> int:
        return self._version

    @property
    def lock(self) -> TracedHolding | None:
        """The lock that stands."""
        return self.locks[-1] if self.locks and not self.locks[-1].by else None

    def bound(self) -> list[Json]:
        """The pods of this node."""
        return [pod for pod in self.pods.values() if pod["spec"]["nodeName"]]

    def gone_by(self, at: float) -> set[str]:
        """The UIDs of the pods that were deleted until then."""
        return {uid for uid, deleted in self.gone.items() if deleted <= at}

    def take_pod(self, event: PodEvent) -> None:
        """Somebody else's write of a pod: its annotations are joined with the agent's."""
        metadata = event.pod["metadata"]
        key = metadata["namespace"], metadata["name"]
        held = self.pods.get(key)
        pod = copy.deepcopy(event.pod)
        pod["metadata"]["annotations"] = _noted(
            held if event.kind != "ADDED" else None, event.notes
        )
        if event.kind == "DELETED":
            del self.pods[key]
            self.gone[metadata["uid"]] = _now()
        else:
            self.pods[key] = pod
        self._tell("pods", pod, deleted=event.kind == "DELETED")

    def take_node(self, event: TracedNodeEvent) -> None:
        """Somebody else's write of the Node."""
        self.note_node(event.notes, "scheduler")

    def note_node(self, notes: Notes, by: str) -> None:
        """Annotations of the Node, written by `by`."""
        if MUTEX_LOCK in notes:
            if self.lock is not None:
                self.lock.until, self.lock.by = _now(), by if notes[MUTEX_LOCK] is None else "next"
            if text := notes[MUTEX_LOCK]:
                self.locks.append(TracedHolding(text, _now()))
        node = copy.deepcopy(self.node)
        node["metadata"]["annotations"] = _noted(node, notes)
        self.node = self._tell("node", node)

    def note_pod(self, key: tuple[str, str], notes: Notes) -> None:
        """Annotations of a pod, written by the agent."""
        pod = copy.deepcopy(self.pods[key])
        pod["metadata"]["annotations"] = _noted(pod, notes)
        self.pods[key] = self._tell("pods", pod)

    async def follow(self, what: str, since: int, lag: float) -> AsyncIterator[Frame]:
        """The writes after that version, each `lag` seconds after it was made."""
        frames = self._frames[what]
        place = 0
        while True:
            while place == len(frames):
                await self._changed.wait()
            frame = frames[place]
            place += 1
            if frame.version > since:
                await asyncio.sleep(frame.at + lag - _now())
                yield frame

    def _tell(self, what: str, obj: Json, *, deleted: bool = False) -> Json:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        self._frames[what].append(Frame(self._version, _now(), obj, deleted))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return obj


class TracedApi:
    """NodeApi and PodApi over the cluster."""

    def __init__(self, cluster: TracedCluster, *, pods_lag: float, node_lag: float) -> None:
        self._cluster = cluster
        self._pods_lag = pods_lag
        self._node_lag = node_lag

    async def watch_node(self) -> AsyncIterator[NodeView | None]:
        await asyncio.sleep(2 * TRIP)
        node, version = self._cluster.node, self._cluster.version
        await asyncio.sleep(self._node_lag)
        yield decode_node(node)
        async for frame in self._cluster.follow("node", version, self._node_lag):
            yield decode_node(frame.obj)

    async def get_node(self) -> NodeView | None:
        async with _Request(self._cluster, "get_node"):
            return decode_node(self._cluster.node)

    async def annotate_node(self, annotations: Mapping[str, str | None]) -> NodeView:
        async with _Request(self._cluster):
            self._cluster.others.append(f"the Node is given {dict(annotations)}")
            self._cluster.note_node(annotations, "agent")
            return decode_node(self._cluster.node)

    async def release_lock(self, key: str, value: str) -> None:
        async with _Request(self._cluster):
            held = self._cluster.node["metadata"]["annotations"].get(key)
            self._cluster.removals.append(Removal(_now(), key, value, held == value))
            if held == value:
                self._cluster.note_node({key: None}, "agent")
        if held != value:
            raise ApiInvalid("the test failed", status=422)

    async def list_pods(self) -> PodList:
        async with _Request(self._cluster, "list_pods"):
            pods = tuple(decode_pod(pod, RESOURCE) for pod in self._cluster.bound())
            version = str(self._cluster.version)
        return PodList(pods, version)

    async def get_pod(self, namespace: str, name: str) -> PodView | None:
        async with _Request(self._cluster, "get_pod"):
            bound = self._cluster.bound()
        found = (decode_pod(pod, RESOURCE) for pod in bound)
        return next((pod for pod in found if pod.key == (namespace, name)), None)

    async def watch_pods(self, resource_version: str) -> AsyncIterator[PodChange]:
        await asyncio.sleep(2 * TRIP)
        yield PodChange(resource_version)
        since = int(resource_version)
        async for frame in self._cluster.follow("pods", since, self._pods_lag):
            if frame.obj["spec"]["nodeName"]:
                pod = decode_pod(frame.obj, RESOURCE)
                yield PodChange(str(frame.version), pod, deleted=frame.deleted)

    async def annotate_pod(
        self, namespace: str, name: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        async with _Request(self._cluster):
            pod = self._cluster.pods.get((namespace, name))
            done = pod is not None and pod["metadata"]["uid"] == uid
            self._cluster.patches.append(Patch(_now(), name, uid, annotations, done))
            if done:
                self._cluster.note_pod((namespace, name), annotations)
        if pod is None:
            raise ApiNotFound("there is no such pod", status=404)
        if not done:
            raise ApiInvalid("metadata.uid: field is immutable", status=422)


class _Request:
    """One request: it takes its time to get there, and its answer to come back."""

    def __init__(self, cluster: TracedCluster, read: str = "") -> None:
        self._cluster = cluster
        self._read = read

    async def __aenter__(self) -> None:
        if self._read:
            self._cluster.reads.append((_now(), self._read))
        await asyncio.sleep(TRIP)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(TRIP)


def _noted(before: Json | None, notes: Notes) -> dict[str, str]:
    held: dict[str, str | None] = dict(
        (before or {"metadata": {}})["metadata"].get("annotations") or {}
    )
    held.update(notes)
    return {key: text for key, text in held.items() if text is not None}


def _now() -> float:
    return asyncio.get_running_loop().time()
