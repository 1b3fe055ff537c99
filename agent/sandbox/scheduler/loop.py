"""The scheduling loop: watch, ingest, filter, lock, bind, and retry.

Source: kube-scheduler 1.36 (pkg/scheduler/schedule_one.go, backend/queue), as it calls an extender.
"""

import asyncio
import math
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from agent.ports import Clock
from agent.sandbox.scheduler import verbs
from agent.sandbox.scheduler.filter import WARNING, Filtered, Notice
from agent.sandbox.scheduler.model import COUNT, SchedulerSettings, all_containers, lookup
from agent.sandbox.scheduler.registry import TERMINAL, has_passed_init
from agent.sandbox.scheduler.verbs import BindError, HamiVerbs
from agent.sandbox.store import GoneError, Json, ObjectStore, StatusError

log = structlog.get_logger(__name__)
HTTP_TIMEOUT: Final = 30.0
"""Seconds that kube-scheduler waits for its extender, by HAMi's chart. HAMi itself continues."""
_LONGEST_BACKOFF: Final = 10.0
_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class _PendingPod:
    """A pod without a node; `due` is of the loop's clock, and infinite until something changes."""

    name: str
    due: float = 0.0
    failures: int = 0
    is_taken: bool = False
    """It is being placed, so it is not due."""


class SchedulerModel:
    """kube-scheduler with HAMi as its extender, over the store, in this process.

    As in kube-scheduler, pods are filtered one after another and bound in parallel.
    `eager`: ingest a changed Node at once, which HAMi does only every 15 s. `cluster`: what takes
    HAMi's requests in place of the store.
    """

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        rng: random.Random,
        *,
        settings: SchedulerSettings | None = None,
        eager: bool = False,
        cluster: verbs.SchedulerCluster | None = None,
    ) -> None:
        self.settings = settings or SchedulerSettings()
        self._store = store
        self._rng = rng
        plain = verbs.StoreCluster(store)
        self._hami = HamiVerbs(cluster or plain, clock, rng, self.settings, eager=eager)
        self._events = verbs.EventRecorder(plain, clock, self.settings.scheduler_name)
        """kube-scheduler's own Events. Its client has another queue, which is not modelled."""
        self._pending: dict[str, _PendingPod] = {}
        """By UID, in order of arrival."""
        self._pod_signatures: dict[str, object] = {}
        self._wake = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        """Whether no pod is being placed or waits for its next try: what is left fits nowhere."""
        return all(one.due == math.inf and not one.is_taken for one in self._pending.values())

    async def run(self) -> None:
        """Schedule for ever."""
        async with asyncio.TaskGroup() as group:
            for resource in ("nodes", "pods", "resourcequotas"):
                group.create_task(self._follow(resource))
            group.create_task(self._hami.run())
            group.create_task(self._ingest_in_intervals())
            group.create_task(self._schedule(group))

    async def _follow(self, resource: str) -> None:
        held: dict[str, Json] = {}
        while True:
            for _ in ("list", "watch"):
                await self._hami.turn()
            present = {item["metadata"]["uid"] for item in self._store.select(resource)}
            for uid in held.keys() - present:  # deleted while no watch was open
                await self._see(resource, "DELETED", held.pop(uid))
            try:
                async for change in self._store.subscribe(resource, None):
                    kind, obj, _ = change
                    held[obj["metadata"]["uid"]] = obj
                    if kind == "DELETED":
                        del held[obj["metadata"]["uid"]]
                    await self._see(resource, kind, obj)
            except GoneError as gone:
                log.warning("scheduler.watch_expired", resource=resource, reason=str(gone))

    async def _see(self, resource: str, kind: str, obj: Json) -> None:
        match resource:
            case "pods":
                self._see_pod(kind, obj)
            case "nodes":
                if await self._hami.see_node(kind, obj):
                    self._stir()
            case _:
                self._hami.quotas.see(kind, obj)
                self._stir()

    async def _ingest_in_intervals(self) -> None:
        while True:
            await asyncio.sleep(verbs.REGISTER_INTERVAL)
            if await self._hami.ingest(self._store.select("nodes")):
                self._stir()

    def _see_pod(self, kind: str, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        before = self._pod_signatures.pop(uid, None)
        self._hami.see_pod(kind, pod)
        if kind == "DELETED" or not self._has_to_place(pod):
            self._pending.pop(uid, None)
        elif uid not in self._pending:
            self._pending[uid] = _PendingPod(pod["metadata"]["name"])
            self._wake.set()
        if kind == "DELETED":
            self._stir()
            return
        # What can free room for another pod when it changes.
        signature = (pod["status"].get("phase") in TERMINAL, has_passed_init(pod))
        self._pod_signatures[uid] = signature
        if before not in (None, signature):
            self._stir()

    def _has_to_place(self, pod: Json) -> bool:
        """Whether this scheduler has to place the pod."""
        is_ours = pod["spec"].get("schedulerName") == self.settings.scheduler_name
        is_over = pod["status"].get("phase") in TERMINAL or "deletionTimestamp" in pod["metadata"]
        return is_ours and not is_over and not pod["spec"].get("nodeName")

    def _stir(self) -> None:
        """Make pods that fit nowhere, and those being placed, due after a change.

        Pods that wait after a failure still wait.
        """
        for waiting in self._pending.values():
            if waiting.due == math.inf:
                waiting.due = 0.0
        self._wake.set()

    async def _schedule(self, group: asyncio.TaskGroup) -> None:
        while True:
            free = [one.due for one in self._pending.values() if not one.is_taken]
            next_due = min((due for due in free if due < math.inf), default=None)
            try:
                async with asyncio.timeout_at(next_due):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            now = asyncio.get_running_loop().time()
            for uid, waiting in list(self._pending.items()):
                if not waiting.is_taken and waiting.due <= now:
                    await self._attempt(group, uid, waiting)

    async def _attempt(self, group: asyncio.TaskGroup, uid: str, waiting: _PendingPod) -> None:
        """Run one scheduling cycle of one pod. Its binding cycle is a task of its own."""
        found = self._store.select("pods", fields={"metadata.name": waiting.name})
        pod = next((one for one in found if one["metadata"]["uid"] == uid), None)
        if pod is None or not self._has_to_place(pod):  # it went since the watch event
            self._pending.pop(uid, None)
            return
        waiting.is_taken, waiting.due = True, math.inf
        try:
            nodes = self._store.select("nodes")
            names = [node["metadata"]["name"] for node in nodes if not verbs.is_closed(node)]
            filtered = await _ask(group, self._hami.filter(pod, names))
        except (StatusError, TimeoutError) as failure:
            await self._fail(pod, str(failure))
            return
        if not filtered.nodes:
            await self._reject(pod, "Unschedulable", _explain(filtered))
            # It waits for a change, unless one came meanwhile.
            waiting.is_taken = False
        else:
            group.create_task(self._bind(group, pod, self._rng.choice(filtered.nodes)))

    async def _bind(self, group: asyncio.TaskGroup, pod: Json, node_name: str) -> None:
        """Bind the pod: through HAMi if it requests GPUs, else as kube-scheduler."""
        metadata = pod["metadata"]
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        try:
            if any(lookup(container, COUNT) for container in all_containers(pod)):
                await _ask(group, self._hami.bind(namespace, name, uid, node_name))
            else:
                self._store.bind(namespace, name, node_name, uid=uid)
        except (BindError, StatusError, TimeoutError) as failure:
            await self._fail(pod, str(failure))
            self._stir()  # the resources that kube-scheduler assumed for the pod are free again
        else:
            self._pending.pop(uid, None)
            log.info("scheduler.pod_bound", namespace=namespace, pod=name, node=node_name)

    async def _fail(self, pod: Json, text: str) -> None:
        """Write an Event that placing the pod failed, and retry: after 1 s, 2 s, … 10 s.

        kube-scheduler checks once a second which pods are due.
        """
        if waiting := self._pending.get(pod["metadata"]["uid"]):
            delay = min(2.0**waiting.failures, _LONGEST_BACKOFF)
            waiting.due = math.ceil(asyncio.get_running_loop().time() + delay)
            waiting.is_taken = False
            waiting.failures += 1
        self._wake.set()
        await self._reject(pod, "SchedulerError", text)

    async def _reject(self, pod: Json, reason: str, text: str) -> None:
        """Write on the pod why it stays pending, as kube-scheduler does."""
        metadata = pod["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        log.info("scheduler.pod_not_placed", namespace=namespace, pod=name, reason=reason, why=text)
        await self._events.record(pod, Notice(WARNING, "FailedScheduling", text))
        condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": text}

        def tell(held: Json) -> Json:
            conditions = held["status"].get("conditions") or []
            others = [entry for entry in conditions if entry["type"] != "PodScheduled"]
            if condition not in conditions:
                held["status"]["conditions"] = [*others, condition]
            return held

        try:
            self._store.update("pods", namespace, name, tell, uid=metadata["uid"])
        except StatusError as gone:
            log.info("scheduler.pod_went", namespace=namespace, pod=name, err=str(gone))


async def _ask(group: asyncio.TaskGroup, verb: Coroutine[None, None, _Answer]) -> _Answer:
    """HAMi's answer. Raises what the verb raises, and TimeoutError after HTTP_TIMEOUT."""

    async def outcome() -> _Answer | BindError | StatusError:
        try:
            return await verb
        except (BindError, StatusError) as failure:
            return failure

    task = group.create_task(outcome())
    await asyncio.wait([task], timeout=HTTP_TIMEOUT)
    if not task.done():
        told = f"the extender did not answer within {HTTP_TIMEOUT:g} s"
        raise TimeoutError(f"context deadline exceeded ({told})")
    if isinstance(answer := task.result(), BindError | StatusError):
        raise answer
    return answer


def _explain(filtered: Filtered) -> str:
    if not filtered.failed:
        return "no nodes available to schedule pods"
    total, reasons = len(filtered.failed), list(filtered.failed.values())
    told = sorted(f"{reasons.count(reason)} {reason}" for reason in set(reasons))
    return f"0/{total} nodes are available: {', '.join(told)}."
