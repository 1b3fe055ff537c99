"""The kubelet of one node: its processes from start to exit or panic, and what tests do to it.

A process has one loop, and pod workers that start and restart containers, in parallel to the
admission of other pods.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from agent.ports import Clock
from agent.sandbox.kubelet import checkpoint
from agent.sandbox.kubelet.allocation import (
    Admitter,
    DeviceAllocator,
    KubeletBooks,
    KubeletPanicError,
    NodeResources,
)
from agent.sandbox.kubelet.endpoint import DeviceError
from agent.sandbox.kubelet.pods import (
    ContainerKey,
    ContainerSpec,
    KubeletAdmission,
    KubeletLog,
    KubeletNode,
    NodePod,
    SeenKind,
    read_pod,
)
from agent.sandbox.kubelet.services import PodResourcesLister, RegistrationServer, SocketServer
from agent.sandbox.store import Json

SOCKET_NAME: Final = "kubelet.sock"
Job = Callable[[], Coroutine[object, object, None]]


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
    """One worker for each pod. `turn` waits until the kubelet's loop can handle an event.

    If a plugin refuses a container, the container waits with CreateContainerConfigError and is
    tried again. The pod does not fail.
    """

    _node: KubeletNode
    _allocator: DeviceAllocator
    _chance: random.Random
    _seen: KubeletLog
    _timings: Timings
    _turn: Callable[[], Awaitable[None]]
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict)
    _deaths: dict[str, int] = field(default_factory=dict)

    async def run(self, uid: str) -> None:
        """Start the pod's containers that should run, until they do or the pod has ended."""
        async with self._locks.setdefault(uid, asyncio.Lock()):
            while (pod := self._node.pods.get(uid)) is not None and not pod.is_rejected:
                if await self._start_missing(pod):
                    return
                await self._take(self._timings.container_retry)
                await self._turn()

    async def revive(self, uid: str) -> None:
        """Restart a dead container of the pod, after a short pause or its back-off."""
        await self._take(self._timings.container_restart)
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
            if container.name in pod.running or (container.kind == "init" and pod.is_initialised):
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
        pod.begin(name)
        self._seen.note("container_started", pod=uid, container=name)
        if container.kind == "init":
            await self._take(self._timings.init_run)
            pod.end(name)
            self._seen.note("init_ended", pod=uid, container=name)
        return True

    async def _take(self, span: tuple[float, float]) -> None:
        """Sleep for a time in that range; for 0, do not yield to the loop."""
        if any(span):
            await asyncio.sleep(self._chance.uniform(*span))


class _ExitError(Exception):
    """Ends the process from inside its own TaskGroup."""


class Life:
    """A process. Its loop handles one event after the other; an Allocate blocks it."""

    def __init__(
        self,
        node: KubeletNode,
        plugins: Path,
        pod_resources: Path,
        chance: random.Random,
        seen: KubeletLog,
        timings: Timings,
    ) -> None:
        self._node = node
        self._plugins = plugins
        self._chance = chance
        self._seen = seen
        self._timings = timings
        self.is_serving = False
        self._exit = asyncio.Event()
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._group = asyncio.TaskGroup()
        self.books = KubeletBooks(plugins, chance, seen)
        self.allocator = DeviceAllocator(self.books, chance, seen, node.running(), self._active)
        self._admitter = Admitter(node, self.books, self.allocator, seen)
        self._workers = PodWorkers(node, self.allocator, chance, seen, timings, self._turn)
        self._registration = RegistrationServer(plugins, self.books, seen, self._spawn)
        lister = PodResourcesLister(self.books, self.allocator, self._admitter.active, chance)
        self._servers = {
            plugins: SocketServer([self._registration]),
            pod_resources: SocketServer([lister]),
        }

    async def run(self, up: Callable[[], None]) -> None:
        """Run the process until exit() or a panic. `up` is called when both sockets are served.

        Raises ExceptionGroup: it could not start, or the model itself is broken.
        """
        try:
            async with self._group:
                self._spawn(self._live(up))
                await self._until_exit()
        except* _ExitError:
            self._end("exited")
        except* KubeletPanicError as group:
            self._end("panicked", str(group.exceptions[0]))
        finally:
            self.is_serving = False
            self._exit.set()
            self._registration.close()
            for server in self._servers.values():
                await server.die()

    def exit(self) -> None:
        """Exit at once, without cleaning up."""
        self._exit.set()

    def submit_pod(self, uid: str) -> None:
        """Tell the loop of a new pod."""
        self._jobs.put_nowait(partial(self._admit, uid))

    def submit_death(self, uid: str) -> None:
        """Tell the loop that a container of the pod has died."""

        async def hear() -> None:
            if uid in self._admitter.active:
                self._spawn(self._workers.revive(uid))

        self._jobs.put_nowait(hear)

    async def end_pod(self, uid: str, stop_seconds: float) -> None:
        """Tell the loop that a pod is to end. The stop runs beside the loop.

        Returns when the pod has ended or this process has died.
        """
        done = asyncio.Event()

        async def end() -> None:
            await asyncio.sleep(stop_seconds)
            self._admitter.active.pop(uid, None)
            self._node.remove(uid)
            done.set()
            self._seen.note("ended", pod=uid)

        async def hear() -> None:
            if stop_seconds:
                self._spawn(end())
            else:
                await end()

        self._jobs.put_nowait(hear)
        await self._seen.until(lambda: done.is_set() or self._exit.is_set())

    def _active(self) -> frozenset[str]:
        return frozenset(self._admitter.active)

    def _spawn(self, activity: Coroutine[object, object, None]) -> None:
        self._group.create_task(activity)

    async def _turn(self) -> None:
        heard = asyncio.Event()

        async def hear() -> None:
            heard.set()

        self._jobs.put_nowait(hear)
        await heard.wait()

    async def _until_exit(self) -> NoReturn:
        await self._exit.wait()
        raise _ExitError

    def _end(self, kind: SeenKind, text: str = "") -> None:
        self.is_serving = False
        self._exit.set()
        self._seen.note(kind, text=text)

    async def _start(self) -> None:
        await asyncio.sleep(self._timings.socket)
        self.books.load()
        _sweep(self._plugins)
        for directory, server in self._servers.items():
            directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            await server.serve(directory / SOCKET_NAME)

    async def _live(self, up: Callable[[], None]) -> None:
        await self._start()
        self.is_serving = True
        self._seen.note("started")
        up()
        await asyncio.sleep(self._chance.uniform(*self._timings.first_admission))
        for uid in self._node.in_order(self._chance):
            await self._admit(uid)
        self.allocator.sources_ready = True
        while True:
            job = await self._jobs.get()
            await job()

    async def _admit(self, uid: str) -> None:
        pod = self._node.pods.get(uid)
        if pod is None or pod.is_rejected or uid in self._admitter.active:
            return
        pod.settle(await self._admitter.admit(pod.spec))
        if not pod.is_rejected:
            self._spawn(self._workers.run(uid))
        await asyncio.sleep(self._chance.uniform(*self._timings.between_pods))


def _sweep(directory: Path) -> None:
    """Create the directory, or remove the sockets in it and nothing else.

    Raises OSError: it cannot be created, or a socket cannot be removed; the kubelet does not start.
    """
    directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    for entry in directory.iterdir():
        if entry.is_socket():
            entry.unlink()


_MACHINE_TIMINGS: Final = Timings()


class KubeletModel:
    """A kubelet 1.36 (legacy registration, topology policy none) on real unix sockets.

    `directory` is the device plugin directory, `pod_resources_dir` holds the PodResources socket.
    Pods and running containers belong to the node. They survive the process, and each process
    admits all of them again before it handles other events.
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
        self._directories = directory, pod_resources_dir
        self.clock: Final = clock
        self.random: Final = random
        self.timings: Final = timings
        self._life: Life | None = None
        self._owner: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    @property
    def is_up(self) -> bool:
        """Whether a kubelet process is alive and serving."""
        return self._life is not None and self._life.is_serving

    async def start(self) -> None:
        """Start the process. Returns when both sockets are served.

        Raises RuntimeError: it was already started; ExceptionGroup: it cannot create or remove a
        directory or socket.
        """
        if self._owner is not None:
            raise RuntimeError("the kubelet model has been started already")
        loop = asyncio.get_running_loop()
        up: asyncio.Future[None] = loop.create_future()
        self._stop = asyncio.Event()
        # The only task outside a TaskGroup: it owns the group and continues when start() returns.
        owner = self._owner = loop.create_task(self._supervise(self._stop, up))
        await asyncio.wait((owner, up), return_when=asyncio.FIRST_COMPLETED)
        if owner.done():
            self._owner = None
            owner.result()

    async def kill(self) -> None:
        """SIGKILL: cut the calls in flight without recording their answers.

        `kubelet.sock` stays as a dead file. A second call does nothing.

        Raises ExceptionGroup: the model itself was broken.
        """
        owner, self._owner = self._owner, None
        if owner is None:
            return
        self._stop.set()
        if self._life is not None:
            self._life.exit()
        await asyncio.wait((owner,))
        owner.result()

    async def restart(self, *, lose_checkpoint: bool = False) -> None:
        """Start a new process. Containers keep running, and all pods are admitted again."""
        await self.kill()
        if lose_checkpoint:
            self._lose_checkpoint()
        await self.start()

    async def reboot(self, *, lose_checkpoint: bool = False) -> None:
        """Restart the machine: no container is left, and all pods are admitted again."""
        await self.kill()
        self.node.stop_all()
        if lose_checkpoint:
            self._lose_checkpoint()
        await self.start()

    def capacity(self, resource: str) -> int:
        """The number of healthy and unhealthy ids in the next node status."""
        return self._books.view(resource)[0] if self._books else 0

    def allocatable(self, resource: str) -> int:
        """The number of healthy ids in the next node status."""
        return self._books.view(resource)[1] if self._books else 0

    async def until_allocatable(self, resource: str, n: int) -> None:
        """Wait until exactly `n` ids are allocatable. The caller sets the deadline."""
        await self.history.until(lambda: self.allocatable(resource) == n)

    def tick(self) -> NodeResources:
        """Make one node status. Removes resources whose plugin was gone for over 5 minutes."""
        return self._books.tick() if self._books else NodeResources()

    async def admit(self, pod: Json) -> KubeletAdmission:
        """Bind a pod to the node and wait for the verdict, also across restarts of the kubelet.

        Raises KeyError, ValueError: it is not a Pod object.
        """
        spec = read_pod(pod)
        entry = self.node.pods.setdefault(spec.uid, NodePod(spec))
        if entry.admission is None and self._life is not None and self.is_up:
            self._life.submit_pod(spec.uid)
        await self.history.until(lambda: entry.admission is not None)
        return entry.admission or KubeletAdmission(admitted=False)

    async def pod_gone(self, uid: str, *, stop_seconds: float = 0.0) -> None:
        """Tell the kubelet that the pod is terminal or deleted, after its present work.

        Later work of the kubelet does not delay the `stop_seconds` of the pod's containers.
        """
        if self._life is not None and self.is_up:
            await self._life.end_pod(uid, stop_seconds)
        if self.node.remove(uid):
            self.history.note("ended", pod=uid)

    async def container_died(self, uid: str, container: str) -> None:
        """End a container as if by itself. Its pod worker starts it again."""
        self.node.pods[uid].end(container)
        self.history.note("container_died", pod=uid, container=container)
        if self._life is not None and self.is_up:
            self._life.submit_death(uid)

    def pod(self, uid: str) -> NodePod | None:
        """The pod as the node knows it."""
        return self.node.pods.get(uid)

    def held(self, resource: str) -> Mapping[ContainerKey, frozenset[str]]:
        """The recorded ids of each container."""
        records = self._books.records if self._books else {}
        return {owner: held[resource].ids for owner, held in records.items() if resource in held}

    @property
    def _books(self) -> KubeletBooks | None:
        return self._life.books if self._life is not None and self._life.is_serving else None

    def _lose_checkpoint(self) -> None:
        (self._directories[0] / checkpoint.FILE_NAME).unlink(missing_ok=True)

    def _new_life(self) -> Life:
        return Life(self.node, *self._directories, self.random, self.history, self.timings)

    async def _supervise(self, stop: asyncio.Event, up: asyncio.Future[None]) -> None:
        """Keep one process running until `stop` is set, as an init system does."""

        def serving() -> None:
            if not up.done():
                up.set_result(None)

        while not stop.is_set():
            self._life = life = self._new_life()
            try:
                await life.run(serving)
            finally:
                self._life = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.timings.after_panic):
                    await stop.wait()
