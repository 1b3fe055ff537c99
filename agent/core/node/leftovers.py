"""Decides what an uninstallation removes from a Node.

If no plugin serves on a Node, every report on it is wrong and may be removed. When all Nodes are
cleaned, HAMi's plugin may just be restarting on some. There `metadata.managedFields` decide as
well: an agent must have written the report last, or have taken it over (`mark_of`). No clocks are
compared.

Three cases cannot be detected:

- A plugin whose GPUs are all unhealthy reports 0, like a plugin that is gone.
- A plugin whose resource has another name than the caller passed also reports 0.
- A Node that was created without any metadata has no managedFields, so its annotations stay.
  Kubelets do not create such a Node.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from agent.core.cluster.annotations import CORDON, HANDSHAKE, MUTEX_LOCK, REGISTER, REPORTS, SCORE
from agent.core.health.news import GPU_DEGRADED

OWN: Final = "hami-agent/"
"""The prefix of the annotations that only agents write."""
REPORT: Final = (REGISTER, SCORE, HANDSHAKE)
OTHERS: Final = {
    MUTEX_LOCK: "it is the lock of HAMi's scheduler",
    CORDON: "an operator wrote it",
}
RESOURCE: Final = "nvidia.com/gpu"
"""The resource that agents serve by default."""
CONDITION: Final = f"condition {GPU_DEGRADED}"


def mark_of(reported_by: str) -> str:
    """The value of the annotation REPORTS when an agent takes over the report of another writer.

    It names that writer's last write, so a later write of another makes the mark invalid.
    """
    return f"after {reported_by}"


class NodeTraces(msgspec.Struct, frozen=True):
    """A Node at one version.

    - `written`: the annotations that an agent changed last.
    - `condition`: an agent has written the condition GpuDegraded.
    - `last_written`: when an agent last wrote a value that is still there, in UTC.
    - `reported_by`: the writer other than an agent that last wrote the register annotation, and
      when (`codec.managed.other_writer`).
    - `is_kept`: the API server knows the writer of the register annotation.
    """

    name: str
    version: str
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    written: frozenset[str] = frozenset()
    condition: bool = False
    last_written: str = ""
    reported_by: str = ""
    is_kept: bool = True

    @property
    def own(self) -> tuple[str, ...]:
        """The annotations that only agents write."""
        return tuple(key for key in self.annotations if key.startswith(OWN))

    @property
    def report(self) -> tuple[str, ...]:
        """HAMi's annotations that a device plugin writes."""
        return tuple(key for key in REPORT if key in self.annotations)

    @property
    def is_marked(self) -> bool:
        """True if an agent took over another writer's report and none was written since."""
        marked = self.annotations.get(REPORTS)
        return bool(self.reported_by) and marked == mark_of(self.reported_by)

    @property
    def is_answered(self) -> bool:
        """True if another device plugin has written the handshake since."""
        # Plugins write "Reported". Other values are the scheduler's and do not name the reporter.
        reported = self.annotations.get(HANDSHAKE, "").startswith("Reported")
        return reported and HANDSHAKE not in self.written

    @property
    def is_ours(self) -> bool:
        """True if the report is an agent's and no other plugin reported since."""
        return (REGISTER in self.written or self.is_marked) and not self.is_answered

    @property
    def is_followed(self) -> bool:
        """True if another plugin reported after the last write of an agent."""
        return self.reported_by.rpartition(" ")[2] > self.last_written

    @property
    def is_touched(self) -> bool:
        """True if something on the Node may be an agent's."""
        return bool(self.own or self.report or self.condition)


class NodeLeftovers(msgspec.Struct, frozen=True):
    """The status of a Node.

    - `kubelet`: its kubelet reports.
    - `served`: the allocatable amount of the resource. It is 0 soon after a device plugin ends.
    - `degraded`: it has the condition GpuDegraded.
    """

    kubelet: bool = False
    served: int = 0
    degraded: bool = False


class RemovalPlan(msgspec.Struct, frozen=True):
    """What to remove from a Node, and what stays, with the reason."""

    keys: tuple[str, ...] = ()
    condition: bool = False
    left: Mapping[str, str] = msgspec.field(default_factory=dict)


def due(node: NodeTraces, state: NodeLeftovers, *, here: bool) -> RemovalPlan:
    """Decide what to remove from the Node.

    While a plugin serves, nothing that may be its own is removed. `here`: an agent certainly was on
    this Node, so a report is wrong when no plugin serves. Otherwise a plugin may just be
    restarting, and the writer of the report decides.
    """
    condition = node.condition or (here and state.degraded)
    others = {key: why for key, why in OTHERS.items() if key in node.annotations}
    if state.served and not node.is_followed:
        found = (*node.own, *node.report, *((CONDITION,) if condition or state.degraded else ()))
        reason = "a device plugin serves the GPUs of this Node and may have written it"
        return RemovalPlan(left=dict.fromkeys(found, reason) | others)
    keys = node.own
    if not state.served and (here or node.is_ours):
        keys = (*keys, *node.report)
    stays = [key for key in node.report if key not in keys]
    if state.degraded and not condition:
        stays.append(CONDITION)
    reason = "the Node has no report of an agent"
    if REGISTER in node.annotations and not node.is_kept:
        reason = "the API server does not know who wrote it"
    elif node.reported_by:
        writer, _, when = node.reported_by.rpartition(" ")
        reason = f"{writer} wrote the last report, at {when}"
    elif node.is_answered:
        reason = f"another device plugin has written {HANDSHAKE} after the agent"
    return RemovalPlan(keys, condition, dict.fromkeys(stays, reason) | others)


class Cleaned(msgspec.Struct, frozen=True):
    """The result for one Node. `left`: what stays, with the reason.

    `failure`: why something of an agent's is left. `silent`: the API server did not answer.
    """

    node: str
    removed: tuple[str, ...] = ()
    left: Mapping[str, str] = msgspec.field(default_factory=dict)
    failure: str = ""
    silent: bool = False

    @property
    def is_bare(self) -> bool:
        """True if the Node had nothing that an agent may have written."""
        return not self.removed and not self.failure and not self.left.keys() - OTHERS.keys()


class Agents(msgspec.Struct, frozen=True):
    """The agents' pods, by namespace and label selector. `resource`: the resource they serve."""

    namespace: str
    selector: str
    resource: str = RESOURCE


class LeftoverOutcome(msgspec.Struct, frozen=True):
    """The result for all Nodes.

    `occupied`: the Nodes left alone, each with the agent's pod that does not end. `unreached`: the
    Nodes left alone because the API server stopped answering.
    """

    nodes: tuple[Cleaned, ...] = ()
    occupied: Mapping[str, str] = msgspec.field(default_factory=dict)
    unreached: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Nothing of an agent's is left on any Node."""
        return not self.occupied and not any(node.failure for node in self.nodes)

    @property
    def is_silent(self) -> bool:
        """The API server stopped answering."""
        return any(node.silent for node in self.nodes)
