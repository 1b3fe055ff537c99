"""The pods bound to the node and the running containers, which outlive the kubelet process."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.sandbox.kubelet.pods import ContainerKey, PodSpec
from agent.wire.v1beta1 import ContainerAllocateResponse


@dataclass(frozen=True, slots=True)
class KubeletAdmission:
    """The kubelet's verdict on a pod; `containers` are the merged answers of its plugins."""

    admitted: bool
    reason: str = ""
    message: str = ""
    containers: Mapping[str, ContainerAllocateResponse] = field(default_factory=dict)


@dataclass(slots=True)
class NodePod:
    """One pod of the node.

    `waiting`: container → why it cannot be created. `starts`: container → number of starts.
    `has_cgroup`: the kubelet has begun to start it since the boot.
    """

    spec: PodSpec
    admission: KubeletAdmission | None = None
    running: set[str] = field(default_factory=set)
    waiting: dict[str, str] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    is_initialised: bool = False
    has_cgroup: bool = False
    _verdicts: list[asyncio.Future[KubeletAdmission]] = field(default_factory=list)

    @property
    def is_rejected(self) -> bool:
        """Whether the kubelet has rejected it."""
        return self.admission is not None and not self.admission.admitted

    async def verdict(self) -> KubeletAdmission:
        """Wait for the next verdict, from any kubelet process."""
        future: asyncio.Future[KubeletAdmission] = asyncio.get_running_loop().create_future()
        self._verdicts.append(future)
        return await future

    def settle(self, admission: KubeletAdmission) -> None:
        """Set the verdict. A rejection kills the running containers of the pod."""
        self.admission = admission
        if not admission.admitted:
            self.running.clear()
            self.waiting.clear()
        verdicts, self._verdicts = self._verdicts, []
        for future in verdicts:
            if not future.done():
                future.set_result(admission)


@dataclass(slots=True)
class KubeletNode:
    """The node. `labels` and `published` (allocatable) are as the API server's Node has them."""

    pods: dict[str, NodePod] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    published: dict[str, int] = field(default_factory=dict)

    def add(self, spec: PodSpec) -> NodePod:
        """Bind a pod to the node. A known pod stays as it is."""
        return self.pods.setdefault(spec.uid, NodePod(spec))

    def remove(self, uid: str) -> None:
        """Remove a pod that has ended."""
        pod = self.pods.pop(uid, None)
        if pod is not None and pod.admission is None:
            pod.settle(
                KubeletAdmission(admitted=False, message="the pod ended before it was admitted")
            )

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
            pod.running.clear()
            pod.waiting.clear()
            pod.is_initialised = pod.has_cgroup = False
