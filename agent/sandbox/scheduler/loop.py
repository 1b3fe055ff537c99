"""The scheduling loop: watch, filter, bind, and retry.

Source: kube-scheduler 1.36 (pkg/scheduler/schedule_one.go, backend/queue), as it calls an extender.
"""

import asyncio
import contextlib
import math
import random
from dataclasses import dataclass

import structlog

from agent.ports import Clock
from agent.sandbox.scheduler import verbs
from agent.sandbox.scheduler.filter import WARNING, Filtered, Notice
from agent.sandbox.scheduler.model import COUNT, SchedulerSettings, all_containers, lookup
from agent.sandbox.scheduler.registry import TERMINAL
from agent.sandbox.scheduler.verbs import BindError, HamiVerbs
from agent.sandbox.store import Json, ObjectStore, StatusError

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _PendingPod:
    """A pod without a node; `due` is of the loop's clock, and infinite until something changes."""

    pod: Json
    due: float = 0.0
    failures: int = 0
    is_binding: bool = False


class SchedulerModel:
    """kube-scheduler with HAMi as its extender, over the store, in this process.

    As in kube-scheduler, pods are filtered one after another and bound in parallel. Unlike it, the
    model waits for HAMi's answer as long as it takes. `cluster`: what takes HAMi's requests in
    place of the store.
    """

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        rng: random.Random,
        *,
        settings: SchedulerSettings | None = None,
        cluster: verbs.SchedulerCluster | None = None,
    ) -> None:
        self.settings = settings or SchedulerSettings()
        self._store = store
        self._clock = clock
        self._rng = rng
        self._hami = HamiVerbs(cluster or verbs.StoreCluster(store), clock, rng, self.settings)
        self._pending: dict[str, _PendingPod] = {}
        """By UID, in order of arrival."""
        self._wake = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        """Whether no pod is being placed or waits for its next try: what is left fits nowhere."""
        return all(one.due == math.inf and not one.is_binding for one in self._pending.values())

    async def run(self) -> None:
        """Schedule for ever."""
        async with asyncio.TaskGroup() as group:
            for resource in ("nodes", "pods", "resourcequotas"):
                group.create_task(self._follow(resource))
            group.create_task(self._hami.run())
            group.create_task(self._ingest_in_intervals())
            group.create_task(self._schedule(group))

    async def _follow(self, resource: str) -> None:
        async for kind, obj, _ in self._store.subscribe(resource, None):
            if resource == "pods":
                makes_room = self._see_pod(kind, obj)
            elif resource == "nodes":
                makes_room = await self._hami.see_node(kind, obj)
            else:
                self._hami.quotas.see(kind, obj)
                makes_room = True
            if makes_room:
                self._stir()

    async def _ingest_in_intervals(self) -> None:
        while True:
            await asyncio.sleep(verbs.REGISTER_INTERVAL)
            await self._hami.ingest(self._store.select("nodes"))

    def _see_pod(self, kind: str, pod: Json) -> bool:
        """Take in an event of a pod. Returns whether it makes room for others."""
        uid = pod["metadata"]["uid"]
        is_ours = pod["spec"].get("schedulerName") == self.settings.scheduler_name
        is_over = pod["status"].get("phase") in TERMINAL or "deletionTimestamp" in pod["metadata"]
        if kind == "DELETED" or not is_ours or is_over or pod["spec"].get("nodeName"):
            self._pending.pop(uid, None)
        elif uid in self._pending:
            self._pending[uid].pod = pod
        else:
            self._pending[uid] = _PendingPod(pod)
            self._wake.set()
        return self._hami.see_pod(kind, pod)

    def _stir(self) -> None:
        """Make pods that fit nowhere due after a change. Pods that wait after a failure still wait.

        Those that are being placed become due, too: the decision may be older than the change.
        """
        for waiting in self._pending.values():
            if waiting.due == math.inf:
                waiting.due = 0.0
        self._wake.set()

    async def _schedule(self, group: asyncio.TaskGroup) -> None:
        while True:
            self._wake.clear()
            now = asyncio.get_running_loop().time()
            for uid in list(self._pending):
                waiting = self._pending.get(uid)
                if waiting and not waiting.is_binding and waiting.due <= now:
                    await self._attempt(group, waiting)
            free = [one.due for one in self._pending.values() if not one.is_binding]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(filter(math.isfinite, free), default=None)):
                    await self._wake.wait()

    async def _attempt(self, group: asyncio.TaskGroup, waiting: _PendingPod) -> None:
        """Run one scheduling cycle of one pod. Its binding cycle is a task of its own."""
        waiting.due = math.inf
        nodes = self._store.select("nodes")
        names = [node["metadata"]["name"] for node in nodes if not verbs.is_closed(node)]
        try:
            filtered = await self._hami.filter(waiting.pod, names)
        except StatusError as failure:
            self._fail(waiting, str(failure))
            return
        if filtered.nodes:
            waiting.is_binding = True
            group.create_task(self._bind(waiting, self._rng.choice(filtered.nodes)))
        else:
            self._reject(waiting.pod, "Unschedulable", _explain(filtered))

    async def _bind(self, waiting: _PendingPod, node_name: str) -> None:
        """Bind the pod: through HAMi if it requests GPUs, else as kube-scheduler."""
        metadata = waiting.pod["metadata"]
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        try:
            # After success the pod stays pending until the watch shows its node.
            if any(lookup(container, COUNT) for container in all_containers(waiting.pod)):
                await self._hami.bind(namespace, name, uid, node_name)
            else:
                self._store.bind(namespace, name, node_name, uid=uid)
        except (BindError, StatusError) as failure:
            waiting.is_binding = False
            self._fail(waiting, str(failure))
            self._stir()  # the resources that kube-scheduler assumed for the pod are free again
        else:
            log.info("scheduler.pod_bound", namespace=namespace, pod=name, node=node_name)

    def _fail(self, waiting: _PendingPod, text: str) -> None:
        """Write an Event that placing the pod failed, and retry: after 1 s, 2 s, … 10 s."""
        waiting.due = asyncio.get_running_loop().time() + min(2.0**waiting.failures, 10.0)
        waiting.failures += 1
        self._wake.set()
        self._reject(waiting.pod, "SchedulerError", text)

    def _reject(self, pod: Json, reason: str, text: str) -> None:
        """Write on the pod why it stays pending, as kube-scheduler does."""
        metadata = pod["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        log.info("scheduler.pod_not_placed", namespace=namespace, pod=name, reason=reason, why=text)
        condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": text}

        def tell(held: Json) -> Json:
            conditions = held["status"].get("conditions") or []
            others = [entry for entry in conditions if entry["type"] != "PodScheduled"]
            if condition not in conditions:
                held["status"]["conditions"] = [*others, condition]
            return held

        notice = Notice(WARNING, "FailedScheduling", text)
        event = verbs.event_about(pod, notice, self.settings.scheduler_name, self._clock.now())
        try:
            self._store.create("events", event)
            self._store.update("pods", namespace, name, tell, uid=metadata["uid"])
        except StatusError as gone:
            log.info("scheduler.pod_went", namespace=namespace, pod=name, err=str(gone))


def _explain(filtered: Filtered) -> str:
    if not filtered.failed:
        return "no nodes available to schedule pods"
    total, reasons = len(filtered.failed), list(filtered.failed.values())
    told = sorted(f"{reasons.count(reason)} {reason}" for reason in set(reasons))
    return f"0/{total} nodes are available: {', '.join(told)}."
