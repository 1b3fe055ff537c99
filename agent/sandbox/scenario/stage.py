"""What every step works with: the cluster, the record, and waiting with a deadline."""

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

PATIENCE = 10.0
"""Seconds for anything that should take far less."""

KEPT_IDLE = 5.0
"""Seconds of the idle stretch."""


@dataclass(eq=False, slots=True)
class Stage:
    """One run of the scenario. `placed` are the names of pods that run, `ill` the ill GPU."""

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
        """Slices on the GPUs that are well."""
        return (len(self.gpus) - (self.ill is not None)) * self.split_count

    @property
    def now(self) -> float:
        """The loop's time."""
        return asyncio.get_running_loop().time()

    def seen(self, since: float, *kinds: SeenKind) -> list[KubeletEvent]:
        """What the kubelet saw and did from that moment on."""
        events = self.cluster.kubelet.history.of(*kinds)
        return [event for event in events if event.elapsed >= since]

    async def start_agent(self) -> AgentChild:
        """Start an agent and say so."""
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
        """Wait for what the claim needs; `found` says how things are when it does not come.

        An agent that has ended is not waited for.

        Raises:
            Unmet: it did not come; the claim is settled as false.
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
        """Decide a claim; see Record.settle."""
        self.record.settle(claim, measured, problems)

    def measure(self, name: str, seconds: float) -> str:
        """Keep a time and say it."""
        self.record.measured[name] = round(seconds, 6)
        return milliseconds(seconds)


def counted(number: float, thing: str) -> str:
    """A number of things for people: `1 read`, `2 reads`. `thing` forms its plural with an s."""
    return f"{number:g} {thing}" if number == 1 else f"{number:g} {thing}s"


def milliseconds(seconds: float) -> str:
    """A time for people."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
