"""A node with a kubelet, as a device plugin and a client of PodResources meet it.

One body of a test runs against two of them: the kubelet model and the real kubelet. Names of pods
and of the resource are made unique here, so that nothing of an earlier test is in the way.
"""

import asyncio
import contextlib
import itertools
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError
from typing_extensions import override

from agent.sandbox.kubelet.checkpoint import FILE_NAME, Checkpoint, decode
from agent.sandbox.kubelet.model import KubeletModel, Timings
from agent.sandbox.kubelet.podloop import KubeletPodLoop
from agent.sandbox.store import ObjectStore
from agent.wire.v1 import ContainerDevices, PodResources
from agent.wire.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    Device,
    DevicePluginOptions,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    PreStartContainerRequest,
    PreStartContainerResponse,
)
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.plugin import ScriptedPlugin, devices
from tests.peers.lab.api import Object, key_of
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.control import NODE
from tests.peers.lab.node import PodResourcesClient
from tests.peers.lab.part import until, until_answer
from tests.peers.lab.pods import NAMESPACE, PODS, a_container, a_pod, key, stray

# A device plugin of a test's own: it can look around from inside a call of the kubelet.


@dataclass(frozen=True, slots=True)
class Call:
    """One call. `ids` are those asked for, or preferred; `found` what `look` told inside it."""

    kind: str
    ids: frozenset[str]
    at: float
    found: Any = None


class ProbePlugin(ScriptedPlugin):
    """Notes each call in `calls` when it comes; `look`, if set, is awaited before the answer."""

    def __init__(self, directory: Path, *, resource: str, name: str, count: int) -> None:
        super().__init__(directory, resource=resource, name=name, count=count)
        self.calls: list[Call] = []
        self.look: Callable[[], Awaitable[object]] | None = None

    def open_connections(self) -> int:
        found = self._server.connections if self._server is not None else ()
        return sum(not one.connection.is_closing() for one in found)

    def hold(self) -> None:
        """Keep every Allocate waiting from now on."""
        self.script.gate = asyncio.Event()

    def let_go(self) -> None:
        """Answer what waits, and all that comes."""
        gate, self.script.gate = self.script.gate, None
        if gate is not None:
            gate.set()

    def choose(self, choice: Callable[[list[str], list[str], int], list[str]]) -> None:
        """Offer GetPreferredAllocation from the next registration on."""
        self.script.options = DevicePluginOptions(get_preferred_allocation_available=True)
        self.script.prefer = choice

    @property
    def asked(self) -> list[frozenset[str]]:
        return [call.ids for call in self.calls if call.kind == "allocate"]

    @override
    async def get_preferred_allocation(
        self, message: PreferredAllocationRequest
    ) -> PreferredAllocationResponse:
        answer = await super().get_preferred_allocation(message)
        await self._note("prefer", answer.container_responses[0].device_i_ds)
        return answer

    @override
    async def allocate(self, message: AllocateRequest) -> AllocateResponse:
        await self._note("allocate", message.container_requests[0].devices_ids)
        return await super().allocate(message)

    @override
    async def pre_start_container(
        self, message: PreStartContainerRequest
    ) -> PreStartContainerResponse:
        await self._note("prestart", message.devices_ids)
        return await super().pre_start_container(message)

    async def _note(self, kind: str, ids: list[str]) -> None:
        at = asyncio.get_running_loop().time()
        found = None if self.look is None else await self.look()
        self.calls.append(Call(kind, frozenset(ids), at, found))


def first(available: list[str], required: list[str], count: int) -> list[str]:
    """The lowest ids, with those that have to be among them."""
    others = sorted(set(available) - set(required))
    return [*required, *others][:count]


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
    def objects(self, resource: str) -> Mapping[str, Object]:
        """The pods or nodes of the API server by name, pods with their namespace."""

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

    def pod(self, name: str) -> Object | None:
        return self.objects("pods").get(key(self.known_as(name)))

    async def restart(self, *, lose_checkpoint: bool = False) -> None:
        await self.kill()
        if lose_checkpoint:
            self.checkpoint_path.unlink()
        await self.start()

    def known_as(self, name: str) -> str:
        """The name by which the API server knows the pod that the test calls `name`."""
        return f"{name}-{self._tag}"

    def container(self, name: str = "main", *, count: int = 1, **more: object) -> Object:
        """A container that asks for `count` ids."""
        limits = {self.resource: str(count)}
        return a_container(name, gpus=0, **more) | {"resources": {"limits": limits}}  # type: ignore[arg-type]

    def init(self, name: str = "init", *, count: int = 1) -> Object:
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
        await until(lambda: bool(holds()), within, lambda: what)

    async def stays(self, holds: Callable[[], object], what: str, seconds: float = 0.6) -> None:
        """Look for a while that something does not change. Raises AssertionError: it did."""
        with contextlib.suppress(TimeoutError):
            await until(lambda: not holds(), seconds, lambda: what)
            raise AssertionError(what)

    def phase(self, name: str) -> str | None:
        pod = self.pod(name)
        return None if pod is None else str(pod["status"].get("phase"))

    async def until_phase(self, name: str, phase: str) -> Object:
        await until(lambda: self.phase(name) == phase, WITHIN, lambda: f"{phase}: {self.pod(name)}")
        status: Object = (self.pod(name) or {})["status"]
        return status

    async def runs(self, name: str, *containers: Object, **spec: Any) -> str:
        """Create a pod, as `create` does, which runs; its UID. Raises TimeoutError."""
        uid = await self.create(name, *containers, **spec)
        await self.until_phase(name, "Running")
        return uid

    async def fails(self, name: str, *containers: Object, **spec: Any) -> Object:
        """Create a pod, as `create` does, which fails; its status then. Raises TimeoutError."""
        await self.create(name, *containers, **spec)
        return await self.until_phase(name, "Failed")

    async def until_gone(self, name: str) -> None:
        await self.until(lambda: self.pod(name) is None, f"pod {name} stays")

    def conditions(self, name: str) -> Mapping[str, str]:
        status = (self.pod(name) or {}).get("status", {})
        return {one["type"]: one["status"] for one in status.get("conditions", ())}

    def container_status(self, name: str, container: str = "main") -> Object:
        """What is told of a container, empty before the kubelet has told something."""
        status = (self.pod(name) or {}).get("status", {})
        found = [*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())]
        return next((one for one in found if one["name"] == container), {})

    def state(self, name: str, container: str = "main") -> Object:
        found: Object = self.container_status(name, container).get("state", {})
        return found

    async def until_restarted(self, name: str = "p") -> None:
        def is_again() -> bool:
            found = self.container_status(name)
            return "running" in found.get("state", {}) and found["restartCount"] == 1

        await self.until(is_again, f"{name} is not started again")

    def counted(self) -> tuple[str | None, str | None]:
        """Capacity and allocatable of the resource by the Node's status, as texts."""
        status = self.objects("nodes")[NODE]["status"]
        return status["capacity"].get(self.resource), status["allocatable"].get(self.resource)

    async def until_counted(self, capacity: int, allocatable: int) -> None:
        wanted = (str(capacity), str(allocatable))
        await until(
            lambda: self.counted() == wanted, WITHIN, lambda: f"{self.counted()} is not {wanted}"
        )

    async def get(self, name: str) -> PodResources:
        return await self.resources.get(NAMESPACE, self.known_as(name))

    async def held(self, name: str) -> Held | None:
        """What one pod's containers hold; None: the kubelet does not know it. Raises GRPCError."""
        found = await self.resources.find(NAMESPACE, self.known_as(name))
        if found is None:
            return None
        return {
            one.name: frozenset(text for entry in one.devices for text in entry.device_ids)
            for one in found.containers
        }

    async def until_held(self, name: str, holds: Callable[[Held | None], bool]) -> Held | None:
        """Ask until `holds` of the answer; the answer. Raises TimeoutError, GRPCError."""
        answers: list[Held | None] = []

        async def ask() -> bool:
            answers.append(await self.held(name))
            return holds(answers[-1])

        await until_answer(ask, WITHIN, lambda: f"{name}: {answers[-1:]}")
        return answers[-1]

    async def allocatable(self) -> list[ContainerDevices]:
        return await self.resources.allocatable(self.resource)

    async def until_listed(self, count: int) -> None:
        """Wait until so many ids are healthy. Raises TimeoutError, GRPCError."""

        async def ask() -> bool:
            try:
                entries = await self.allocatable()
            except GRPCError as error:
                if error.status is not Status.RESOURCE_EXHAUSTED:
                    raise
                return False  # a test just used up what all clients together may ask
            return count == len({i for one in entries for i in one.device_ids})

        await until_answer(ask, WITHIN, lambda: f"not {count} ids are healthy")

    @contextlib.asynccontextmanager
    async def plugin(self, count: int = 4) -> AsyncIterator[ProbePlugin]:
        """A registered plugin whose `count` ids are healthy."""
        made = ProbePlugin(self.plugins, resource=self.resource, name="p.sock", count=count)
        async with made as plugin:
            await plugin.register()
            await self.until_listed(count)
            yield plugin

    async def come_back(self, plugin: ProbePlugin, entries: list[Device] | None = None) -> None:
        """Serve and register anew, as a good plugin does after the kubelet's start.

        The end of its old stream, noticed late, would take the new registration with it: a legacy
        kubelet disconnects whoever is there then.
        """
        await plugin.die()
        await self.until_listed(0)
        plugin.devices = devices(len(plugin.devices)) if entries is None else entries
        await plugin.serve()
        await plugin.register()
        healthy = [entry for entry in plugin.devices if entry.health == "Healthy"]
        await self.until_listed(len(healthy))

    @property
    def checkpoint_path(self) -> Path:
        return self.plugins / FILE_NAME

    def checkpoint(self) -> Checkpoint:
        return decode(self.checkpoint_path.read_bytes())


# The kubelet model as a node under test, with a store in the API server's place.

_TICK = 0.25
_QUICK = Timings(
    socket=0.05,
    first_admission=(0.35, 0.4),
    container_restart=(0.2, 0.3),
    container_retry=(1.0, 1.2),
    housekeeping=0.0,
)
"""Tests wait in real time; the real one's figures are the model's own and tested with them."""


class ModelNode(NodeUnderTest):
    """`model` and `store` are public for what only a model can be asked."""

    def __init__(self, root: Path, timings: Timings = _QUICK) -> None:
        plugins, pod_resources = root / "dp", root / "pr"
        super().__init__(plugins, pod_resources / "kubelet.sock", "model")
        self.model = KubeletModel(plugins, pod_resources, LoopClock(), Seeded(), timings=timings)
        self.store = ObjectStore(LoopClock(), Seeded())

    @override
    async def submit(self, pod: Object) -> str:
        uid: str = self.store.create("pods", pod)["metadata"]["uid"]
        return uid

    @override
    async def delete(self, name: str, grace: int = 0) -> None:
        self.store.delete("pods", NAMESPACE, self.known_as(name), grace=grace)

    @override
    def objects(self, resource: str) -> Mapping[str, Object]:
        return {key_of(one): one for one in self.store.select(resource)}

    @override
    async def kill(self) -> None:
        await self.model.kill()

    @override
    async def start(self) -> None:
        await self.model.start()

    @override
    async def end_container(self, name: str, container: str = "main") -> None:
        pod = self.pod(name) or {}
        await self.model.container_died(pod["metadata"]["uid"], container)

    @override
    async def until_leaving(self, name: str) -> None:
        uid = (self.pod(name) or {})["metadata"]["uid"]
        history = self.model.history
        await self.until(
            lambda: any(seen.pod == uid for seen in history.of("leaving")), f"{name} stays"
        )


@contextlib.asynccontextmanager
async def open_model_node(
    root: Path, timings: Timings = _QUICK, status_period: float = _TICK
) -> AsyncIterator[ModelNode]:
    """A started model whose Node is in its store."""
    node = ModelNode(root, timings)
    await node.start()
    try:
        loop = KubeletPodLoop(node.model, node.store, NODE, status_period=status_period)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(loop.run())
            await node.until(lambda: node.store.select("nodes"), "no Node")
            yield node
            running.cancel()
    finally:
        await node.kill()


# Harm that tests do on purpose: containers that die.


def processes(container_id: str) -> frozenset[int]:
    """The processes of a container, as this process counts them; `containerd://` may precede."""
    found, name = set[int](), container_id.rpartition("/")[2]
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            with contextlib.suppress(OSError):
                if name in (directory / "cgroup").read_text():
                    found.add(int(directory.name))
    return frozenset(found)


async def end_container(container_id: str) -> None:
    """SIGKILL for all processes of a container; returns when they are gone."""
    found = processes(container_id)
    if not found:
        raise LookupError(f"{container_id} does not run")
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await until(lambda: not found & processes(container_id), 5.0, lambda: f"{found} live")


# The real kubelet of a cluster as a node under test.

_numbers = itertools.count()


class RealNode(NodeUnderTest):
    """`cluster` is public for what only the real one can be asked."""

    def __init__(self, cluster: Cluster) -> None:
        kubelet = cluster.kubelet
        super().__init__(kubelet.plugins, kubelet.pod_resources, f"r{next(_numbers)}")
        self.cluster = cluster

    @override
    async def submit(self, pod: Object) -> str:
        created = await self.cluster.api.create(PODS, pod)
        uid: str = created["metadata"]["uid"]
        return uid

    @override
    async def delete(self, name: str, grace: int = 0) -> None:
        await self.cluster.api.delete(f"{PODS}/{self.known_as(name)}", grace=grace)

    @override
    def objects(self, resource: str) -> Mapping[str, Object]:
        return {"pods": self.cluster.pods, "nodes": self.cluster.nodes}[resource].objects

    @override
    async def kill(self) -> None:
        await self.cluster.kubelet.part.kill()

    @override
    async def start(self) -> None:
        socket = self.plugins / "kubelet.sock"
        old = _identity(socket)
        await self.cluster.kubelet.part.start()
        tail = self.cluster.kubelet.part.tail
        await until(lambda: _identity(socket) not in {None, old}, 30.0, tail)
        await self.cluster.kubelet.until_serving()

    @override
    async def end_container(self, name: str, container: str = "main") -> None:
        await end_container(self.container_status(name, container)["containerID"])

    @override
    async def until_leaving(self, name: str) -> None:
        words = ('"SyncLoop DELETE"', f'"{key(self.known_as(name))}"')
        await self.cluster.until_kubelet_says(*words, since=0.0)  # its name is this test's own


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns
