"""The kubelet of one node: its processes from start to exit or panic, and what tests do to it.

A process has one loop, and pod workers that start and restart containers, in parallel to the
admission of other pods.
"""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.ports import Clock
from agent.sandbox.kubelet import checkpoint
from agent.sandbox.kubelet.allocation import Admitter, DeviceManager, KubeletPanicError
from agent.sandbox.kubelet.endpoint import DeviceError
from agent.sandbox.kubelet.pods import (
    ContainerKey,
    ContainerSpec,
    KubeletAdmission,
    KubeletLog,
    KubeletNode,
    NodePod,
    read_pod,
)
from agent.sandbox.kubelet.services import PodResourcesLister, RegistrationServer, SocketServer
from agent.sandbox.store import Json

SOCKET_NAME: Final = "kubelet.sock"


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


@dataclass(eq=False)
class PodWorkers:
    """One worker for each pod. `_turn` is free when the kubelet's loop can handle an event.

    If a plugin refuses a container, the container waits with CreateContainerConfigError and is
    tried again. The pod does not fail.
    """

    _model: "KubeletModel"
    _devices: DeviceManager
    _turn: asyncio.Lock
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict)
    _deaths: dict[str, int] = field(default_factory=dict)

    async def run(self, uid: str) -> None:
        """Start the pod's containers that should run, until they do or the pod has ended."""
        pods = self._model.node.pods
        async with self._locks.setdefault(uid, asyncio.Lock()):
            while (pod := pods.get(uid)) is not None and not pod.is_rejected:
                if await self._start_missing(pod):
                    return
                await self._take(self._model.timings.container_retry)
                async with self._turn:
                    pass

    async def revive(self, uid: str) -> None:
        """Restart a dead container of the pod, after a short pause, or its back-off too."""
        timings = self._model.timings
        await self._take(timings.container_restart)
        async with self._turn:
            if uid not in self._devices.active:
                return
        self._deaths[uid] = deaths = self._deaths.get(uid, 0) + 1
        if deaths > 1 and timings.crash_backoff:
            wait = timings.crash_backoff * 2.0 ** (deaths - 2)
            await asyncio.sleep(min(wait, timings.most_backoff))
            async with self._turn:
                pass
        await self.run(uid)

    async def _start_missing(self, pod: NodePod) -> bool:
        complete = pod.has_cgroup = True
        for container in pod.spec.containers:
            if container.kind == "app":
                pod.is_initialised = True
            if container.name in pod.running or (container.kind == "init" and pod.is_initialised):
                continue
            if not await self._start(pod, container):
                complete = False
                if container.kind != "app":
                    break
        return complete

    async def _start(self, pod: NodePod, container: ContainerSpec) -> bool:
        uid, name, seen = pod.spec.uid, container.name, self._model.history
        try:
            await self._devices.start(pod.spec, container)
        except DeviceError as error:
            pod.waiting[name] = error.said
            seen.note("container_waiting", pod=uid, container=name, text=error.said)
            return False
        pod.waiting.pop(name, None)
        await self._take(self._model.timings.container_start)
        if self._model.node.pods.get(uid) is not pod or pod.is_rejected:
            return True
        pod.begin(name)
        seen.note("container_started", pod=uid, container=name)
        if container.kind == "init":
            await self._take(self._model.timings.init_run)
            pod.end(name)
            seen.note("init_ended", pod=uid, container=name)
        return True

    async def _take(self, span: tuple[float, float]) -> None:
        """Sleep for a time in that range; for 0, do not yield to the loop."""
        if any(span):
            await asyncio.sleep(self._model.random.uniform(*span))


class Life:
    """A process. It handles one event after the other, in `_turn`; an Allocate blocks it."""

    def __init__(self, model: "KubeletModel", devices: DeviceManager) -> None:
        self.devices: Final = devices
        self.lister: Final = PodResourcesLister(devices, model.random)
        self._model = model
        self._turn = asyncio.Lock()  # it is fair: events are handled in their order
        self._group = asyncio.TaskGroup()
        self._admitter = Admitter(model.node, devices, model.history)
        self._workers = PodWorkers(model, devices, self._turn)
        self._registration = RegistrationServer(
            model.directories[0], devices, self._group.create_task
        )
        self._servers: list[SocketServer] = []

    async def run(self) -> None:
        """Run until the task is cancelled.

        Raises ExceptionGroup: a panic, it could not start, or the model itself is broken.
        """
        model = self._model
        try:
            async with self._group:
                try:
                    async with self._turn:
                        await self._start()
                    await asyncio.Event().wait()
                finally:
                    model.life = None
        finally:
            self._registration.close()
            for server in self._servers:
                await server.die()

    def submit_pod(self, uid: str) -> None:
        """Tell the loop of a new pod."""
        self._group.create_task(self._hear_pod(uid))

    def submit_death(self, uid: str) -> None:
        """Tell the loop that a container of the pod has died."""
        self._group.create_task(self._workers.revive(uid))

    async def end_pod(self, uid: str, stop_seconds: float) -> None:
        """Tell the loop that a pod is to end. The stop runs beside the loop.

        Returns when the pod has ended or this process has died.
        """
        model = self._model
        self._group.create_task(self._end(uid, stop_seconds))
        await model.history.until(lambda: uid not in model.node.pods or model.life is not self)

    async def _start(self) -> None:
        """Serve, and admit all pods of the node before any other event."""
        model = self._model
        await asyncio.sleep(model.timings.socket)
        self.devices.load()
        await self._serve()
        model.life = self
        model.history.note("started")
        await asyncio.sleep(model.random.uniform(*model.timings.first_admission))
        for uid in model.node.in_order(model.random):
            await self._admit(uid)
        self.devices.sources_ready = True

    async def _serve(self) -> None:
        servers = SocketServer([self._registration]), SocketServer([self.lister])
        for directory, server in zip(self._model.directories, servers, strict=True):
            directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            for entry in directory.iterdir():
                if entry.is_socket():  # sockets are swept and nothing else
                    entry.unlink()
            await server.serve(directory / SOCKET_NAME)
            self._servers.append(server)

    async def _hear_pod(self, uid: str) -> None:
        async with self._turn:
            await self._admit(uid)

    async def _admit(self, uid: str) -> None:
        pod = self._model.node.pods.get(uid)
        if pod is None or pod.is_rejected or uid in self.devices.active:
            return
        pod.admission = await self._admitter.admit(pod.spec)
        if pod.admission.admitted:
            self._group.create_task(self._workers.run(uid))
        else:
            pod.stop()
        await asyncio.sleep(self._model.random.uniform(*self._model.timings.between_pods))

    async def _end(self, uid: str, stop_seconds: float) -> None:
        async with self._turn:
            pass  # the loop has heard of it; without a stop, no other event comes in between
        if stop_seconds:
            await asyncio.sleep(stop_seconds)
        self.devices.active.pop(uid, None)
        self._model.forget(uid)


_MACHINE_TIMINGS: Final = Timings()


class KubeletModel:
    """A kubelet 1.36 (legacy registration, topology policy none) on real unix sockets.

    `directories`: the device plugin directory, and the one with the PodResources socket. Pods and
    running containers belong to the node. They survive the process, and each process admits all of
    them again before it handles other events. `life`: the process that serves now.
    """

    def __init__(
        self,
        directory: Path,
        pod_resources_dir: Path,
        clock: Clock,
        random: random.Random,
        *,
        timings: Timings = _MACHINE_TIMINGS,
    ) -> None:
        self.node: Final = KubeletNode()
        self.history: Final = KubeletLog()
        self.directories: Final = directory, pod_resources_dir
        self.clock: Final = clock
        self.random: Final = random
        self.timings: Final = timings
        self.life: Life | None = None
        self._owner: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process. Returns when both sockets are served.

        Raises RuntimeError: it was already started; ExceptionGroup: it cannot create or remove a
        directory or socket.
        """
        if self._owner is not None:
            raise RuntimeError("the kubelet model has been started already")
        # The only task outside a TaskGroup: it owns the group and continues when start() returns.
        owner = self._owner = asyncio.get_running_loop().create_task(self._supervise())
        owner.add_done_callback(lambda _: self.history.note("exited"))
        await self.history.until(lambda: self.life is not None or owner.done())
        if owner.done() and not owner.cancelled():
            self._owner = None
            owner.result()

    async def kill(self) -> None:
        """SIGKILL: cut the calls in flight without recording their answers.

        `kubelet.sock` stays as a dead file. A second call does nothing.

        Raises ExceptionGroup: the model itself was broken.
        """
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.cancel()
            await asyncio.wait((owner,))
            if not owner.cancelled():
                owner.result()

    async def restart(self, *, lose_checkpoint: bool = False, reboot: bool = False) -> None:
        """Start a new process, which admits all pods again.

        Containers keep running; after a `reboot`, none is left.
        """
        await self.kill()
        if reboot:
            self.node.stop_all()
        if lose_checkpoint:
            self._lose_checkpoint()
        await self.start()

    def capacity(self, resource: str) -> int:
        """The number of healthy and unhealthy ids in the next node status."""
        return self._counts(resource)[0]

    def allocatable(self, resource: str) -> int:
        """The number of healthy ids in the next node status."""
        return self._counts(resource)[1]

    async def admit(self, pod: Json) -> KubeletAdmission:
        """Bind a pod to the node and wait for the verdict, also across restarts of the kubelet.

        A pod that ends before is not admitted. Raises KeyError: it is not a Pod object.
        """
        spec = read_pod(pod)
        entry = self.node.pods.setdefault(spec.uid, NodePod(spec))
        if entry.admission is None and self.life is not None:
            self.life.submit_pod(spec.uid)
        await self.history.until(
            lambda: entry.admission is not None or spec.uid not in self.node.pods
        )
        return entry.admission or KubeletAdmission(admitted=False)

    async def pod_gone(self, uid: str, *, stop_seconds: float = 0.0) -> None:
        """Tell the kubelet that the pod is terminal or deleted, after its present work.

        Later work of the kubelet does not delay the `stop_seconds` of the pod's containers.
        """
        if self.life is not None:
            await self.life.end_pod(uid, stop_seconds)
        self.forget(uid)

    def forget(self, uid: str) -> None:
        """Remove a pod that has ended from the node."""
        if self.node.pods.pop(uid, None) is not None:
            self.history.note("ended", pod=uid)

    async def container_died(self, uid: str, container: str) -> None:
        """End a container as if by itself. Its pod worker starts it again."""
        self.node.pods[uid].end(container)
        self.history.note("container_died", pod=uid, container=container)
        if self.life is not None:
            self.life.submit_death(uid)

    def held(self, resource: str) -> Mapping[ContainerKey, frozenset[str]]:
        """The recorded ids of each container."""
        records = self.life.devices.records if self.life is not None else {}
        return {owner: held[resource].ids for owner, held in records.items() if resource in held}

    def _counts(self, resource: str) -> tuple[int, int]:
        counts = self.life.devices.counts() if self.life is not None else {}
        return counts.get(resource, (0, 0))

    def _lose_checkpoint(self) -> None:
        (self.directories[0] / checkpoint.FILE_NAME).unlink(missing_ok=True)

    def _new_life(self) -> Life:
        running = self.node.running()
        return Life(self, DeviceManager(self.directories[0], self.random, self.history, running))

    async def _supervise(self) -> None:
        """Keep one process running until it is killed, as an init system does."""
        while self._owner is not None:
            try:
                await self._new_life().run()
            except* KubeletPanicError as group:
                self.history.note("panicked", text=str(group.exceptions[0]))
            await asyncio.sleep(self.timings.after_panic)
