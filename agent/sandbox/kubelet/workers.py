"""Pod workers: they start and restart containers, in parallel to the admission of other pods."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agent.sandbox.kubelet.allocation import DeviceAllocator
from agent.sandbox.kubelet.devices import DeviceError
from agent.sandbox.kubelet.node import KubeletNode, NodePod
from agent.sandbox.kubelet.pods import ContainerSpec
from agent.sandbox.kubelet.seen import KubeletLog


@dataclass(frozen=True, slots=True)
class Timings:
    """How long the real kubelet (1.36) takes, in seconds. Pairs are ranges of a uniform draw.

    - `housekeeping`, `full_report`: from the start of the kubelet. Before the first housekeeping,
      containers of a pod may still run, so the API server gets a rejection only with the first
      full report.
    - `container_start`: the runtime's part of a start; 0 by default.
    - `init_run`: the run of an ordinary init container; 0 by default.
    - `crash_backoff`: before the second restart of a container that keeps dying, doubled each time;
      0 by default.
    """

    socket: float = 0.35
    first_admission: tuple[float, float] = (0.9, 1.0)
    between_pods: tuple[float, float] = (0.008, 0.020)
    after_panic: float = 1.0
    container_restart: tuple[float, float] = (0.2, 1.0)
    container_retry: tuple[float, float] = (8.0, 10.0)
    container_start: tuple[float, float] = (0.0, 0.0)
    init_run: tuple[float, float] = (0.0, 0.0)
    crash_backoff: float = 0.0
    most_backoff: float = 300.0
    housekeeping: float = 2.0
    full_report: float = 10.0


class PodWorkers:
    """One worker for each pod. `turn` waits until the kubelet's loop can handle an event.

    If a plugin refuses a container, the container waits with CreateContainerConfigError and is
    tried again. The pod does not fail.
    """

    def __init__(
        self,
        node: KubeletNode,
        allocator: DeviceAllocator,
        chance: random.Random,
        seen: KubeletLog,
        timings: Timings,
        turn: Callable[[], Awaitable[None]],
    ) -> None:
        self._node = node
        self._allocator = allocator
        self._chance = chance
        self._seen = seen
        self._timings = timings
        self._turn = turn
        self._locks: dict[str, asyncio.Lock] = {}
        self._deaths: dict[str, int] = {}

    async def run(self, uid: str) -> None:
        """Start the pod's containers that should run, until they do or the pod has ended."""
        async with self._locks.setdefault(uid, asyncio.Lock()):
            while (pod := self._node.pods.get(uid)) is not None and not pod.is_rejected:
                if await self._start_missing(pod):
                    return
                await asyncio.sleep(self._chance.uniform(*self._timings.container_retry))
                await self._turn()

    async def revive(self, uid: str) -> None:
        """Restart a dead container of the pod, after a short pause or its back-off."""
        await asyncio.sleep(self._chance.uniform(*self._timings.container_restart))
        self._deaths[uid] = deaths = self._deaths.get(uid, 0) + 1
        if deaths > 1:
            wait = self._timings.crash_backoff * 2.0 ** (deaths - 2)
            await asyncio.sleep(min(wait, self._timings.most_backoff))
        await self._turn()
        await self.run(uid)

    async def _start_missing(self, pod: NodePod) -> bool:
        complete = pod.has_cgroup = True
        for container in pod.spec.containers:
            if container.kind == "app":
                pod.is_initialised = True
            if container.name in pod.running or _is_past(pod, container):
                continue
            if not await self._start(pod, container):
                complete = False
                if container.kind != "app":
                    break
        return complete

    async def _start(self, pod: NodePod, container: ContainerSpec) -> bool:
        uid, name = pod.spec.uid, container.name
        try:
            await self._allocator.start(pod.spec, container)
        except DeviceError as error:
            pod.waiting[name] = error.said
            self._seen.note("container_waiting", pod=uid, container=name, text=error.said)
            return False
        pod.waiting.pop(name, None)
        await self._take(self._timings.container_start)
        if self._node.pods.get(uid) is not pod or pod.is_rejected:
            return True
        pod.starts[name] = pod.starts.get(name, 0) + 1
        pod.running.add(name)
        self._seen.note("container_started", pod=uid, container=name)
        if container.kind == "init":
            await self._take(self._timings.init_run)
            pod.running.discard(name)
            self._seen.note("init_ended", pod=uid, container=name)
        return True

    async def _take(self, span: tuple[float, float]) -> None:
        """Sleep for a time in that range; for 0, do not yield to the loop."""
        if any(span):
            await asyncio.sleep(self._chance.uniform(*span))


def _is_past(pod: NodePod, container: ContainerSpec) -> bool:
    return container.kind == "init" and pod.is_initialised
