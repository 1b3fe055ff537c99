"""Connects the kubelet with the API server: hosts the pods of its node, reports them and the Node.

As with the real kubelet, a pod that is deleted while it waits for admission is still admitted. The
kubelet handles the deletion afterwards.
"""

import asyncio
import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Final

from agent.sandbox.kubelet.model import KubeletModel
from agent.sandbox.kubelet.pods import ContainerSpec, KubeletEvent, NodePod
from agent.sandbox.store import (
    AlreadyExistsError,
    ConflictError,
    GoneError,
    Json,
    NotFoundError,
    ObjectStore,
)

RUN_SECONDS: Final = "sandbox/run-seconds"
"""The annotation of a pod that ends by itself after so many seconds."""
_OWNED: Final = frozenset(
    {"reason", "message", "conditions", "containerStatuses", "initContainerStatuses"}
)
_CHANGES: Final = frozenset({"listed", "disconnected"})
_STATUS_DELAY: Final = (0.016, 0.047)
_STOP_SECONDS: Final = 1.0
_RETOLD: Final = frozenset(
    {"admitted", "rejected", "container_started", "init_ended", "container_waiting"}
)
Stamp = Callable[[float], str]
"""The text of a moment of the loop's clock."""


def running_status(pod: NodePod, stamp: Stamp) -> Json:
    """The status of an admitted pod."""
    apps = pod.spec.apps
    is_ready = all(c.name in pod.running for c in apps)
    status: Json = {
        "phase": "Running" if any(pod.starts.get(c.name) for c in apps) else "Pending",
        "conditions": _conditions(pod, is_ready=is_ready),
        "containerStatuses": [_container(pod, c, stamp) for c in apps],
    }
    if inits := [_container(pod, c, stamp) for c in pod.spec.containers if c.kind != "app"]:
        status["initContainerStatuses"] = inits
    return status


def ended_status(pod: NodePod, now: str) -> Json:
    """The status of a pod whose containers have all ended with exit code 0."""
    state = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": now}}
    ended = {"ready": False, "started": False, "state": state}
    return {
        "phase": "Succeeded",
        "conditions": _conditions(pod, is_ready=False),
        "containerStatuses": [_identity(pod, c.name) | ended for c in pod.spec.apps],
    }


def merged(old: Json, new: Json, now: str) -> Json:
    """`new` merged into `old`, of which fields of other writers stay, and the first `startTime`.

    The kubelet tells PodScheduled of each pod that it has admitted, whoever bound it; of a rejected
    pod it removes the condition.
    """
    kept = {key: value for key, value in old.items() if key not in _OWNED}
    return {"startTime": now} | kept | new


def container_id(pod: NodePod, name: str) -> str:
    """The runtime's id of the container's latest start."""
    text = f"{pod.spec.uid}/{name}/{pod.starts[name]}"
    return hashlib.sha256(text.encode()).hexdigest()


def _container(pod: NodePod, container: ContainerSpec, stamp: Stamp) -> Json:
    name = container.name
    is_up = name in pod.running
    status = _identity(pod, name) | {"ready": is_up, "started": is_up}
    if name in pod.waiting:
        waiting = {"reason": "CreateContainerConfigError", "message": pod.waiting[name]}
        return status | {"state": {"waiting": waiting}}
    if name not in pod.starts:
        return status | {"state": {"waiting": {"reason": "ContainerCreating"}}}
    began = {"startedAt": stamp(pod.began[name])}
    if is_up:
        return status | {"state": {"running": began}}
    code, reason = (0, "Completed") if container.kind == "init" else (137, "Error")
    ended = {"exitCode": code, "reason": reason, "finishedAt": stamp(pod.ended[name])}
    return status | {"state": {"terminated": ended | began}}


def _identity(pod: NodePod, name: str) -> Json:
    starts = pod.starts.get(name, 0)
    identity: Json = {"name": name, "restartCount": max(0, starts - 1)}
    return identity | ({"containerID": f"containerd://{container_id(pod, name)}"} if starts else {})


def _conditions(pod: NodePod, *, is_ready: bool) -> list[Json]:
    ready = ("ContainersReady", is_ready), ("Ready", is_ready)
    found = ("PodScheduled", True), ("Initialized", pod.is_initialised), *ready
    return [{"type": kind, "status": str(holds)} for kind, holds in found]


@dataclass(slots=True)
class _Hosted:
    """A pod that was seen bound to the node. `leaving` is set when it is deleted in any way.

    `told_at`: from when its rejection can be told. A new kubelet asks for it again.
    """

    pod: Json
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    is_gone: bool = False
    told_at: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.pod["metadata"]["namespace"], self.pod["metadata"]["name"]

    @property
    def uid(self) -> str:
        return str(self.pod["metadata"]["uid"])


@dataclass(eq=False)
class KubeletPodLoop:
    """Drives one kubelet model from one store.

    - `status_period`: seconds between two Node statuses.
    - `eager`: also write one at each change, which the real kubelet does not do.
    - `lag`: the least and most seconds that each frame of its watch is late.
    """

    _model: KubeletModel
    _store: ObjectStore
    _node_name: str
    _: KW_ONLY
    status_period: float = 10.0
    eager: bool = False
    lag: tuple[float, float] = (0.0, 0.0)
    _hosted: dict[str, _Hosted] = field(default_factory=dict)
    _dirty: dict[str, None] = field(default_factory=dict)
    _has_dirty: asyncio.Event = field(default_factory=asyncio.Event)
    _node_is_due: asyncio.Event = field(default_factory=asyncio.Event)
    _started: float = -math.inf

    async def run(self) -> None:
        """Host pods and report them, for ever.

        Raises ExceptionGroup: a pod of the store is malformed, or the model is broken.
        """
        self._model.history.listen(self._hear)
        if self._model.life is not None:
            self._begin()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._report_node())
            group.create_task(self._report_pods())
            while True:
                await self._follow(group)

    # The pods of the node.

    async def _follow(self, group: asyncio.TaskGroup) -> None:
        """Follow the pods of the node until the history no longer has our position."""
        fields = {"spec.nodeName": self._node_name}
        found = self._store.select("pods", fields=fields)
        changes = self._store.subscribe("pods", self._store.version, fields=fields)
        for uid in self._hosted.keys() - {pod["metadata"]["uid"] for pod in found}:
            self._lose(group, uid)
        for pod in sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"])):
            self._see(group, pod)
        with suppress(GoneError):
            async for change in changes:
                if any(self.lag):
                    await asyncio.sleep(self._model.random.uniform(*self.lag))
                if change.type == "DELETED":
                    self._lose(group, change.object["metadata"]["uid"])
                else:
                    self._see(group, change.object)

    def _see(self, group: asyncio.TaskGroup, pod: Json) -> None:
        metadata = pod["metadata"]
        hosted = self._hosted.get(metadata["uid"])
        if hosted is None:
            if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
                return
            if metadata.get("deletionGracePeriodSeconds") == 0:
                return  # the write before its removal; the pod is no longer known, or never was
            hosted = self._hosted[metadata["uid"]] = _Hosted(pod)
            group.create_task(self._host(hosted))
        hosted.pod = pod
        if metadata.get("deletionTimestamp"):
            self._leave(hosted)

    def _lose(self, group: asyncio.TaskGroup, uid: str) -> None:
        """Handle the removal from the store. A running kubelet still admits a pod that waits."""
        hosted = self._hosted.get(uid)
        if hosted is not None:
            hosted.is_gone = True
            self._leave(hosted)
            group.create_task(self._model.pod_gone(uid))

    def _leave(self, hosted: _Hosted) -> None:
        hosted.leaving.set()
        self._model.history.note("leaving", pod=hosted.uid)

    async def _host(self, hosted: _Hosted) -> None:
        admission = await self._model.admit(hosted.pod)
        while not admission.admitted and await self._is_asked_for_again(hosted):
            admission = await self._model.admit(hosted.pod)
        if admission.admitted and await self._runs_out(hosted):
            await self._succeed(hosted)
        await hosted.leaving.wait()
        seconds = 0.0
        if admission.admitted and not hosted.is_gone:
            grace = hosted.pod["metadata"].get("deletionGracePeriodSeconds") or 0
            seconds = min(grace, _STOP_SECONDS)
        # Without a kubelet nobody ends the containers, and nobody tells.
        await self._model.history.until(lambda: hosted.is_gone or self._model.life is not None)
        await self._model.pod_gone(hosted.uid, stop_seconds=seconds)
        self._hosted.pop(hosted.uid, None)
        # It may have been deleted with grace 0 meanwhile.
        with suppress(NotFoundError, ConflictError):
            self._store.delete("pods", *hosted.key, grace=0, uid=hosted.uid)

    async def _is_asked_for_again(self, hosted: _Hosted) -> bool:
        """Wait for the rejected pod's deletion, or (True) for a kubelet that was not told of it."""

        def is_new() -> bool:
            pod = self._pod(hosted)
            return pod is not None and pod.admission is None

        await self._model.history.until(lambda: hosted.leaving.is_set() or is_new())
        return is_new()

    async def _runs_out(self, hosted: _Hosted) -> bool:
        """Wait for the pod's deletion, or (True) for the end of its work, if it has one."""
        seconds = (hosted.pod["metadata"].get("annotations") or {}).get(RUN_SECONDS)
        if seconds is None:
            return False

        def is_up() -> bool:
            pod = self._pod(hosted)
            return pod is not None and pod.running.issuperset(c.name for c in pod.spec.apps)

        await self._model.history.until(lambda: hosted.leaving.is_set() or is_up())
        try:
            async with asyncio.timeout(float(seconds)):
                await hosted.leaving.wait()
        except TimeoutError:
            pod = self._pod(hosted)
            return pod is not None and not pod.is_rejected
        return False

    async def _succeed(self, hosted: _Hosted) -> None:
        pod = self._pod(hosted)
        if pod is not None:
            await self._model.pod_gone(hosted.uid)
            await asyncio.sleep(self._model.random.uniform(*_STATUS_DELAY))
            self._write(hosted, ended_status(pod, self._stamp()))

    def _pod(self, hosted: _Hosted) -> NodePod | None:
        return self._model.node.pods.get(hosted.uid)

    # What the API server is told.

    def _hear(self, event: KubeletEvent) -> None:
        if event.kind == "started":
            self._begin()
        elif event.kind in _CHANGES:
            if self.eager:
                self._node_is_due.set()
        elif event.kind in _RETOLD:
            self._mark({event.pod})
            if event.kind == "rejected" and event.pod in self._hosted:
                timings = self._model.timings
                is_early = event.elapsed < self._started + timings.housekeeping
                told = self._started + timings.full_report if is_early else event.elapsed
                self._hosted[event.pod].told_at = told
                asyncio.get_running_loop().call_at(told, self._mark, {event.pod})
        if event.kind == "listed":
            self._mark({uid for uid, _ in self._model.held(event.resource)})

    def _begin(self) -> None:
        """A kubelet starts. It registers the Node, and asks again for rejected pods untold."""
        loop = asyncio.get_running_loop()
        self._started = loop.time()
        loop.call_at(self._started + self._model.timings.full_report, self._has_dirty.set)
        for hosted in self._hosted.values():
            if hosted.told_at is not None and (pod := self._pod(hosted)) is not None:
                pod.admission = None
            hosted.told_at = None
        status = {"conditions": [{"type": "Ready", "status": "True"}]}
        labels = {"kubernetes.io/hostname": self._node_name}
        node = {"metadata": {"name": self._node_name, "labels": labels}, "spec": {}}
        with suppress(AlreadyExistsError):
            self._store.create("nodes", node | {"status": status})
        self._node_is_due.set()

    def _mark(self, uids: set[str]) -> None:
        self._dirty.update(dict.fromkeys(sorted(uids)))
        self._has_dirty.set()

    async def _report_pods(self) -> None:
        while True:
            await self._has_dirty.wait()
            self._has_dirty.clear()
            await asyncio.sleep(self._model.random.uniform(*_STATUS_DELAY))
            if self._model.life is None:
                continue  # a dead process tells nobody; the next one tells what it finds
            dirty, self._dirty = self._dirty, {}
            for uid in dirty:
                if (hosted := self._hosted.get(uid)) is not None:
                    self._report_pod(hosted)

    def _report_pod(self, hosted: _Hosted) -> None:
        pod = self._pod(hosted)
        if pod is None or pod.admission is None:
            return
        verdict = pod.admission
        if verdict.admitted:
            status = running_status(pod, self._stamp_of)
        elif asyncio.get_running_loop().time() < (hosted.told_at or -math.inf):
            # Not Failed yet: a new kubelet takes each pod for one whose containers may still run.
            status = {}
        else:
            hosted.told_at = None
            status = {"phase": "Failed", "reason": verdict.reason, "message": verdict.message}
        self._write(hosted, status)

    def _write(self, hosted: _Hosted, status: Json) -> None:
        def change(pod: Json) -> Json:
            pod["status"] = merged(pod.get("status") or {}, status, self._stamp())
            return pod

        # The pod may be gone, or another pod may have its name.
        with suppress(NotFoundError, ConflictError):
            self._store.update("pods", *hosted.key, change, uid=hosted.uid)

    def _stamp_of(self, moment: float) -> str:
        ago = timedelta(seconds=asyncio.get_running_loop().time() - moment)
        return (self._model.clock.now() - ago).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _stamp(self) -> str:
        return self._stamp_of(asyncio.get_running_loop().time())

    async def _report_node(self) -> None:
        while True:
            self._node_is_due.clear()
            if self._model.life is not None:
                self._write_node(self._model.life.devices.tick())
            with suppress(TimeoutError):
                async with asyncio.timeout(self.status_period):
                    await self._node_is_due.wait()

    def _write_node(self, counts: Mapping[str, tuple[int, int]]) -> None:
        """Write the Node's status. As with the real kubelet, a removed resource stays as 0."""
        counted = {name: str(capacity) for name, (capacity, _) in counts.items()}
        offered = {name: str(allocatable) for name, (_, allocatable) in counts.items()}

        def change(node: Json) -> Json:
            status = node.setdefault("status", {})
            capacity = status["capacity"] = {**(status.get("capacity") or {}), **counted}
            # If an earlier kubelet knew a resource and this one does not, all of it is allocatable.
            whole = {name: text for name, text in capacity.items() if "/" in name}
            status["allocatable"] = {**(status.get("allocatable") or {}), **whole, **offered}
            return node

        try:
            node = self._store.update("nodes", "", self._node_name, change)
        except NotFoundError:
            return  # a deleted Node comes back with the kubelet's next start
        self._model.node.labels = dict(node["metadata"].get("labels") or {})
        self._model.node.published = {
            name: int(text) for name, text in node["status"]["allocatable"].items() if "/" in name
        }
