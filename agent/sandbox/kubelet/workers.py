"""Pod workers: they start containers, and start them again, beside the admission of other pods."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agent.sandbox.kubelet.allocation import Allocator
from agent.sandbox.kubelet.devices import DeviceError
from agent.sandbox.kubelet.node import Node, NodePod
from agent.sandbox.kubelet.pods import ContainerSpec
from agent.sandbox.kubelet.seen import SeenLog


@dataclass(frozen=True, slots=True)
class Timings:
    """How long the real kubelet (1.36) takes, in seconds; pairs are drawn from evenly.

    Before its first `housekeeping` it cannot rule out that a pod's containers run: the API server
    hears of a rejection only at the first `full_report`. Both count from the start.
    """

    socket: float = 0.35
    first_admission: tuple[float, float] = (0.9, 1.0)
    between_pods: tuple[float, float] = (0.008, 0.020)
    after_panic: float = 1.0
    container_restart: tuple[float, float] = (0.2, 1.0)
    container_retry: tuple[float, float] = (8.0, 10.0)
    housekeeping: float = 2.0
    full_report: float = 10.0


class PodWorkers:
    """One worker for each pod. `turn` waits until the kubelet's loop is free to hear of an event.

    A container whose plugin refuses stays with CreateContainerConfigError and is tried again; the
    pod is not failed for it.
    """

    def __init__(
        self,
        node: Node,
        allocator: Allocator,
        chance: random.Random,
        seen: SeenLog,
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

    async def run(self, uid: str) -> None:
        """Start what of the pod is to run and does not, until it does or the pod has ended."""
        async with self._locks.setdefault(uid, asyncio.Lock()):
            while (pod := self._node.pods.get(uid)) is not None and not pod.is_rejected:
                if await self._start_missing(pod):
                    return
                await asyncio.sleep(self._chance.uniform(*self._timings.container_retry))
                await self._turn()

    async def revive(self, uid: str) -> None:
        """A container of the pod has died: start it again, a moment later."""
        await asyncio.sleep(self._chance.uniform(*self._timings.container_restart))
        await self._turn()
        await self.run(uid)

    async def _start_missing(self, pod: NodePod) -> bool:
        complete = True
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
        pod.starts[name] = pod.starts.get(name, 0) + 1
        if container.kind != "init":
            pod.running.add(name)
        self._seen.note("container_started", pod=uid, container=name)
        return True


def _is_past(pod: NodePod, container: ContainerSpec) -> bool:
    return container.kind == "init" and pod.is_initialised
