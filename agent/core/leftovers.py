"""What an agent leaves on its Node when it is gone, and what of it may be taken away."""

import dataclasses
from collections.abc import Mapping
from typing import Final

from agent.core.annotations import CORDON, HANDSHAKE, MUTEX_LOCK, REGISTER, SCORE

OWN: Final = "hami-agent/"
"""Keys below it are the agent's alone."""
REPORT: Final = (REGISTER, SCORE, HANDSHAKE)
OTHERS: Final = {
    MUTEX_LOCK: "it is the lock of HAMi's scheduler",
    CORDON: "an operator wrote it",
}


@dataclasses.dataclass(frozen=True, slots=True)
class NodeTraces:
    """A Node at one version. `written`: the annotations that an agent was the last to change.

    `condition`: an agent has written the condition GpuDegraded.
    """

    name: str
    version: str
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    written: frozenset[str] = frozenset()
    condition: bool = False

    @property
    def ours(self) -> tuple[str, ...]:
        """The annotations to take away.

        Another device plugin may have followed: what it wrote since is its own.
        """
        own = [key for key in self.annotations if key.startswith(OWN)]
        # A plugin reports; what the scheduler answers to that says nothing of who reported.
        reported = self.annotations.get(HANDSHAKE, "").startswith("Reported")
        followed = reported and HANDSHAKE not in self.written
        if REGISTER in self.written and not followed:
            own += [key for key in REPORT if key in self.annotations]
        return tuple(own)

    @property
    def others(self) -> Mapping[str, str]:
        """The annotations of HAMi's that stay, each with the reason."""
        taken = self.ours
        theirs = (
            dict.fromkeys(REPORT, "the API server knows it as somebody else's, who wrote it since")
            | OTHERS
        )
        return {
            key: why for key, why in theirs.items() if key in self.annotations and key not in taken
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Cleaned:
    """What became of one Node. `left`: what stays, with the reason.

    `failure`: why something of an agent's is left.
    """

    node: str
    removed: tuple[str, ...] = ()
    left: Mapping[str, str] = dataclasses.field(default_factory=dict)
    failure: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Agents:
    """The pods of the agents: those of a namespace with these labels, as Kubernetes writes them."""

    namespace: str
    selector: str


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Of all Nodes. `occupied`: those not touched, each with the agent's pod that does not end."""

    nodes: tuple[Cleaned, ...] = ()
    occupied: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Nothing of an agent's is left on any Node."""
        return not self.occupied and not any(one.failure for one in self.nodes)
