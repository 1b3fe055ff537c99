"""The node's pods as the kubelet reads and runs them, and the log of what it does with them."""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from agent.kube.objects import decode_whole
from agent.sandbox.store import Json

ContainerKind = Literal["init", "sidecar", "app"]
"""`init` ends before the next one starts; a `sidecar` is an init container that keeps running."""

ContainerKey = tuple[str, str]
"""Pod UID and container name."""


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """One container; `limits` holds its extended resources only."""

    name: str
    kind: ContainerKind
    limits: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PodSpec:
    """One pod; `containers` are the init containers in spec order, then the app containers."""

    uid: str
    namespace: str
    name: str
    created: str
    containers: tuple[ContainerSpec, ...]
    node_selector: Mapping[str, str]

    @property
    def full_name(self) -> tuple[str, str]:
        """Namespace and name, by which PodResources identifies a pod."""
        return self.namespace, self.name

    @property
    def apps(self) -> list[ContainerSpec]:
        """The app containers."""
        return [container for container in self.containers if container.kind == "app"]

    def request(self, resource: str) -> int:
        """The amount that the scheduler counts: max(peak of the init phase, sum of the others)."""
        staying, peak = 0, 0
        for container in self.containers:
            asked = container.limits.get(resource, 0)
            if container.kind == "init":
                peak = max(peak, staying + asked)
            else:
                staying += asked
        return max(peak, staying)


def read_pod(pod: Json) -> PodSpec:
    """Read a Pod object as the API server stores it. Raises KeyError: it is not one.

    A limit that is no whole number is ignored; the real API server refuses the pod.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    first = [_read_container(c, is_init=True) for c in spec.get("initContainers") or ()]
    then = [_read_container(c, is_init=False) for c in spec["containers"]]
    return PodSpec(
        uid=metadata["uid"],
        namespace=metadata.get("namespace", "default"),
        name=metadata["name"],
        created=metadata.get("creationTimestamp", ""),
        containers=(*first, *then),
        node_selector=dict(spec.get("nodeSelector") or {}),
    )


def _read_container(container: Json, *, is_init: bool) -> ContainerSpec:
    kind: ContainerKind = "app"
    if is_init:
        kind = "sidecar" if container.get("restartPolicy") == "Always" else "init"
    limits = (container.get("resources") or {}).get("limits") or {}
    counts = {name: decode_whole(str(text)) for name, text in limits.items() if "/" in name}
    whole = {name: count for name, count in counts.items() if count is not None}
    return ContainerSpec(container["name"], kind, whole)


@dataclass(frozen=True, slots=True)
class KubeletAdmission:
    """The kubelet's verdict on a pod."""

    admitted: bool
    reason: str = ""
    message: str = ""


@dataclass(slots=True)
class NodePod:
    """One pod of the node.

    `waiting`: container → why it cannot be created. `starts`: container → number of starts.
    `began`, `ended`: container → loop time of its latest start and end.
    `has_cgroup`: the kubelet has begun to start it since the boot.
    """

    spec: PodSpec
    admission: KubeletAdmission | None = None
    running: set[str] = field(default_factory=set)
    waiting: dict[str, str] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    is_initialised: bool = False
    has_cgroup: bool = False

    @property
    def is_rejected(self) -> bool:
        """Whether the kubelet has rejected it."""
        return self.admission is not None and not self.admission.admitted

    def begin(self, name: str) -> None:
        """Note that a container starts."""
        self.starts[name] = self.starts.get(name, 0) + 1
        self.began[name] = asyncio.get_running_loop().time()
        self.running.add(name)

    def end(self, name: str) -> None:
        """Note that a container has ended."""
        self.running.discard(name)
        self.ended[name] = asyncio.get_running_loop().time()

    def stop(self) -> None:
        """End all containers."""
        for name in tuple(self.running):
            self.end(name)
        self.waiting.clear()


@dataclass(slots=True)
class KubeletNode:
    """The node. `labels` and `published` (allocatable) are as the API server's Node has them."""

    pods: dict[str, NodePod] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    published: dict[str, int] = field(default_factory=dict)

    def in_order(self, chance: random.Random) -> list[str]:
        """UIDs in order of admission: by creation in whole seconds, at random within one."""
        keys = {uid: (pod.spec.created, chance.random()) for uid, pod in self.pods.items()}
        return sorted(keys, key=keys.__getitem__)

    def running(self) -> frozenset[ContainerKey]:
        """The running containers."""
        return frozenset((uid, name) for uid, pod in self.pods.items() for name in pod.running)

    def stop_all(self) -> None:
        """Stop all containers, as a reboot does. Init containers have to run again."""
        for pod in self.pods.values():
            pod.stop()
            pod.is_initialised = pod.has_cgroup = False


# A bounded log of the kubelet model's events, with waiting for new ones.

SeenKind = str
"""Of the process: started, panicked, exited. Of a plugin: registered, listed, disconnected. Of a
call to it: preferring, allocating, allocated, allocate_refused. Of a pod: admitted, rejected,
leaving, ended, container_started, container_died, container_waiting, init_ended."""


@dataclass(frozen=True, slots=True)
class KubeletEvent:
    """One event. `elapsed`: loop time in seconds; `ids`: the request; `text`: the refusal."""

    elapsed: float
    kind: SeenKind
    resource: str = ""
    pod: str = ""
    container: str = ""
    ids: tuple[str, ...] = ()
    text: str = ""


class KubeletLog:
    """The last events, oldest first. It survives restarts of the kubelet."""

    def __init__(self) -> None:
        self._events: deque[KubeletEvent] = deque(maxlen=10_000)
        self._noted = asyncio.Event()
        self._listeners: list[Callable[[KubeletEvent], None]] = []

    def note(
        self,
        kind: SeenKind,
        *,
        resource: str = "",
        pod: str = "",
        container: str = "",
        ids: Iterable[str] = (),
        text: str = "",
    ) -> None:
        """Add an event, call the listeners and wake all waiters."""
        elapsed = asyncio.get_running_loop().time()
        event = KubeletEvent(elapsed, kind, resource, pod, container, tuple(ids), text)
        self._events.append(event)
        for listener in self._listeners:
            listener(event)
        noted, self._noted = self._noted, asyncio.Event()
        noted.set()

    def listen(self, listener: Callable[[KubeletEvent], None]) -> None:
        """Call `listener` with every event from now on; it must return at once."""
        self._listeners.append(listener)

    def of(self, *kinds: SeenKind) -> list[KubeletEvent]:
        """The kept events of these kinds."""
        return [event for event in self._events if event.kind in kinds]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()`, checked after every event. The caller sets the deadline."""
        while not holds():
            await self._noted.wait()
