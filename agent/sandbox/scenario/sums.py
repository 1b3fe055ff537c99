"""Checks after every answer that no GPU is oversold."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.core.inventory.gpu import Gpu, GpuUuid
from agent.sandbox.kubelet.pods import PodSpec
from agent.sandbox.kubelet.seen import KubeletEvent
from agent.sandbox.lab.cluster import SandboxCluster
from agent.sandbox.scenario.edits import promised
from agent.sandbox.scenario.facts import Answers, answers, parsed

Use = tuple[int, int, int]
"""MiB, percent of compute, slices."""
NONE: Final[Use] = (0, 0, 0)


@dataclass(eq=False, slots=True)
class SumWatch:
    """The greatest use of one GPU so far, and every case in which it was too much."""

    cluster: SandboxCluster
    gpus: Mapping[GpuUuid, Gpu]
    split_count: int
    most: Use = NONE
    checks: int = 0
    problems: list[str] = field(default_factory=list)

    def hear(self, event: KubeletEvent) -> None:
        """Check again after each admission, when the answers are in the kubelet's checkpoint."""
        if event.kind != "admitted":
            return
        self.checks += 1
        try:
            uses = self._uses()
        except ValueError as error:
            self.problems.append(f"an answer cannot be read: {error}")
            return
        for uuid, use in uses.items():
            self.most = _greatest([self.most, use])
            self.problems += self._judged(uuid, use)

    def _judged(self, uuid: GpuUuid, use: Use) -> list[str]:
        gpu = self.gpus.get(uuid)
        if gpu is None:
            return [f"a container was given GPU {uuid or 'without a name'}, which is not here"]
        if use[0] <= (gpu.memory_mib or 0) and use[1] <= 100 and use[2] <= self.split_count:
            return []
        return [f"GPU {gpu.index} was promised {use[0]} MiB, {use[1]} %, {use[2]} slices"]

    def _uses(self) -> Mapping[GpuUuid, Use]:
        kept = answers(self.cluster)
        total: dict[GpuUuid, Use] = defaultdict(lambda: NONE)
        for uid, pod in self.cluster.kubelet.node.pods.items():
            if pod.admission is not None and pod.admission.admitted:
                for uuid, use in _pod_use(pod.spec, uid, kept).items():
                    total[uuid] = _plus(total[uuid], use)
        return total


def _pod_use(spec: PodSpec, uid: str, kept: Answers) -> Mapping[GpuUuid, Use]:
    """Per GPU: max(peak of init containers beside sidecars before them, sidecars and apps)."""
    uses = [(one.kind, _of(uid, one.name, kept)) for one in spec.containers]
    found: dict[GpuUuid, Use] = {}
    for uuid in {uuid for _, use in uses for uuid in use}:
        peak = lasting = NONE
        for kind, use in uses:
            both = _plus(lasting, use.get(uuid, NONE))
            if kind == "init":
                peak = _greatest([peak, both])
            else:
                lasting = both
        found[uuid] = _greatest([peak, lasting])
    return found


def _of(uid: str, container: str, kept: Answers) -> Mapping[GpuUuid, Use]:
    answer = kept.get((uid, container))
    if answer is None:
        return {}
    return {uuid: (mib, percent, 1) for uuid, (mib, percent) in promised(parsed(answer)).items()}


def _plus(one: Use, other: Use) -> Use:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _greatest(uses: list[Use]) -> Use:
    return max(u[0] for u in uses), max(u[1] for u in uses), max(u[2] for u in uses)
