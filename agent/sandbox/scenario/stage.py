"""The stage that every step gets: the cluster, the record, and waiting with a deadline.

While the scenario runs, each answer is checked as it arrives: is it on disk, and do the sums fit?
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.cluster import PodUid
from agent.errors import StateCorrupt
from agent.ledger import ContainerKey
from agent.model import Gpu, GpuUuid
from agent.sandbox.kubelet.pods import PodSpec
from agent.sandbox.kubelet.seen import KubeletEvent, SeenKind
from agent.sandbox.lab.child import AgentChild
from agent.sandbox.lab.cluster import SandboxCluster
from agent.sandbox.scenario.facts import Answers, answers, parsed, promised, state_on_disk
from agent.sandbox.scenario.record import ScenarioRecord, Unmet

Use = tuple[int, int, int]
"""MiB, percent of compute, slices."""
NONE: Final[Use] = (0, 0, 0)
PATIENCE = 20.0
"""Seconds for a wait that should be much shorter. A busy machine may need them for a start."""
KEPT_IDLE = 5.0
"""The length of the idle step in seconds."""


@dataclass(eq=False, slots=True)
class DiskWatch:
    """Counts the answers that were checked, and lists those missing in the state file."""

    cluster: SandboxCluster
    checks: int = 0
    problems: list[str] = field(default_factory=list)

    def hear(self, event: KubeletEvent) -> None:
        """When the kubelet gets an answer, check that its row is in the state file."""
        if event.kind != "allocated":
            return
        self.checks += 1
        key = ContainerKey(PodUid(event.pod), event.container)
        try:
            state = state_on_disk(self.cluster)
        except (OSError, StateCorrupt) as error:
            self.problems.append(f"{event.container} of {event.pod}: {error}")
            return
        row = state.ledger.find(key)
        if row is None or sorted(row.slice_ids) != sorted(event.ids):
            self.problems.append(
                f"{event.container} of {event.pod} is not in generation {state.generation}"
            )


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


@dataclass(eq=False, slots=True)
class Stage:
    """One run of the scenario. `placed`: the names of running pods. `ill`: the lost GPU."""

    cluster: SandboxCluster
    record: ScenarioRecord
    gpus: Mapping[GpuUuid, Gpu]
    split_count: int
    sums: SumWatch
    disk: DiskWatch
    placed: list[str] = field(default_factory=list)
    ill: GpuUuid | None = None

    @property
    def slices(self) -> int:
        """The number of slices on healthy GPUs."""
        return (len(self.gpus) - (self.ill is not None)) * self.split_count

    @property
    def now(self) -> float:
        """The loop's time."""
        return asyncio.get_running_loop().time()

    def seen(self, since: float, *kinds: SeenKind) -> list[KubeletEvent]:
        """The kubelet's events since the loop time `since`."""
        events = self.cluster.kubelet.history.of(*kinds)
        return [event for event in events if event.elapsed >= since]

    async def start_agent(self) -> AgentChild:
        """Start an agent and note it."""
        child = await self.cluster.start_agent()
        self.record.note(f"agent started, pid {child.pid}")
        return child

    async def until(
        self,
        claim: str,
        holds: Callable[[], bool],
        found: Callable[[], str],
        within: float = PATIENCE,
    ) -> None:
        """Wait for a condition of the claim. `found` describes the state if it does not come.

        The wait ends early if the agent has ended.

        Raises:
            Unmet: the condition did not come; the claim is false.
        """
        agent = self.cluster.agent
        await self.cluster.until(lambda: holds() or agent.code is not None, within)
        if holds():
            return
        why = (
            f"the agent exited with {agent.code}"
            if agent.code is not None
            else f"not in {within:g} s"
        )
        self.record.settle(claim, "", [f"{why}: {found()}"])
        raise Unmet(claim)

    def settle(self, claim: str, measured: str, problems: Iterable[str] = ()) -> None:
        """Set the result of a claim; see ScenarioRecord.settle."""
        self.record.settle(claim, measured, problems)

    def measure(self, name: str, seconds: float) -> str:
        """Record a measured time, and return it in words."""
        self.record.measured[name] = round(seconds, 6)
        return milliseconds(seconds)


def counted(number: float, thing: str) -> str:
    """A number with its noun: `1 read`, `2 reads`."""
    return f"{number:g} {thing}" if number == 1 else f"{number:g} {thing}s"


def milliseconds(seconds: float) -> str:
    """A time in milliseconds, in words."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
