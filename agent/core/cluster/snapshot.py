"""The part of a cluster that explains one pod: the pod, the nodes, who holds GPUs, quotas, Events.

It keeps of 5,000 Nodes and their pods only what a decision uses.
"""

import dataclasses
import datetime as dt
from collections.abc import Mapping
from typing import Any

JsonObject = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Taint:
    """A taint of a Node."""

    key: str
    value: str
    effect: str


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterNode:
    """A Node as the schedulers see it.

    - `annotations`: those of HAMi.
    - `slices`: the allocatable slices that its kubelet offers.
    - `reported`: when register annotation, cordon or handshake were last written; None if it is not
      known.
    """

    name: str
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    is_closed: bool = False
    is_ready: bool = True
    slices: int = 0
    reported: dt.datetime | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class GpuHolder:
    """A pod for which HAMi's scheduler has chosen GPUs. `shares`: its devices annotation."""

    uid: str
    namespace: str
    name: str
    node: str
    shares: str
    phase: str
    inits: int = 0
    has_passed_init: bool = False
    is_deleted: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class PodEventView:
    """An Event about the pod. `last`: the last time; None if it cannot be read."""

    kind: str
    reason: str
    message: str
    writer: str
    last: dt.datetime | None
    count: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class AgentPod:
    """A pod of the agent. `state`: `Ready`, else what it waits for in the kubelet's words."""

    node: str
    name: str
    state: str


@dataclasses.dataclass(frozen=True, slots=True)
class RefusedPod:
    """A pod that the kubelet failed at its admission. `message`: the kubelet's.

    `at`: when the kubelet saw the pod, else when it was created; None if neither can be read.
    """

    namespace: str
    name: str
    node: str
    message: str
    at: dt.datetime | None


@dataclasses.dataclass(frozen=True, slots=True)
class Unread:
    """A part of the cluster that could not be read: what, and why in one sentence."""

    part: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All parts as they were read, in this order: nodes, holders, quotas, Events.

    A part that is listed in `unread` is empty. `taken`: when the pod was read. `agents`: those pods
    of agents that were asked for; none for agents that are no pods.
    """

    pod: JsonObject
    taken: dt.datetime
    nodes: tuple[ClusterNode, ...] = ()
    holders: tuple[GpuHolder, ...] = ()
    quotas: tuple[JsonObject, ...] = ()
    events: tuple[PodEventView, ...] = ()
    unread: tuple[Unread, ...] = ()
    agents: tuple[AgentPod, ...] = ()

    def has(self, part: str) -> bool:
        """Whether this part (nodes, pods, resourcequotas, events, agents) was read."""
        return all(unread.part != part for unread in self.unread)
