"""A node with a kubelet, as a device plugin and a client of PodResources meet it.

One body of a test runs against two of them: the kubelet model and the real kubelet. Names of pods
and of the resource are made unique here, so that nothing of an earlier test is in the way.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.sandbox.kubelet.checkpoint import FILE_NAME, Checkpoint, CheckpointError, decode
from agent.wire.v1 import ContainerDevices, PodResources
from agent.wire.v1beta1 import Device
from tests.fakes.plugin import devices
from tests.peers.lab.api import Object
from tests.peers.lab.pod_resources import PodResourcesClient
from tests.peers.lab.probe import ProbePlugin
from tests.peers.lab.waiting import until, until_answer
from tests.peers.lab.workloads import NAMESPACE, a_container, a_pod, stray

WITHIN: Final = 25.0
"""Seconds for anything that the kubelet does soon."""

Held = Mapping[str, frozenset[str]]
"""Container → the ids that it holds; a container without any is there too."""


class NodeUnderTest(ABC):
    """The node. `plugins` is the device plugin directory, `resource` a test's own resource.

    `resources` asks its PodResources socket.
    """

    def __init__(self, plugins: Path, pod_resources: Path, tag: str) -> None:
        self.plugins: Final = plugins
        self.resources: Final = PodResourcesClient(pod_resources)
        self.resource: Final = f"peers.test/gpu-{tag}"
        self._tag = tag

    @abstractmethod
    async def submit(self, pod: Object) -> str:
        """Create a pod that is bound to the node already; its UID."""

    @abstractmethod
    async def delete(self, name: str, grace: int = 0) -> None:
        """Delete a pod with a grace in seconds."""

    @abstractmethod
    def pod(self, name: str) -> Object | None:
        """The pod as the API server has it."""

    @abstractmethod
    def status(self) -> Mapping[str, Mapping[str, str]]:
        """The Node's status, `capacity` and `allocatable` at least."""

    @abstractmethod
    async def kill(self) -> None:
        """SIGKILL for the kubelet; containers run on."""

    @abstractmethod
    async def start(self) -> None:
        """Start the kubelet; returns when it takes registrations and answers questions."""

    @abstractmethod
    async def end_container(self, name: str, container: str = "main") -> None:
        """Kill a container that runs."""

    @abstractmethod
    async def until_leaving(self, name: str) -> None:
        """Return once the kubelet has heard that a pod is to be deleted. Raises TimeoutError."""

    async def restart(self, *, lose_checkpoint: bool = False) -> None:
        """SIGKILL, and a new kubelet."""
        await self.kill()
        if lose_checkpoint:
            self.checkpoint_path.unlink()
        await self.start()

    def known_as(self, name: str) -> str:
        """The name by which the API server knows the pod that the test calls `name`."""
        return f"{name}-{self._tag}"

    def container(
        self, name: str = "main", *, count: int = 1, resource: str | None = None, **more: object
    ) -> Object:
        """A container that asks for `count` ids."""
        limits = {resource or self.resource: str(count)}
        return a_container(name, gpus=0, **more) | {"resources": {"limits": limits}}  # type: ignore[arg-type]

    def init(self, name: str = "init", *, count: int = 1) -> Object:
        """An init container that asks for ids and ends at once."""
        return self.container(name, count=count, script="true")

    def sidecar(self, name: str = "sidecar", *, count: int = 1) -> Object:
        """An init container that asks for ids and stays."""
        return self.container(name, count=count, restartPolicy="Always")

    async def create(
        self, name: str, *containers: Object, inits: tuple[Object, ...] = (), **spec: object
    ) -> str:
        """Create a bound pod, by default of one container with one id; its UID."""
        apps = containers or (self.container(),)
        return await self.submit(stray(a_pod(self.known_as(name), *apps, inits=inits, **spec)))

    async def until(self, holds: Callable[[], object], what: str, within: float = WITHIN) -> None:
        """Return once `holds()`. Raises TimeoutError."""
        await until(lambda: bool(holds()), within, lambda: what)

    async def stays(self, holds: Callable[[], object], what: str, seconds: float = 0.6) -> None:
        """Look for a while that something does not change. Raises AssertionError: it did."""
        with contextlib.suppress(TimeoutError):
            await until(lambda: not holds(), seconds, lambda: what)
            raise AssertionError(what)

    def phase(self, name: str) -> str | None:
        """The phase of a pod that the API server has."""
        pod = self.pod(name)
        return None if pod is None else str(pod["status"].get("phase"))

    async def until_phase(self, name: str, phase: str, within: float = WITHIN) -> Object:
        """Wait for a phase; the pod's status then. Raises TimeoutError."""

        def told() -> str:
            return f"pod {name} is not {phase}: {(self.pod(name) or {}).get('status')}"

        await until(lambda: self.phase(name) == phase, within, told)
        status: Object = (self.pod(name) or {})["status"]
        return status

    async def until_gone(self, name: str) -> None:
        """Wait until the API server has no such pod. Raises TimeoutError."""
        await self.until(lambda: self.pod(name) is None, f"pod {name} stays")

    def conditions(self, name: str) -> Mapping[str, str]:
        """The status of each condition of a pod that the API server has."""
        found = (self.pod(name) or {}).get("status", {}).get("conditions", ())
        return {one["type"]: one["status"] for one in found}

    def state(self, name: str, container: str = "main") -> Object:
        """The state of a container, empty before the kubelet has told one."""
        status = (self.pod(name) or {}).get("status", {})
        found = [*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())]
        return next((one["state"] for one in found if one["name"] == container), {})

    def restarts(self, name: str = "p", container: str = "main") -> int:
        """How often a container that runs was started again; -1: it does not run."""
        told = (self.pod(name) or {})["status"].get("containerStatuses", ())
        counts = [one["restartCount"] for one in told if one["name"] == container]
        return counts[0] if counts and "running" in self.state(name, container) else -1

    async def until_restarted(self, name: str = "p", container: str = "main") -> None:
        """Wait until a container runs that was started again once. Raises TimeoutError."""
        await self.until(
            lambda: self.restarts(name, container) == 1, f"{name} is not started again"
        )

    def counted(self, resource: str | None = None) -> tuple[str | None, str | None]:
        """Capacity and allocatable of a resource by the Node's status, as texts."""
        name, status = resource or self.resource, self.status()
        return status["capacity"].get(name), status["allocatable"].get(name)

    async def until_counted(self, capacity: int, allocatable: int) -> None:
        """Wait until the Node's status says so of the test's resource. Raises TimeoutError."""
        wanted = (str(capacity), str(allocatable))
        await until(
            lambda: self.counted() == wanted, WITHIN, lambda: f"{self.counted()} is not {wanted}"
        )

    async def get(self, name: str) -> PodResources:
        """One pod's answer. Raises GRPCError."""
        return await self.resources.get(NAMESPACE, self.known_as(name))

    async def held(self, name: str) -> Held | None:
        """What one pod's containers hold; None: the kubelet does not know it. Raises GRPCError."""
        found = await self.resources.find(NAMESPACE, self.known_as(name))
        return (
            None
            if found is None
            else {
                one.name: frozenset(text for entry in one.devices for text in entry.device_ids)
                for one in found.containers
            }
        )

    async def until_held(self, name: str, holds: Callable[[Held | None], bool]) -> Held | None:
        """Ask until `holds` of the answer; the answer. Raises TimeoutError, GRPCError."""
        answers: list[Held | None] = []

        async def ask() -> bool:
            answers.append(await self.held(name))
            return holds(answers[-1])

        await until_answer(ask, WITHIN, lambda: f"{name}: {answers[-1:]}")
        return answers[-1]

    async def allocatable(self, resource: str | None = None) -> list[ContainerDevices]:
        """The entries of a resource's healthy ids. Raises GRPCError."""
        return await self.resources.allocatable(resource or self.resource)

    async def until_listed(self, count: int, resource: str | None = None) -> None:
        """Wait until so many ids are healthy. Raises TimeoutError, GRPCError."""
        found = -1

        async def ask() -> bool:
            nonlocal found
            try:
                entries = await self.allocatable(resource)
            except GRPCError as error:
                if error.status is not Status.RESOURCE_EXHAUSTED:
                    raise
                return False  # a test just used up what all clients together may ask
            found = len({i for one in entries for i in one.device_ids})
            return found == count

        await until_answer(ask, WITHIN, lambda: f"{found} ids are healthy, not {count}")

    @contextlib.asynccontextmanager
    async def plugin(
        self, count: int = 4, *, resource: str | None = None, name: str = "p.sock"
    ) -> AsyncIterator[ProbePlugin]:
        """A registered plugin whose `count` ids are healthy."""
        named = resource or self.resource
        async with ProbePlugin(self.plugins, resource=named, name=name, count=count) as plugin:
            await plugin.register()
            await self.until_listed(count, named)
            yield plugin

    async def come_back(self, plugin: ProbePlugin, entries: list[Device] | None = None) -> None:
        """Serve and register anew, as a good plugin does after the kubelet's start.

        The end of its old stream, noticed late, would take the new registration with it: a legacy
        kubelet disconnects whoever is there then.
        """
        await plugin.die()
        await self.until_listed(0, plugin.resource)
        plugin.devices = devices(len(plugin.devices)) if entries is None else entries
        await plugin.serve()
        await plugin.register()
        healthy = [entry for entry in plugin.devices if entry.health == "Healthy"]
        await self.until_listed(len(healthy), plugin.resource)

    @property
    def checkpoint_path(self) -> Path:
        """The kubelet's records."""
        return self.plugins / FILE_NAME

    async def until_recorded(self, holds: Callable[[Checkpoint], object]) -> None:
        """Return once the records say so, which are written after the list was shown.

        Raises:
            TimeoutError: they do not.
        """

        def is_written() -> bool:
            with contextlib.suppress(CheckpointError, FileNotFoundError):
                return bool(holds(self.checkpoint()))
            return False

        await until(is_written, WITHIN, lambda: "the records do not say so")

    def checkpoint(self) -> Checkpoint:
        """The kubelet's records as they are written. Raises CheckpointError, OSError."""
        return decode(self.checkpoint_path.read_bytes())
