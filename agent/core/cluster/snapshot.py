"""The part of a cluster that explains one pod: the pod, the nodes, who holds GPUs, quotas, Events.

It keeps of 5,000 Nodes and their pods only what a decision uses.
"""

import datetime as dt
from collections.abc import Mapping
from typing import Any

import msgspec

JsonObject = Mapping[str, Any]


class Taint(msgspec.Struct, frozen=True):
    """A taint of a Node."""

    key: str
    value: str
    effect: str


class ClusterNode(msgspec.Struct, frozen=True):
    """A Node as the schedulers see it.

    - `annotations`: those of HAMi.
    - `slices`: the allocatable slices that its kubelet offers.
    - `reported`: when register annotation, cordon or handshake were last written; None if it is not
      known.
    """

    name: str
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    is_closed: bool = False
    is_ready: bool = True
    slices: int = 0
    reported: dt.datetime | None = None


class GpuHolder(msgspec.Struct, frozen=True):
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


class PodEventView(msgspec.Struct, frozen=True):
    """An Event about the pod. `last`: the last time; None if it cannot be read."""

    kind: str
    reason: str
    message: str
    writer: str
    last: dt.datetime | None
    count: int = 1


class AgentPod(msgspec.Struct, frozen=True):
    """A pod of the agent. `state`: `Ready`, else what it waits for in the kubelet's words."""

    node: str
    name: str
    state: str


class RefusedPod(msgspec.Struct, frozen=True):
    """A pod that the kubelet failed at its admission. `message`: the kubelet's.

    `at`: when the kubelet saw the pod, else when it was created; None if neither can be read.
    """

    namespace: str
    name: str
    node: str
    message: str
    at: dt.datetime | None


class HeldUse(msgspec.Struct, frozen=True):
    """What a container of the pod uses of one GPU, as the agent of its node says.

    `used_mib` and `last_kernel` are None if they are not known.
    """

    container: str
    uuid: str
    used_mib: int | None
    last_kernel: dt.datetime | None


class Unread(msgspec.Struct, frozen=True):
    """A part of the cluster that could not be read: what, and why in one sentence."""

    part: str
    why: str


class ClusterSnapshot(msgspec.Struct, frozen=True):
    """All parts as they were read, in this order: nodes, holders, quotas, Events.

    A part that is listed in `unread` is empty. `taken`: when the pod was read. `agents`: those pods
    of agents that were asked for; none for agents that are no pods. `uses`: of a running pod;
    `use_unread`: why its node's agent did not say.
    """

    pod: JsonObject
    taken: dt.datetime
    nodes: tuple[ClusterNode, ...] = ()
    holders: tuple[GpuHolder, ...] = ()
    quotas: tuple[JsonObject, ...] = ()
    events: tuple[PodEventView, ...] = ()
    unread: tuple[Unread, ...] = ()
    agents: tuple[AgentPod, ...] = ()
    uses: tuple[HeldUse, ...] = ()
    use_unread: str = ""

    def has(self, part: str) -> bool:
        """Whether this part (nodes, pods, resourcequotas, events, agents) was read."""
        return all(unread.part != part for unread in self.unread)
