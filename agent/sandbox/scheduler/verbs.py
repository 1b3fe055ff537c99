"""HAMi's part of scheduling: what it knows of nodes and pods, and its verbs filter and bind.

Source: HAMi v2.10 pkg/scheduler/scheduler.go.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Final

import structlog

from agent.codec.register import decode_register
from agent.core import annotations
from agent.core.errors import MalformedText
from agent.core.ports import Clock
from agent.sandbox.api_errors import Json, StatusError
from agent.sandbox.scheduler.bind import Binder, placement_patch
from agent.sandbox.scheduler.cluster import Cluster
from agent.sandbox.scheduler.events import EventRecorder, Events
from agent.sandbox.scheduler.filter import Filtered, filter_pod
from agent.sandbox.scheduler.model import GpuState, NodeState, SchedulerSettings
from agent.sandbox.scheduler.refresh import REQUESTING
from agent.sandbox.scheduler.registry import Registry
from agent.sandbox.scheduler.requests import COUNT, init_count
from agent.sandbox.scheduler.usage import Reservation, Usage

log = structlog.get_logger(__name__)
REGISTER_INTERVAL: Final = 15.0


class HamiVerbs:
    """The memory of one HAMi scheduler, and what it does to the cluster.

    `eager`: a changed Node is ingested at once; HAMi waits for the next of its 15 s intervals.
    Each decision is made between two waits, so verbs of several pods may run at the same time.
    `events`: who takes the Events; by default each is written before its verb returns.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        rng: random.Random,
        settings: SchedulerSettings,
        *,
        eager: bool,
        events: Events | None = None,
    ) -> None:
        self.settings = settings
        self.usage = Usage()
        self.events = events or EventRecorder(cluster, clock, settings.scheduler_name)
        self._cluster = cluster
        self._clock = clock
        self._rng = rng
        self._eager = eager
        self._registry = Registry()
        self._binder = Binder(cluster, clock, settings, self.usage, rng, self.events)
        self._signatures: dict[str, object] = {}

    async def see_node(self, kind: str, node: Json) -> bool:
        """Take in a Node that is ADDED, MODIFIED or DELETED; whether it can matter to a pod."""
        name = node["metadata"]["name"]
        if kind == "DELETED":
            self._registry.forget(name)
            self._signatures.pop(name, None)
            return False
        if self._signatures.get(name) == _signature(node):
            return False
        self._signatures[name] = _signature(node)
        if kind == "ADDED" or self._eager:
            await self._ingest(node)
        return True

    def see_pod(self, kind: str, pod: Json) -> None:
        """Take in a pod that is ADDED, MODIFIED or DELETED."""
        if kind == "DELETED":
            self.usage.forget(pod["metadata"]["uid"])
        else:
            self.usage.observe(pod)

    async def ingest(self, nodes: Sequence[Json]) -> bool:
        """Look at all nodes as HAMi does in intervals; whether what they offer became another."""
        before = self._registry.changes
        for node in nodes:
            await self._ingest(node)
        return self._registry.changes != before

    async def filter(self, pod: Json, candidates: Sequence[str]) -> Filtered:
        """Choose a node for the pod, reserve what it gets there and write that on the pod.

        Raises:
            StatusError: the pod could not be written; nothing is reserved. Nor is it when the
                caller gives up: what was written all the same comes back by the watch.
        """
        metadata = pod["metadata"]
        filtered = self._decide(pod, candidates)
        if filtered.groups is not None:
            seconds = int(self._clock.now().timestamp())
            changes = placement_patch(filtered.nodes[0], filtered.groups, seconds)
            namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
            try:
                await self._cluster.patch("pods", namespace, name, changes, uid=uid)
            except (StatusError, asyncio.CancelledError):
                self.usage.forget(uid)
                raise
        for notice in filtered.notices:
            await self.events.record(pod, notice)
        return filtered

    def simulate(self, pod: Json, nodes: Sequence[Json]) -> Filtered:
        """Choose among nodes as they are given, used by nobody; nothing is kept or written."""
        registered: dict[str, NodeState] = {}
        for node in nodes:
            try:
                gpus = decode_register(_noted(node).get(annotations.REGISTER, ""))
            except MalformedText:
                continue
            name = node["metadata"]["name"]
            registered[name] = NodeState(name, tuple(GpuState(gpu) for gpu in gpus))
        names = [node["metadata"]["name"] for node in nodes]
        return filter_pod(pod, names, registered, self.settings, self._rng)

    async def bind(
        self, namespace: str, name: str, uid: str, node_name: str, *, until: float | None = None
    ) -> None:
        """Lock the node for the pod and bind it there; see `Binder.bind`. Raises BindError."""
        await self._binder.bind(namespace, name, uid, node_name, until=until)

    def _decide(self, pod: Json, candidates: Sequence[str]) -> Filtered:
        """Choose and reserve without a wait: the next decision counts this one."""
        uid = pod["metadata"]["uid"]
        self.usage.forget(uid)
        registered: dict[str, NodeState] = {}
        for name in candidates:
            state = self._registry.state(name, self.usage.loads(name))
            if state is not None:
                registered[name] = state
        filtered = filter_pod(pod, candidates, registered, self.settings, self._rng)
        if filtered.groups is not None:
            reservation = Reservation(filtered.nodes[0], filtered.groups, init_count(pod))
            self.usage.reserve(uid, reservation)
        return filtered

    async def _ingest(self, node: Json) -> None:
        name = node["metadata"]["name"]
        writes = self._registry.ingest(node, self._clock.now())
        if not writes:
            return
        try:
            node = await self._cluster.patch(
                "nodes", "", name, {"metadata": {"annotations": writes}}
            )
        except StatusError as refusal:  # written again at the next look
            log.info("scheduler.handshake_lost", node=name, err=str(refusal))
        else:
            self._signatures[name] = _signature(node)


def is_locked(node: Json) -> bool:
    """Whether some pod holds the node's lock."""
    return annotations.MUTEX_LOCK in _noted(node)


def is_closed(node: Json) -> bool:
    """Whether the Node was closed to new pods."""
    return bool((node.get("spec") or {}).get("unschedulable"))


def _noted(node: Json) -> Json:
    noted: Json = node["metadata"].get("annotations") or {}
    return noted


def _signature(node: Json) -> object:
    """What of a Node can make a pod fit, or the scheduler look again."""
    noted = _noted(node)
    keys = (annotations.REGISTER, annotations.CORDON, annotations.MUTEX_LOCK)
    return (
        *(noted.get(key) for key in keys),
        REQUESTING in noted.get(annotations.HANDSHAKE, ""),
        ((node.get("status") or {}).get("allocatable") or {}).get(COUNT),
        is_closed(node),
    )
