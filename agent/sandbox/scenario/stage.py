"""The stage that every step gets: the cluster, the record, and waiting with a deadline."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from agent.core.inventory.gpu import Gpu, GpuUuid
from agent.sandbox.kubelet.seen import KubeletEvent, SeenKind
from agent.sandbox.lab.child import AgentChild
from agent.sandbox.lab.cluster import SandboxCluster
from agent.sandbox.scenario.disk_first import DiskWatch
from agent.sandbox.scenario.record import ScenarioRecord, Unmet
from agent.sandbox.scenario.sums import SumWatch

PATIENCE = 20.0
"""Seconds for a wait that should be much shorter. A busy machine may need them for a start."""

KEPT_IDLE = 5.0
"""The length of the idle step in seconds."""


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
        self.record.awaited = self.record.promised[claim]
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
