"""A trace is played to the agent on virtual time.

Everybody but the agent does what the trace says, when it says so. An answer that took longer than
the recorded one delays all that comes after it: the kubelet waits for it, and the pod with it.
"""

import asyncio
import copy
import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from agent.allocate.match import MatchSettings
from agent.allocate.room import RequestRules
from agent.cluster import MUTEX_LOCK, NodeView, PodList, PodUid, PodView
from agent.errors import Refusal, WitnessUnsupported
from agent.kit.cell import Cell
from agent.ledger import ContainerEdits, ContainerKey, Holding, KubeletEpoch, State
from agent.model import SliceId
from agent.sandbox.apiserver_requests import merge_patch
from agent.state import StateService
from tests.builders import a_gpu, a_shared_gpu, an_inventory
from tests.fakes.chance import NoChance, Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.disk import MemoryDisk
from tests.fakes.kubelet_side import FakeHookDirs
from tests.machine.agent_life import AgentServices
from tests.machine.api import AgentApi, ApiFaults, ApiGate, Store
from tests.services.at_work import at_work
from tests.traces.trace import (
    RESOURCE,
    CallEnd,
    Json,
    Notes,
    PodEvent,
    Trace,
    TracedCall,
    TracedNodeEvent,
)

AFTERWARDS = 40.0
"""Seconds after the trace's last event: a lock may stand for 35."""
FSYNC = 0.002
"""Seconds for one write of the ledger."""
ANSWER = 0.0006
"""Seconds for one Get."""
STEP = 0.001
"""Seconds before and after each request, beside the 0.002 for its way to the server.

A recorder sees a write a little after it was made. So what a trace tells within this time of a
request is there when the request arrives.
"""

# The API server: the trace's events and the agent's own writes, in one store. LIST and GET show the
# present; both watches show each write so many seconds after it was made.


@dataclasses.dataclass(slots=True)
class TracedHolding:
    """A lock that stood on the Node. `by`: who ended it, empty while it stands."""

    text: str
    since: float
    until: float = 0.0
    by: str = ""


class Patch(NamedTuple):
    """A patch of a pod that the agent asked for. `done`: it was accepted."""

    at: float
    name: str
    uid: str
    notes: Notes
    done: bool


class Removal(NamedTuple):
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


# The kubelet. It books a pod just before it admits it, and drops it when it was rejected, is
# terminal or deleted; it hears of that only between two admissions. Its Get has only a name and
# lists no ordinary init container. An entry of the checkpoint whose pod is gone stays until the
# next admission. Ids of an init container that is over go to the next container of its pod first,
# and where they are enough, it asks for no preference.


@dataclasses.dataclass(slots=True)
class _Booked:
    pod: Json
    ids: dict[str, frozenset[SliceId]] = dataclasses.field(default_factory=dict)

    @property
    def uid(self) -> str:
        uid: str = self.pod["metadata"]["uid"]
        return uid

    @property
    def holding(self) -> Holding:
        metadata, spec = self.pod["metadata"], self.pod["spec"]
        sidecars = [one for one in spec["initContainers"] if one.get("restartPolicy") == "Always"]
        return Holding(
            metadata["namespace"],
            metadata["name"],
            {
                one["name"]: {RESOURCE: self.ids[one["name"]]} if one["name"] in self.ids else {}
                for one in (*sidecars, *spec["containers"])
            },
        )


class TracedKubelet:
    """Witness, RecordsReader and Containers. `can_get`: it is 1.34 or later."""

    def __init__(self, all_ids: Iterable[str], *, can_get: bool = True) -> None:
        self._can_get = can_get
        self._all = tuple(all_ids)
        self._books: dict[tuple[str, str], _Booked] = {}
        self._records: set[ContainerKey] = set()
        self._running: dict[str, set[str]] = {}
        self._is_admitting = False
        self._unheard: list[Json] = []

    def begin(self, pod: Json) -> None:
        """An Allocate for a container of the pod begins."""
        key = _key(pod)
        if key not in self._books or self._books[key].uid != pod["metadata"]["uid"]:
            self._books[key] = _Booked(pod)
        self._is_admitting = True
        active = {booked.uid for booked in self._books.values()}
        self._records = {one for one in self._records if one.pod_uid in active}

    def reused(self, call: TracedCall) -> tuple[SliceId, ...]:
        """The ids for it of init containers that are over; none where they are too few."""
        booked = self._books[_key(call.pod)]
        spec = call.pod["spec"]
        over = {one["name"] for one in spec["initContainers"] if "restartPolicy" not in one}
        held = [one for name, ids in booked.ids.items() if name in over for one in sorted(ids)]
        return tuple(held[: len(call.ids)]) if len(held) >= len(call.ids) else ()

    def free(self) -> tuple[SliceId, ...]:
        """The ids that no container holds."""
        taken = {
            one for booked in self._books.values() for held in booked.ids.values() for one in held
        }
        return tuple(SliceId(one) for one in self._all if one not in taken)

    def end(self, pod: Json, container: str, ids: tuple[SliceId, ...]) -> None:
        """The Allocate has ended; without a container it was refused."""
        key = _key(pod)
        if container:
            self._books[key].ids[container] = frozenset(ids)
            self._records.add(ContainerKey(PodUid(pod["metadata"]["uid"]), container))
        else:
            del self._books[key]
        self._is_admitting = False
        unheard, self._unheard = self._unheard, []
        for gone in unheard:
            self._drop(gone)

    def see(self, pod: Json, *, deleted: bool) -> None:
        """The API server has another state of the pod."""
        status = pod["status"]
        told = (*status["containerStatuses"], *status["initContainerStatuses"])
        self._running[pod["metadata"]["uid"]] = {
            one["containerID"].rpartition("://")[2]
            for one in told
            if "running" in one["state"] and not deleted
        }
        if deleted or status["phase"] in {"Succeeded", "Failed"}:
            if self._is_admitting:
                self._unheard.append(pod)
            else:
                self._drop(pod)

    async def get(self, namespace: str, pod: str) -> Holding | None:
        await asyncio.sleep(ANSWER)
        if not self._can_get:
            raise WitnessUnsupported("unknown method Get")
        booked = self._books.get((namespace, pod))
        return None if booked is None else booked.holding

    async def list(self) -> tuple[Holding, ...]:
        await asyncio.sleep(ANSWER)
        return tuple(booked.holding for booked in self._books.values())

    async def read(self, resource: str) -> dict[ContainerKey, frozenset[SliceId]] | None:
        assert resource == RESOURCE
        return dict.fromkeys(self._records, frozenset[SliceId]())

    async def begun(self) -> None:
        return None

    async def running(self, ids: frozenset[str]) -> frozenset[str]:
        return ids & {one for alive in self._running.values() for one in alive}

    def _drop(self, pod: Json) -> None:
        key = _key(pod)
        if key in self._books and self._books[key].uid == pod["metadata"]["uid"]:
            del self._books[key]


def _key(pod: Json) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


# The play.


class SlowDisk(MemoryDisk):
    """A disk that takes its time."""

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        await asyncio.sleep(FSYNC)
        await super().replace(name, data, keep=keep)


def traced_agent(trace: Trace, api: TracedApi, kubelet: TracedKubelet) -> AgentServices:
    """One agent's real services on the trace's Node, with the GPUs that it had registered."""
    gpus = [
        a_shared_gpu(
            gpu=a_gpu(uuid=one["id"], index=one.get("index", 0), memory_mib=one["devmem"]),
            split_count=one["count"],
            core_percent=one["devcore"],
        )
        for one in trace.gpus
    ]
    agent = AgentServices(
        StateService(disk=SlowDisk(), recovered=State(), boot_id="boot"),
        api,
        (kubelet, kubelet.read, kubelet),
        FakeHookDirs(),
        inventory=Cell(an_inventory(gpus=gpus)),
        epoch=Cell[KubeletEpoch | None](KubeletEpoch(7, int(trace.begin * 1e9))),
        match=MatchSettings(trace.node["metadata"]["name"], requests=RequestRules(known=True)),
        clock=LoopClock(dt.datetime.fromtimestamp(trace.begin, dt.UTC)),
        chance=Seeded(),
    )
    agent.streams.set(1)
    return agent


class ReplayedAnswer(NamedTuple):
    """What a call of the trace was answered, on the loop's clock. `ids`: named by the kubelet."""

    call: TracedCall
    ids: tuple[SliceId, ...]
    began: float
    ended: float
    edits: ContainerEdits | None
    refusal: str

    @property
    def uid(self) -> str:
        return self.call.uid


class ReplayedStory(NamedTuple):
    """How a replay went."""

    trace: Trace
    cluster: TracedCluster
    answers: tuple[ReplayedAnswer, ...]


async def replay(
    trace: Trace, *, pods_lag: float, node_lag: float, can_get: bool = True
) -> ReplayedStory:
    """The whole trace, with watches that lag by so many seconds, maybe on an old kubelet."""
    cluster, kubelet = TracedCluster(trace.node), TracedKubelet(trace.ids, can_get=can_get)
    agent = traced_agent(trace, TracedApi(cluster, pods_lag=pods_lag, node_lag=node_lag), kubelet)
    loop = asyncio.get_running_loop()
    begin = loop.time()
    answers: list[ReplayedAnswer] = []
    call: asyncio.Task[ReplayedAnswer] | None = None
    async with at_work(*agent.runs):
        for event in trace.events:
            await asyncio.sleep(begin + event.t - loop.time())
            match event:
                case PodEvent():
                    cluster.take_pod(event)
                    kubelet.see(event.pod, deleted=event.kind == "DELETED")
                case TracedNodeEvent():
                    cluster.take_node(event)
                case TracedCall():
                    began = loop.time()
                    kubelet.begin(event.pod)
                    # The ids that the kubelet takes: those that the agent prefers, if it asks.
                    ids = kubelet.reused(event) or await agent.allocation.prefer(
                        kubelet.free(), (), len(event.ids)
                    )
                    # What happened during the call happens during the call.
                    begin += loop.time() - began
                    call = loop.create_task(_ask(event, ids, began, (agent, kubelet)))
                case CallEnd():
                    assert call is not None
                    answers.append(await call)
                    begin = max(begin, loop.time() - event.t)
        await asyncio.sleep(AFTERWARDS)
    return ReplayedStory(trace, cluster, tuple(answers))


async def _ask(
    call: TracedCall,
    ids: tuple[SliceId, ...],
    began: float,
    node: tuple[AgentServices, TracedKubelet],
) -> ReplayedAnswer:
    """The kubelet's Allocate, and what it makes of the answer."""
    agent, kubelet = node
    edits, refusal = None, ""
    try:
        edits = await agent.allocation.allocate(ids)
    except Refusal as error:
        refusal = str(error)
    kubelet.end(call.pod, call.container if edits else "", ids)
    return ReplayedAnswer(call, ids, began, asyncio.get_running_loop().time(), edits, refusal)
