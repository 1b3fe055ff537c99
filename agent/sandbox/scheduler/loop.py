"""The scheduler as a standing activity: watch, ingest, filter, lock, bind, and try again."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import structlog

from agent.core.ports import Clock
from agent.sandbox.api_errors import GoneError, Json, NotFoundError, StatusError
from agent.sandbox.history import Change
from agent.sandbox.scheduler.bind import BindError
from agent.sandbox.scheduler.cluster import StoreCluster
from agent.sandbox.scheduler.filter import WARNING, Filtered, Notice
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.pending import Backoff, PendingPods
from agent.sandbox.scheduler.requests import COUNT, all_containers, init_count, lookup
from agent.sandbox.scheduler.usage import TERMINAL, is_past_init
from agent.sandbox.scheduler.verbs import REGISTER_INTERVAL, HamiVerbs, is_closed, is_locked
from agent.sandbox.store import ObjectStore

log = structlog.get_logger(__name__)


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
        self._rng = rng
        self._eager = eager
        self._hami = HamiVerbs(StoreCluster(store), clock, rng, self.settings, eager=eager)
        self._pending = PendingPods(self.settings.scheduler_name, backoff or Backoff())
        self._pod_signatures: dict[str, object] = {}
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Schedule for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow("nodes", self._see_node))
            group.create_task(self._follow("pods", self._see_pod))
            group.create_task(self._ingest_in_intervals())
            group.create_task(self._schedule())

    async def _follow(self, resource: str, see: Callable[[Change], Awaitable[None]]) -> None:
        while True:
            present = {item["metadata"]["uid"] for item in self._store.select(resource)}
            if resource == "pods":
                self._hami.usage.retain(present)
            try:
                async for change in self._store.subscribe(resource, None):
                    await see(change)
            except GoneError as gone:
                log.warning("scheduler.watch_expired", resource=resource, reason=str(gone))

    async def _ingest_in_intervals(self) -> None:
        while True:
            await asyncio.sleep(REGISTER_INTERVAL)
            if await self._hami.ingest(self._store.select("nodes")):
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
                await self._attempt(uid, namespace, name)

    async def _see_node(self, change: Change) -> None:
        if await self._hami.see_node(change.type, change.object):
            self._stir()

    async def _see_pod(self, change: Change) -> None:
        pod, uid = change.object, change.object["metadata"]["uid"]
        before = self._pod_signatures.get(uid)
        self._hami.see_pod(change.type, pod)
        if change.type == "DELETED":
            self._pod_signatures.pop(uid, None)
            self._pending.forget(uid)
            self._stir()
            return
        self._pod_signatures[uid] = _pod_signature(pod)
        if self._pending.observe(pod):
            self._wake.set()
        elif before is not None and before != self._pod_signatures[uid]:
            self._stir()

    def _stir(self) -> None:
        self._pending.stir(delayed=self._eager and self._has_unlocked_node())
        self._wake.set()

    def _has_unlocked_node(self) -> bool:
        return not all(is_locked(node) for node in self._store.select("nodes"))

    async def _attempt(self, uid: str, namespace: str, name: str) -> None:
        """One scheduling cycle of one pod."""
        pod = self._find_waiting(uid, namespace, name)
        if pod is None:
            self._pending.forget(uid)
            return
        try:
            filtered = await self._hami.filter(pod, self._open_nodes())
            if not filtered.nodes:
                await self._reject(pod, filtered)
                return
            node_name = self._rng.choice(filtered.nodes)
            await self._bind(pod, node_name)
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

    def _open_nodes(self) -> list[str]:
        nodes = self._store.select("nodes")
        return [node["metadata"]["name"] for node in nodes if not is_closed(node)]

    async def _bind(self, pod: Json, node_name: str) -> None:
        """Bind the pod: by HAMi where it asks for GPUs, else as kube-scheduler does."""
        metadata = pod["metadata"]
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        if any(lookup(container, COUNT) for container in all_containers(pod)):
            await self._hami.bind(namespace, name, uid, node_name)
        else:
            self._store.bind(namespace, name, node_name, uid=uid)

    async def _reject(self, pod: Json, filtered: Filtered) -> None:
        """Say on the pod why it stays pending, as kube-scheduler does."""
        metadata = pod["metadata"]
        text = _explain(filtered)
        await self._hami.events.record(pod, Notice(WARNING, "FailedScheduling", text))
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


def _pod_signature(pod: Json) -> object:
    """What of a pod can free room for another."""
    return (pod["status"].get("phase") in TERMINAL, is_past_init(pod, init_count(pod)))
