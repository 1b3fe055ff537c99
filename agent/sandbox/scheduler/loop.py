"""The scheduler as a standing activity: watch, ingest, filter, lock, bind, and try again."""

import asyncio
import random
from collections.abc import Callable
from typing import Final

import structlog

from agent.core import annotations
from agent.core.ports import Clock
from agent.sandbox.api_errors import GoneError, Json, NotFoundError, StatusError
from agent.sandbox.history import Change
from agent.sandbox.patching import merge_patch
from agent.sandbox.scheduler.bind import Binder, BindError, placement_patch
from agent.sandbox.scheduler.events import EventRecorder
from agent.sandbox.scheduler.filter import WARNING, Filtered, Notice, filter_pod
from agent.sandbox.scheduler.model import NodeState, SchedulerSettings
from agent.sandbox.scheduler.pending import Backoff, PendingPods
from agent.sandbox.scheduler.registry import REQUESTING, Registry
from agent.sandbox.scheduler.requests import COUNT, all_containers, init_count, lookup
from agent.sandbox.scheduler.usage import TERMINAL, Reservation, Usage, is_past_init
from agent.sandbox.store import ObjectStore

log = structlog.get_logger(__name__)
REGISTER_INTERVAL: Final = 15.0


class SchedulerModel:
    """kube-scheduler with HAMi as its extender, over the store, in this process.

    `eager`: a changed Node is ingested, and a freed lock used, at once. HAMi ingests every 15 s
    and kube-scheduler waits out its backoff; that is `eager=False`.
    """

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        rng: random.Random,
        *,
        settings: SchedulerSettings | None = None,
        eager: bool = False,
        backoff: Backoff | None = None,
    ) -> None:
        self.settings = settings or SchedulerSettings()
        self._store = store
        self._clock = clock
        self._rng = rng
        self._eager = eager
        self._registry = Registry()
        self._usage = Usage()
        self._events = EventRecorder(store, clock, self.settings.scheduler_name)
        self._binder = Binder(store, clock, self.settings, self._usage)
        self._pending = PendingPods(self.settings.scheduler_name, backoff or Backoff())
        self._signatures: dict[str, object] = {}
        self._pod_signatures: dict[str, object] = {}
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Schedule for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow("nodes", self._see_node))
            group.create_task(self._follow("pods", self._see_pod))
            group.create_task(self._ingest_in_intervals())
            group.create_task(self._schedule())

    async def _follow(self, resource: str, see: Callable[[Change], None]) -> None:
        while True:
            present = {item["metadata"]["uid"] for item in self._store.select(resource)}
            if resource == "pods":
                self._usage.retain(present)
            try:
                async for change in self._store.subscribe(resource, None):
                    see(change)
            except GoneError as gone:
                log.warning("scheduler.watch_expired", resource=resource, reason=str(gone))

    async def _ingest_in_intervals(self) -> None:
        while True:
            await asyncio.sleep(REGISTER_INTERVAL)
            before = self._registry.changes
            for node in self._store.select("nodes"):
                self._ingest(node)
            if self._registry.changes != before:
                self._stir()

    async def _schedule(self) -> None:
        while True:
            try:
                async with asyncio.timeout_at(self._pending.next_due()):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            for uid, namespace, name in self._pending.due(asyncio.get_running_loop().time()):
                self._attempt(uid, namespace, name)

    def _see_node(self, change: Change) -> None:
        name = change.object["metadata"]["name"]
        if change.type == "DELETED":
            self._registry.forget(name)
            self._signatures.pop(name, None)
            return
        if self._signatures.get(name) == _node_signature(change.object):
            return
        self._signatures[name] = _node_signature(change.object)
        if change.type == "ADDED" or self._eager:
            self._ingest(change.object)
        self._stir()

    def _see_pod(self, change: Change) -> None:
        pod, uid = change.object, change.object["metadata"]["uid"]
        before = self._pod_signatures.get(uid)
        if change.type == "DELETED":
            self._pod_signatures.pop(uid, None)
            self._usage.forget(uid)
            self._pending.forget(uid)
            self._stir()
            return
        self._usage.observe(pod)
        self._pod_signatures[uid] = _pod_signature(pod)
        if self._pending.observe(pod):
            self._wake.set()
        elif before is not None and before != self._pod_signatures[uid]:
            self._stir()

    def _stir(self) -> None:
        self._pending.stir(delayed=self._eager and self._has_unlocked_node())
        self._wake.set()

    def _has_unlocked_node(self) -> bool:
        nodes = self._store.select("nodes")
        return any(annotations.MUTEX_LOCK not in _noted(node) for node in nodes)

    def _ingest(self, node: Json) -> None:
        name = node["metadata"]["name"]
        writes = self._registry.ingest(node, self._clock.now())
        if not writes:
            return
        patch = {"metadata": {"annotations": writes}}
        try:
            node = self._store.update("nodes", "", name, lambda held: merge_patch(held, patch))
        except NotFoundError:
            return
        self._signatures[name] = _node_signature(node)

    def _attempt(self, uid: str, namespace: str, name: str) -> None:
        """One scheduling cycle of one pod."""
        pod = self._find_waiting(uid, namespace, name)
        if pod is None:
            self._pending.forget(uid)
            return
        filtered = self._filter(pod)
        for notice in filtered.notices:
            self._events.record(pod, notice)
        if not filtered.nodes:
            self._reject(pod, filtered)
            return
        node_name = self._rng.choice(filtered.nodes)
        try:
            self._bind(pod, node_name, filtered)
        except (BindError, StatusError) as failure:
            self._pending.delay(uid, asyncio.get_running_loop().time())
            log.info("scheduler.bind_failed", namespace=namespace, pod=name, reason=str(failure))
        else:
            self._pending.forget(uid)
            log.info("scheduler.pod_bound", namespace=namespace, pod=name, node=node_name)

    def _find_waiting(self, uid: str, namespace: str, name: str) -> Json | None:
        """The pod as it is now, unless it went or was placed since the watch told of it."""
        try:
            pod = self._store.get("pods", namespace, name)
        except NotFoundError:
            return None
        same = pod["metadata"]["uid"] == uid
        return pod if same and self._pending.is_waiting(pod) else None

    def _filter(self, pod: Json) -> Filtered:
        uid = pod["metadata"]["uid"]
        self._usage.forget(uid)
        nodes = [node for node in self._store.select("nodes") if not _is_closed(node)]
        names = [node["metadata"]["name"] for node in nodes]
        registered: dict[str, NodeState] = {}
        for name in names:
            state = self._registry.state(name, self._usage.loads(name, without=uid))
            if state is not None:
                registered[name] = state
        return filter_pod(pod, names, registered, self.settings, self._rng)

    def _bind(self, pod: Json, node_name: str, filtered: Filtered) -> None:
        metadata = pod["metadata"]
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        if not any(lookup(container, COUNT) for container in all_containers(pod)):
            self._store.bind(namespace, name, node_name, uid=uid)
            return
        if filtered.groups is not None:
            seconds = int(self._clock.now().timestamp())
            patch = placement_patch(node_name, filtered.groups, seconds)
            self._store.update("pods", namespace, name, lambda held: merge_patch(held, patch))
            inits = init_count(pod)
            self._usage.reserve(uid, Reservation(node_name, filtered.groups, inits))
        self._binder.bind(namespace, name, uid, node_name)

    def _reject(self, pod: Json, filtered: Filtered) -> None:
        """Say on the pod why it stays pending, as kube-scheduler does."""
        metadata = pod["metadata"]
        text = _explain(filtered)
        self._events.record(pod, Notice(WARNING, "FailedScheduling", text))
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": text,
        }

        def tell(held: Json) -> Json:
            conditions = held["status"].get("conditions") or []
            others = [entry for entry in conditions if entry["type"] != "PodScheduled"]
            held["status"]["conditions"] = [*others, condition]
            return held

        self._store.update("pods", metadata["namespace"], metadata["name"], tell)
        self._pending.park(metadata["uid"])
        name = metadata["name"]
        log.info("scheduler.pod_unschedulable", namespace=metadata["namespace"], pod=name, why=text)


def _explain(filtered: Filtered) -> str:
    if filtered.error:
        return filtered.error
    if not filtered.failed:
        return "no nodes available to schedule pods"
    total, reasons = len(filtered.failed), list(filtered.failed.values())
    told = sorted(f"{reasons.count(reason)} {reason}" for reason in set(reasons))
    return f"0/{total} nodes are available: {', '.join(told)}."


def _noted(node: Json) -> Json:
    noted: Json = node["metadata"].get("annotations") or {}
    return noted


def _is_closed(node: Json) -> bool:
    return bool((node.get("spec") or {}).get("unschedulable"))


def _node_signature(node: Json) -> object:
    """What of a Node can make a pod fit, or the scheduler look again."""
    noted = _noted(node)
    keys = (annotations.REGISTER, annotations.CORDON, annotations.MUTEX_LOCK)
    return (
        *(noted.get(key) for key in keys),
        REQUESTING in noted.get(annotations.HANDSHAKE, ""),
        ((node.get("status") or {}).get("allocatable") or {}).get(COUNT),
        _is_closed(node),
    )


def _pod_signature(pod: Json) -> object:
    """What of a pod can free room for another."""
    return (pod["status"].get("phase") in TERMINAL, is_past_init(pod, init_count(pod)))
