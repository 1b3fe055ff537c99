"""Checks as each answer arrives that it is already on disk."""

from dataclasses import dataclass, field

from agent.core.cluster.pods import PodUid
from agent.core.errors import StateCorrupt
from agent.core.state.ledger import ContainerKey
from agent.sandbox.kubelet.seen import KubeletEvent
from agent.sandbox.lab.cluster import SandboxCluster
from agent.sandbox.scenario.facts import state_on_disk


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
