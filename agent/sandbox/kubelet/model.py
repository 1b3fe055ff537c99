"""The kubelet of one node, with the interface for tests and the sandbox."""

import asyncio
import contextlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent.core.ports import Clock
from agent.sandbox.api_errors import Json
from agent.sandbox.kubelet import checkpoint
from agent.sandbox.kubelet.books import KubeletBooks, NodeResources
from agent.sandbox.kubelet.life import Life, Paths, Timings
from agent.sandbox.kubelet.pods import (
    ContainerKey,
    KubeletAdmission,
    KubeletNode,
    NodePod,
    read_pod,
)
from agent.sandbox.kubelet.seen import KubeletLog

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
        self.history: Final = KubeletLog(clock)
        self._paths = Paths(directory, pod_resources_dir)
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

        Raises:
            RuntimeError: it was already started.
            ExceptionGroup: it cannot create or remove a directory or socket.
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

    async def stop(self) -> None:
        """End the process without cleaning up: `kubelet.sock` stays as a dead file."""
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL: cut the calls in flight without recording their answers.

        A second call does nothing.

        Raises:
            ExceptionGroup: the model itself was broken.
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

        Raises:
            KeyError, ValueError: it is not a Pod object.
        """
        entry = self.node.add(read_pod(pod))
        if entry.admission is not None:
            return entry.admission
        if self._life is not None and self.is_up:
            self._life.submit_pod(entry.spec.uid)
        return await entry.verdict()

    async def pod_gone(self, uid: str, *, stop_seconds: float = 0.0) -> None:
        """Tell the kubelet that the pod is terminal or deleted, after its present work.

        Later work of the kubelet does not delay the `stop_seconds` of the pod's containers.
        """
        if self._life is not None and self.is_up:
            await self._life.end_pod(uid, stop_seconds)
        self.node.remove(uid)

    async def container_died(self, uid: str, container: str) -> None:
        """End a container as if by itself. Its pod worker starts it again."""
        self.node.pods[uid].running.discard(container)
        if self._life is not None and self.is_up:
            self._life.submit_death(uid)

    async def until_running(self, uid: str, container: str) -> None:
        """Wait until the kubelet runs the pod's container. The caller sets the deadline."""

        def runs() -> bool:
            pod = self.pod(uid)
            return pod is not None and container in pod.running

        await self.history.until(runs)

    def pod(self, uid: str) -> NodePod | None:
        """The pod as the node knows it."""
        return self.node.pods.get(uid)

    def held(self, resource: str) -> Mapping[ContainerKey, frozenset[str]]:
        """The recorded ids of each container."""
        records = self._books.records if self._books else ()
        return {owner: record.ids for owner, name, record in records if name == resource}

    @property
    def _books(self) -> KubeletBooks | None:
        return self._life.books if self._life is not None and self._life.is_serving else None

    def _lose_checkpoint(self) -> None:
        (self._paths.plugins / checkpoint.FILE_NAME).unlink(missing_ok=True)

    async def _supervise(self, stop: asyncio.Event, up: asyncio.Future[None]) -> None:
        """Keep one process running until `stop` is set, as an init system does."""

        def serving() -> None:
            if not up.done():
                up.set_result(None)

        while not stop.is_set():
            life = Life(self.node, self._paths, self.random, self.history, self.timings)
            self._life = life
            try:
                await life.run(serving)
            finally:
                self._life = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.timings.after_panic):
                    await stop.wait()
