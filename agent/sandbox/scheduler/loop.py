"""The scheduling loop: watch, filter, bind, and retry.

Source: kube-scheduler 1.36 (pkg/scheduler/schedule_one.go, backend/queue), as it calls an extender.
"""

import asyncio
import contextlib
import random
from typing import Final

from agent.ports import Clock
from agent.sandbox.scheduler import verbs
from agent.sandbox.scheduler.filter import WARNING, Filtered, Notice
from agent.sandbox.scheduler.model import COUNT, SchedulerSettings, all_containers, lookup
from agent.sandbox.scheduler.registry import TERMINAL
from agent.sandbox.scheduler.verbs import BindError, HamiVerbs
from agent.sandbox.store import Json, ObjectStore, StatusError

LONGEST_WAIT: Final = 300.0
"""Seconds after which a pod that fits nowhere is tried again although nothing has changed."""


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
        cluster: verbs.StoreCluster | None = None,
    ) -> None:
        self.settings = settings or SchedulerSettings()
        self._store = store
        self._clock = clock
        self._rng = rng
        self._hami = HamiVerbs(cluster or verbs.StoreCluster(store), clock, rng, self.settings)
        self._filtering = asyncio.Lock()
        self._pending: dict[str, Json] = {}
        """By UID, the pods without a node, as last seen; each has a task of its own."""
        self._refused: set[str] = set()
        """Those of them that fit nowhere since the last change."""
        self._changed = asyncio.Event()
        """Set, and replaced, by the next change that may make a pod fit."""

    @property
    def is_idle(self) -> bool:
        """Whether no pod is being placed or waits for its next try: what is left fits nowhere."""
        return self._pending.keys() <= self._refused

    async def run(self) -> None:
        """Schedule for ever."""
        async with asyncio.TaskGroup() as group:
            for resource in ("nodes", "pods", "resourcequotas"):
                group.create_task(self._follow(resource, group))
            group.create_task(self._hami.run())
            group.create_task(self._read_in_intervals())

    async def _follow(self, resource: str, group: asyncio.TaskGroup) -> None:
        async for kind, obj, _ in self._store.subscribe(resource, None):
            if resource == "nodes":
                makes_room = await self._hami.see_node(kind, obj)
            elif resource == "pods":
                makes_room, uid = self._hami.see_pod(kind, obj), obj["metadata"]["uid"]
                is_over = obj["status"].get("phase") in TERMINAL or kind == "DELETED"
                is_over |= "deletionTimestamp" in obj["metadata"]
                is_ours = obj["spec"].get("schedulerName") == self.settings.scheduler_name
                if is_over or not is_ours or obj["spec"].get("nodeName"):
                    self._pending.pop(uid, None)
                else:
                    if uid not in self._pending:
                        group.create_task(self._place(uid))
                    self._pending[uid] = obj
            else:
                self._hami.quotas.see(kind, obj)
                makes_room = True
            if makes_room:  # pods that fit nowhere are tried again
                self._refused.clear()
                self._changed.set()
                self._changed = asyncio.Event()

    async def _read_in_intervals(self) -> None:
        while True:
            await asyncio.sleep(verbs.REGISTER_INTERVAL)
            await self._hami.read_nodes()

    async def _place(self, uid: str) -> None:
        """Try a pod until it has a node or is gone.

        After a failure again in 1 s, 2 s, … 10 s; if it fits nowhere, after the next change, or
        after LONGEST_WAIT.
        """
        failures = 0
        while pod := self._pending.get(uid):
            changed = self._changed  # also by what comes during the decision
            try:
                async with self._filtering:
                    nodes = self._store.select("nodes")
                    names = [one["metadata"]["name"] for one in nodes if not verbs.is_closed(one)]
                    filtered = await self._hami.filter(pod, names)
                if filtered.nodes:
                    await self._bind(pod, self._rng.choice(filtered.nodes))
                    return
            except (BindError, StatusError) as failure:
                self._reject(pod, "SchedulerError", str(failure))
                await asyncio.sleep(min(2.0**failures, 10.0))
                failures += 1
            else:
                self._reject(pod, "Unschedulable", _explain(filtered))
                self._refused.add(uid)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LONGEST_WAIT):
                        await changed.wait()

    async def _bind(self, pod: Json, node_name: str) -> None:
        """Bind the pod: through HAMi if it requests GPUs, else as kube-scheduler."""
        metadata = pod["metadata"]
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        if any(lookup(container, COUNT) for container in all_containers(pod)):
            await self._hami.bind(namespace, name, uid, node_name)
        else:
            self._store.bind(namespace, name, node_name, uid=uid)

    def _reject(self, pod: Json, reason: str, text: str) -> None:
        """Write on the pod why it stays pending, as kube-scheduler does."""
        metadata = pod["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": text}

        def tell(held: Json) -> Json:
            conditions = held["status"].get("conditions") or []
            others = [entry for entry in conditions if entry["type"] != "PodScheduled"]
            held["status"]["conditions"] = [*others, condition]
            return held

        notice = Notice(WARNING, "FailedScheduling", text)
        event = verbs.event_about(pod, notice, self.settings.scheduler_name, self._clock.now())
        with contextlib.suppress(StatusError):  # the pod went
            self._store.create("events", event)
            self._store.update("pods", namespace, name, tell, uid=metadata["uid"])


def _explain(filtered: Filtered) -> str:
    total, reasons = len(filtered.failed), list(filtered.failed.values())
    told = sorted(f"{reasons.count(reason)} {reason}" for reason in set(reasons))
    return f"0/{total} nodes are available: {', '.join(told)}."
