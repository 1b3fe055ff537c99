"""The API server of a replay: the trace's events and the agent's own writes, in one store.

LIST and GET show the present; both watches show each write so many seconds after it was made.
"""

import asyncio
import copy
import dataclasses
from collections.abc import Mapping

from agent.cluster import MUTEX_LOCK, NodeView, PodList, PodUid, PodView
from agent.sandbox.apiserver_requests import merge_patch
from tests.fakes.chance import NoChance, Seeded
from tests.fakes.clock import LoopClock
from tests.machine.api import AgentApi, ApiFaults, ApiGate, Store
from tests.traces.trace import Json, Notes, PodEvent, TracedNodeEvent

STEP = 0.001
"""Seconds before and after each request, beside the 0.002 for its way to the server.

A recorder sees a write a little after it was made. So what a trace tells within this time of a
request is there when the request arrives.
"""


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


class TracedCluster(Store):
    """The objects, and what the agent asked for."""

    def __init__(self, node: Json) -> None:
        super().__init__(LoopClock(), Seeded())
        self.name: str = node["metadata"]["name"]
        self.gone: dict[str, float] = {}
        """When each pod was deleted, by UID."""
        self.locks: list[TracedHolding] = []
        self.patches: list[Patch] = []
        self.removals: list[Removal] = []
        self.others: list[str] = []
        """Other writes, in words."""
        self.reads: list[tuple[float, str]] = []
        self._by = "scheduler"
        self.told = self._note
        self._write("nodes", ("", self.name), copy.deepcopy(node))

    def gone_by(self, at: float) -> set[str]:
        """The UIDs of the pods that were deleted until then."""
        return {uid for uid, deleted in self.gone.items() if deleted <= at}

    def take_pod(self, event: PodEvent) -> None:
        """Somebody else's write of a pod: its annotations are joined with the agent's."""
        pod = copy.deepcopy(event.pod)
        metadata = pod["metadata"]
        key = metadata["namespace"], metadata["name"]
        if event.kind == "DELETED":
            self._remove("pods", key)
            self.gone[metadata["uid"]] = _now()
            return
        held = self.get("pods", *key)["metadata"]["annotations"] if event.kind != "ADDED" else {}
        notes = {**held, **event.notes}
        metadata["annotations"] = {key: text for key, text in notes.items() if text is not None}
        self._write("pods", key, pod)

    def take_node(self, event: TracedNodeEvent) -> None:
        """Somebody else's write of the Node."""
        changes = {"metadata": {"annotations": dict(event.notes)}}
        self.update("nodes", "", self.name, lambda held: merge_patch(held, changes))

    def is_released(self, _value: str) -> None:
        """The agent is about to take the lock away."""
        self._by = "agent"

    def _note(self, resource: str, before: Json | None, after: Json | None) -> None:
        """Keep which locks stood, and who ended them."""
        if resource != "nodes" or before is None or after is None:
            return
        was, now = (one["metadata"]["annotations"].get(MUTEX_LOCK) for one in (before, after))
        if was == now:
            return
        if was:
            self.locks[-1].until, self.locks[-1].by = _now(), "next" if now else self._by
        if now:
            self.locks.append(TracedHolding(now, _now()))
        self._by = "scheduler"


class TracedApi(AgentApi):
    """NodeApi and PodApi over the cluster; what is asked for is noted there."""

    def __init__(self, cluster: TracedCluster, *, pods_lag: float, node_lag: float) -> None:
        gates = ApiGate(cluster, pods_lag), ApiGate(cluster, node_lag)
        faults = ApiFaults(cluster, *gates)
        super().__init__(cluster, faults, NoChance(), _step, cluster.name)
        self._cluster = cluster
        self.released = cluster.is_released

    async def get_node(self) -> NodeView | None:
        self._cluster.reads.append((_now(), "get_node"))
        return await super().get_node()

    async def list_pods(self) -> PodList:
        self._cluster.reads.append((_now(), "list_pods"))
        return await super().list_pods()

    async def get_pod(self, namespace: str, name: str) -> PodView | None:
        self._cluster.reads.append((_now(), "get_pod"))
        return await super().get_pod(namespace, name)

    async def annotate_node(self, annotations: Mapping[str, str | None]) -> NodeView:
        self._cluster.others.append(f"the Node is given {dict(annotations)}")
        return await super().annotate_node(annotations)

    async def release_lock(self, key: str, value: str) -> None:
        done = False
        try:
            await super().release_lock(key, value)
            done = True
        finally:
            self._cluster.removals.append(Removal(_now(), key, value, done))

    async def annotate_pod(
        self, namespace: str, name: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        done = False
        try:
            await super().annotate_pod(namespace, name, uid, annotations)
            done = True
        finally:
            self._cluster.patches.append(Patch(_now(), name, uid, annotations, done))


async def _step() -> None:
    await asyncio.sleep(STEP)


def _now() -> float:
    return asyncio.get_running_loop().time()
