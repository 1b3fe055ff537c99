"""Pods in a row, each through the scheduler's model and the kubelet's, and what each was given."""

import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from agent.model import Gpu, GpuUuid
from agent.sandbox.api_errors import NotFoundError
from agent.sandbox.kubelet.seen import KubeletEvent
from agent.sandbox.lab.cluster import NAMESPACE, SandboxCluster
from agent.sandbox.scenario.facts import answers, differences, is_locked, is_running, pod_facts
from agent.sandbox.scenario.workloads import Wish, Workload

PODS: Final = 20
"""In a row, before an attack and in it."""
LOOK: Final = 5
"""After so many pods something else is looked at."""
PATIENCE: Final = 20.0
"""Seconds for one pod that takes a tenth of one."""
GONE: Final = 30.0
"""Seconds for the pods of one round to be over."""


@dataclasses.dataclass(eq=False, slots=True)
class Pods:
    """Makes pods that want a share of one GPU and times what the kubelet waits for the agent."""

    cluster: SandboxCluster
    gpus: dict[GpuUuid, Gpu]
    began: dict[str, float] = dataclasses.field(default_factory=dict)
    took: dict[str, float] = dataclasses.field(default_factory=dict)
    numbers: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))

    def hear(self, event: KubeletEvent) -> None:
        """Allocate calls, as the kubelet saw them."""
        if event.kind == "allocating":
            self.began[event.pod] = event.elapsed
        elif event.kind == "allocated":
            self.took[event.pod] = event.elapsed - self.began[event.pod]

    async def row(
        self, look: Callable[[], Awaitable[None]], served: Callable[[], None] = lambda: None
    ) -> list[float]:
        """So many pods, one after the other, each served; the seconds of each Allocate.

        `look` is called now and then between them, `served` after each.
        """
        names = [f"pod-{next(self.numbers)}" for _ in range(PODS)]
        delays = []
        for number, name in enumerate(names):
            delays.append(await self.one(name))
            served()
            if number % LOOK == 0:
                await look()
            self.delete(name)
        assert await self.cluster.until(lambda: not any(map(self.exists, names)), GONE)
        return delays

    async def one(self, name: str) -> float:
        """One pod, served as the scheduler said; the seconds that its Allocate took."""
        cluster, number = self.cluster, next(self.numbers)
        wish = Wish("main", 1, 512 + number % 97, core_percent=1 + number % 7)
        cluster.submit(Workload(name, "", (wish,)).pod())
        await cluster.until(lambda: self.is_served(name) or self.has_failed(name), PATIENCE)
        assert self.is_served(name), self.why(name)
        pod = pod_facts(cluster, name)
        assert [] == differences(pod, answers(cluster), self.gpus, cluster.places)
        (share,) = pod.shares()["main"]
        assert (wish.memory_mib, wish.core_percent) == (share.memory_mib, share.core_percent)
        leaf = cluster.places.hook / "vgpu" / "containers" / f"{pod.uid}_main"
        assert (0, []) == (leaf.stat().st_uid, list(leaf.iterdir()))
        return self.took[pod.uid]

    def is_served(self, name: str) -> bool:
        """It runs, the scheduler was told, and the node is free for the next one."""
        cluster = self.cluster
        return (
            is_running(cluster, name)
            and pod_facts(cluster, name).is_settled
            and not is_locked(cluster)
        )

    async def tried(self, patience: float = PATIENCE) -> str:
        """One pod, whatever becomes of it: empty when it was served, else why it was not.

        One that no slice is on offer for waits, and is deleted; so is one that waits for long.
        """
        cluster, name = self.cluster, f"pod-{next(self.numbers)}"
        cluster.submit(Workload(name, "", (Wish("main", 1, 512),)).pod())

        def is_over() -> bool:
            return self.is_served(name) or self.has_failed(name) or not cluster.allocatable()

        await cluster.until(is_over, patience)
        served, why = self.is_served(name), self.why(name)
        self.delete(name)
        return "" if served else why

    def has_failed(self, name: str) -> bool:
        """The kubelet has rejected it."""
        return pod_facts(self.cluster, name).phase == "Failed"

    def why(self, name: str) -> str:
        """What is known of a pod that was not served."""
        pod = pod_facts(self.cluster, name)
        said = self.cluster.log.last(12)
        return "\n".join([f"{name} is {pod.phase}: {pod.reason}", f"{pod.notes}", *said])

    def delete(self, name: str) -> None:
        """As a user does."""
        self.cluster.store.delete("pods", NAMESPACE, name)

    def exists(self, name: str) -> bool:
        """Whether the API server has it."""
        try:
            self.cluster.pod(name)
        except NotFoundError:
            return False
        return True
