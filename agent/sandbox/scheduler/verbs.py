"""HAMi's part of scheduling: its state of nodes and pods, and the verbs filter and bind.

Source: HAMi v2.10 pkg/scheduler/scheduler.go.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

import structlog

from agent.core.cluster import annotations
from agent.core.ports import Clock
from agent.sandbox.api_errors import Json, StatusError
from agent.sandbox.scheduler.bind import Binder, Memory, placement_patch
from agent.sandbox.scheduler.cluster import ClientQueue, QueuedCluster, SchedulerCluster
from agent.sandbox.scheduler.events import EventQueue, EventRecorder
from agent.sandbox.scheduler.filter import WARNING, Filtered, Notice, filter_pod
from agent.sandbox.scheduler.model import RegisteredNode, SchedulerSettings
from agent.sandbox.scheduler.registry import REQUESTING, Registry
from agent.sandbox.scheduler.requests import COUNT, init_count
from agent.sandbox.scheduler.usage import Informers, Quotas, Reservation, Usage
from agent.sandbox.scheduler.webhook import WebhookAdmission, review_pod

log = structlog.get_logger(__name__)
REGISTER_INTERVAL: Final = 15.0


class HamiVerbs:
    """One HAMi scheduler: its state and its verbs.

    `eager`: ingest a changed Node at once, which HAMi does only every 15 s. All requests go through
    one client queue, also Events, which are sent while `run` runs. A decision does not wait, so
    verbs of several pods may run at the same time.
    """

    def __init__(
        self,
        cluster: SchedulerCluster,
        clock: Clock,
        rng: random.Random,
        settings: SchedulerSettings,
        *,
        eager: bool,
    ) -> None:
        self.settings = settings
        self.usage = Usage()
        self.quotas = Quotas(self.usage, settings.memory_factor)
        self.queue = ClientQueue(settings.kube_qps, settings.kube_burst)
        self._cluster = QueuedCluster(cluster, self.queue)
        self._events = EventQueue(EventRecorder(self._cluster, clock, settings.scheduler_name))
        self._clock = clock
        self._rng = rng
        self._eager = eager
        self._registry = Registry()
        self._registering = asyncio.Lock()
        """HAMi's filter waits while nodes are ingested; its bind does not."""
        self._seen = Informers()
        memory = Memory(self.usage, self._seen)
        self._binder = Binder(self._cluster, clock, settings, rng, self._events, memory)
        self._signatures: dict[str, object] = {}

    async def run(self) -> NoReturn:
        """Send Events for ever."""
        await self._events.run()

    async def see_node(self, kind: str, node: Json) -> bool:
        """Take in an event of a Node. Returns whether it can make a pod fit."""
        name = node["metadata"]["name"]
        self._seen.see("nodes", kind, node)
        if kind == "DELETED":
            self._registry.forget(name)
            self._signatures.pop(name, None)
            return False
        if self._signatures.get(name) == _signature(node):
            return False
        self._signatures[name] = _signature(node)
        if kind == "ADDED" or self._eager:
            async with self._registering:
                await self._ingest(node)
        return True

    def see_pod(self, kind: str, pod: Json) -> None:
        """Take in an event of a pod."""
        self._seen.see("pods", kind, pod)
        if kind == "DELETED":
            self.usage.forget(pod["metadata"]["uid"])
        else:
            self.usage.observe(pod)

    def retain_pods(self, uids: frozenset[str]) -> None:
        """Forget all pods except these: the others were deleted while no watch was open."""
        self._seen.retain_pods(uids)
        self.usage.retain(uids)

    async def ingest(self, nodes: Sequence[Json]) -> bool:
        """Ingest all nodes, as HAMi does every 15 s. Returns whether an offer changed."""
        before = self._registry.changes
        async with self._registering:
            for node in nodes:
                await self._ingest(node)
        return self._registry.changes != before

    async def filter(self, pod: Json, candidates: Sequence[str]) -> Filtered:
        """Choose a node for the pod, reserve its shares there and write them on the pod.

        The write goes by name without a UID, so it can hit a pod that was created again meanwhile.

        Raises:
            StatusError: the pod could not be written; nothing is reserved.
        """
        async with self._registering:
            pass  # wait while nodes are ingested
        metadata = pod["metadata"]
        filtered = self._decide(pod, candidates)
        if filtered.groups is not None:
            seconds = int(self._clock.now().timestamp())
            changes = placement_patch(filtered.nodes[0], filtered.groups, seconds)
            try:
                await self._cluster.patch("pods", metadata["namespace"], metadata["name"], changes)
            except StatusError as refusal:
                self.usage.forget(metadata["uid"])
                await self._events.record(pod, Notice(WARNING, "FilteringFailed", str(refusal)))
                raise
        for notice in filtered.notices:
            await self._events.record(pod, notice)
        return filtered

    def review(self, pod: Json) -> WebhookAdmission:
        """The webhook's answer for a new pod."""
        return review_pod(pod, self.settings, self.quotas)

    async def bind(self, namespace: str, name: str, uid: str, node_name: str) -> None:
        """Lock the node for the pod and bind it there; see `Binder.bind`. Raises BindError."""
        await self._binder.bind(namespace, name, uid, node_name)

    def _decide(self, pod: Json, candidates: Sequence[str]) -> Filtered:
        """Choose and reserve without a wait, so that the next decision counts this one."""
        uid = pod["metadata"]["uid"]
        self.usage.forget(uid)
        registered: dict[str, RegisteredNode] = {}
        for name in candidates:
            state = self._registry.state(name, self.usage.loads(name))
            if state is not None:
                registered[name] = state
        filtered = filter_pod(pod, candidates, registered, self.settings, self._rng, self.quotas)
        if filtered.groups is not None:
            namespace = pod["metadata"]["namespace"]
            held = Reservation(
                filtered.nodes[0], filtered.groups, init_count(pod), namespace=namespace
            )
            self.usage.reserve(uid, held)
        return filtered

    async def _ingest(self, node: Json) -> None:
        name = node["metadata"]["name"]
        writes = self._registry.ingest(node, self._clock.now())
        if not writes:
            return
        try:
            node = await self._annotate(name, writes)
        except StatusError as refusal:  # written again at the next ingestion
            log.info("scheduler.handshake_lost", node=name, err=str(refusal))
        else:
            self._signatures[name] = _signature(node)

    async def _annotate(self, name: str, marks: Mapping[str, str | None]) -> Json:
        """Write annotations of a Node. As in HAMi, an unused read comes first."""
        await self._cluster.get("nodes", "", name)
        return await self._cluster.patch("nodes", "", name, {"metadata": {"annotations": marks}})


def is_closed(node: Json) -> bool:
    """Whether the Node is unschedulable."""
    return bool((node.get("spec") or {}).get("unschedulable"))


def _noted(node: Json) -> Json:
    noted: Json = node["metadata"].get("annotations") or {}
    return noted


def _signature(node: Json) -> object:
    """The part of a Node whose change can make a pod fit or cause an ingestion."""
    noted = _noted(node)
    keys = (annotations.REGISTER, annotations.CORDON, annotations.MUTEX_LOCK)
    return (
        *(noted.get(key) for key in keys),
        REQUESTING in noted.get(annotations.HANDSHAKE, ""),
        ((node.get("status") or {}).get("allocatable") or {}).get(COUNT),
        is_closed(node),
    )
