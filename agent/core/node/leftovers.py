"""What an agent leaves on its Node when it is gone, and what of it may be taken away.

On one Node, where no plugin serves, every report is untrue, whoever wrote it, and may go. Of all
Nodes HAMi's plugin may just be starting again, so `metadata.managedFields` decide as well: an agent
must have written the report last, or have taken it over (`mark_of`; no clocks are compared).

Three cases stay hidden. A plugin whose GPUs are all unhealthy reports 0 like one that is gone. So
does one whose resource has another name than the caller was told. A Node that was created without
any metadata has no managedFields, so its annotations stay; kubelets create no such Node.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final

from agent.core.cluster.annotations import CORDON, HANDSHAKE, MUTEX_LOCK, REGISTER, REPORTS, SCORE
from agent.core.health.news import GPU_DEGRADED

OWN: Final = "hami-agent/"
"""Keys below it are the agent's alone."""
REPORT: Final = (REGISTER, SCORE, HANDSHAKE)
OTHERS: Final = {
    MUTEX_LOCK: "it is the lock of HAMi's scheduler",
    CORDON: "an operator wrote it",
}
RESOURCE: Final = "nvidia.com/gpu"
"""What agents serve where nothing else is said."""
CONDITION: Final = f"condition {GPU_DEGRADED}"


def mark_of(reported_by: str) -> str:
    """What the annotation REPORTS says where an agent stands by the report of that writer.

    It names the other one's last write: one that follows it makes the mark untrue.
    """
    return f"after {reported_by}"


@dataclasses.dataclass(frozen=True, slots=True)
class NodeTraces:
    """A Node at one version. `written`: the annotations that an agent was the last to change.

    `condition`: an agent has written the condition GpuDegraded. `last_written`: when an agent last
    changed what is still as it was, in UTC. `reported_by`: who but an agent wrote the register
    annotation last, and when (`codec.managed.other_writer`). `is_kept`: the API server has kept who
    wrote it.
    """

    name: str
    version: str
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    written: frozenset[str] = frozenset()
    condition: bool = False
    last_written: str = ""
    reported_by: str = ""
    is_kept: bool = True

    @property
    def own(self) -> tuple[str, ...]:
        """The annotations that nobody but an agent writes."""
        return tuple(key for key in self.annotations if key.startswith(OWN))

    @property
    def report(self) -> tuple[str, ...]:
        """HAMi's annotations that a device plugin writes."""
        return tuple(key for key in REPORT if key in self.annotations)

    @property
    def is_marked(self) -> bool:
        """True where an agent found another's report true, and nobody has written one since."""
        marked = self.annotations.get(REPORTS)
        return bool(self.reported_by) and marked == mark_of(self.reported_by)

    @property
    def is_answered(self) -> bool:
        """True where another device plugin has written the handshake since."""
        # A plugin reports; what the scheduler answers to that says nothing of who reported.
        reported = self.annotations.get(HANDSHAKE, "").startswith("Reported")
        return reported and HANDSHAKE not in self.written

    @property
    def is_ours(self) -> bool:
        """True where the report is an agent's, and nobody followed."""
        return (REGISTER in self.written or self.is_marked) and not self.is_answered

    @property
    def is_followed(self) -> bool:
        """True where another plugin has reported after all that an agent wrote."""
        return self.reported_by.rpartition(" ")[2] > self.last_written

    @property
    def is_touched(self) -> bool:
        """True where something may be an agent's."""
        return bool(self.own or self.report or self.condition)


@dataclasses.dataclass(frozen=True, slots=True)
class NodeLeftovers:
    """What a Node says of itself.

    `kubelet`: one reports from it. `served`: how much of the resource its kubelet can give away; it
    is 0 soon after the end of a device plugin. `degraded`: it has the condition GpuDegraded.
    """

    kubelet: bool = False
    served: int = 0
    degraded: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class RemovalPlan:
    """What is to be taken off a Node, and what stays, with the reason."""

    keys: tuple[str, ...] = ()
    condition: bool = False
    left: Mapping[str, str] = dataclasses.field(default_factory=dict)


def due(node: NodeTraces, state: NodeLeftovers, *, here: bool) -> RemovalPlan:
    """What is to be taken off the Node.

    Who serves is the judge: beside one who does, nothing is taken of what may be his. `here`: it is
    certain that an agent was on this Node; then what is reported while nobody serves is untrue,
    whoever wrote it. Elsewhere a plugin may just be starting again, and who wrote it decides.
    """
    condition = node.condition or (here and state.degraded)
    if state.served and not node.is_followed:
        found = (*node.own, *node.report, *((CONDITION,) if condition or state.degraded else ()))
        reason = "a device plugin serves the GPUs of this Node, and it may be its own"
        return RemovalPlan(left=dict.fromkeys(found, reason) | _others(node))
    keys = node.own
    if not state.served and (here or node.is_ours):
        keys = (*keys, *node.report)
    stays = [key for key in node.report if key not in keys]
    if state.degraded and not condition:
        stays.append(CONDITION)
    return RemovalPlan(keys, condition, dict.fromkeys(stays, _reason(node)) | _others(node))


def _others(node: NodeTraces) -> dict[str, str]:
    return {key: why for key, why in OTHERS.items() if key in node.annotations}


def _reason(node: NodeTraces) -> str:
    """Why a report is left while nobody serves here."""
    if REGISTER in node.annotations and not node.is_kept:
        return "the API server has not kept who wrote it"
    if node.reported_by:
        writer, _, when = node.reported_by.rpartition(" ")
        return f"{writer} was the last to report, at {when}"
    if node.is_answered:
        return f"another device plugin has written {HANDSHAKE} after the agent"
    return "there is no report of an agent's with it"


@dataclasses.dataclass(frozen=True, slots=True)
class Cleaned:
    """What became of one Node. `left`: what stays, with the reason.

    `failure`: why something of an agent's is left; `silent`: because the API server is.
    """

    node: str
    removed: tuple[str, ...] = ()
    left: Mapping[str, str] = dataclasses.field(default_factory=dict)
    failure: str = ""
    silent: bool = False

    @property
    def is_bare(self) -> bool:
        """True where nothing was found that an agent may have written."""
        return not self.removed and not self.failure and not self.left.keys() - OTHERS.keys()


@dataclasses.dataclass(frozen=True, slots=True)
class Agents:
    """The pods of the agents: those of a namespace with these labels, as Kubernetes writes them.

    `resource` is what they serve.
    """

    namespace: str
    selector: str
    resource: str = RESOURCE


@dataclasses.dataclass(frozen=True, slots=True)
class LeftoverOutcome:
    """Of all Nodes. `occupied`: those not touched, each with the agent's pod that does not end.

    `unreached`: those that were not come to, for the API server has fallen silent.
    """

    nodes: tuple[Cleaned, ...] = ()
    occupied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unreached: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Nothing of an agent's is left on any Node."""
        return not self.occupied and not any(one.failure for one in self.nodes)

    @property
    def is_silent(self) -> bool:
        """The API server has fallen silent on the way."""
        return any(one.silent for one in self.nodes)
