"""Watching that an answer is on disk before it is given: looked at as each answer arrives."""

from dataclasses import dataclass, field

from agent.core.cluster.pods import PodUid
from agent.core.errors import StateCorrupt
from agent.core.state.ledger import ContainerKey
from agent.sandbox.kubelet.seen import KubeletEvent
from agent.sandbox.lab.cluster import SandboxCluster
from agent.sandbox.scenario.facts import state_on_disk


@dataclass(eq=False, slots=True)
class DiskWatch:
    """How many answers were looked for in the agent's state file, and which were not there."""

    cluster: SandboxCluster
    checks: int = 0
    problems: list[str] = field(default_factory=list)

    def hear(self, event: KubeletEvent) -> None:
        """The kubelet has an answer: its row must be in the file that a killed agent leaves."""
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
