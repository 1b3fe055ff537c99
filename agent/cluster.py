"""Pods, the Node and its lock as the agent sees them, and what it changes there."""

import datetime as dt
import enum
import re
from collections.abc import Mapping
from typing import Final, NewType

import msgspec

from agent.errors import MalformedText, cap
from agent.model import Share

# Keys and values of HAMi's annotations. They are HAMi's contract: none may be renamed.
# Source: HAMi pkg/util/types.go and pkg/device/nvidia/device.go, v2.4.0 to v2.10.0.

# On the Node.
REGISTER = "hami.io/node-nvidia-register"  # the inventory: the agent writes, the scheduler reads it
SCORE = "hami.io/node-nvidia-score"  # the points of each pair of GPUs, for placing by topology
HANDSHAKE = "hami.io/node-handshake"  # a stamp: makes the scheduler read the inventory again
MUTEX_LOCK = "hami.io/mutex.lock"  # the scheduler's lock, from Bind until the pod's last answer
CORDON = "hami.io/device-cordon"  # GPUs that an operator excludes; the agent never writes it

# On the pod.
TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"  # the groups that no device plugin has served yet
ALLOCATED = "hami.io/vgpu-devices-allocated"  # all groups: no device plugin removes any
BIND_PHASE = "hami.io/bind-phase"
BIND_TIME = "hami.io/bind-time"  # in Unix seconds of the scheduler's clock
VGPU_NODE = "hami.io/vgpu-node"  # the node that the scheduler chose
VGPU_TIME = "hami.io/vgpu-time"  # when it chose the node, in Unix seconds

PHASE_ALLOCATING, PHASE_SUCCESS, PHASE_FAILED = "allocating", "success", "failed"

TEXT_LIMIT = 256 * 1024
"""Bytes. Kubernetes allows 256 KiB for all annotations of an object together."""

MIRROR = "kubernetes.io/config.mirror"
"""On the pod: it is the mirror of a static pod, which the kubelet reads from a file."""


# Pods and the Node, reduced to the fields that the agent uses.

PodUid = NewType("PodUid", str)

NOT_HERE: Final = PodUid("")
"""No pod; the result of a GET of one that is gone, or that this node may not read."""
NOT_WHOLE: Final = -1
"""The amount of a resource that is not a whole number."""
DEFAULT_PRIORITY: Final = 1
"""The priority of a container without CUDA_TASK_PRIORITY; a smaller number goes first."""
CORE_POLICY_ENV: Final = "GPU_CORE_UTILIZATION_POLICY"

_UNREACHED: Final = re.compile(r"(?:^|[-.])(?:gvisor|runsc|kata)")
"""Runtime classes by their usual names: what a RuntimeClass leads to is not read."""

PodKey = tuple[str, str]
"""Namespace and name of a pod. PodResources and the node lock have no more."""


class Phase(enum.StrEnum):
    """status.phase of a pod."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


class Role(enum.StrEnum):
    """The kind of a container in its pod."""

    INIT = "init"
    SIDECAR = "sidecar"
    """A restartable init container."""
    APP = "app"


class ContainerView(msgspec.Struct, frozen=True):
    """One container that requests `count` slices of `resource` (0: none).

    - `others`: the amounts of its other extended resources (-1: not a whole number), which say what
      of a GPU it asks for. The agent's resource may get another name.
    - `control_disabled`: a literal env CUDA_DISABLE_CONTROL that Go's ParseBool reads as true.
    - `running_id`: the runtime's id while its status is running. `has_run`: it was created.
    - `started_at`: when it last started. `ended_at`: set if the kubelet never starts it again.
    - `succeeded`: it ended with exit code 0 at least once.
    - `priority`: its literal env CUDA_TASK_PRIORITY as HAMi-core reads it.
    - `core_policy`: its literal env GPU_CORE_UTILIZATION_POLICY; empty: the answer's counts.
    """

    name: str
    role: Role
    count: int
    control_disabled: bool = False
    running_id: str | None = None
    has_run: bool = False
    started_at: dt.datetime | None = None
    ended_at: dt.datetime | None = None
    succeeded: bool = False
    priority: int = DEFAULT_PRIORITY
    core_policy: str = ""
    resource: str = "nvidia.com/gpu"
    others: tuple[tuple[str, int], ...] = ()

    def asking_by(self, resource: str) -> "ContainerView":
        """The same container, counted by that name of the agent's resource."""
        asked = dict(self.others)
        if self.count:
            asked[self.resource] = self.count
        count = asked.pop(resource, 0)
        return msgspec.structs.replace(
            self, count=max(0, count), resource=resource, others=tuple(sorted(asked.items()))
        )


class PodView(msgspec.Struct, frozen=True):
    """One pod bound to this node.

    - `containers`: init containers and sidecars first, then apps, each in the order of the spec.
    - `annotations`: only the keys of hami.io/. `static`: it is the mirror of a static pod.
    - `scheduled`: it has the condition PodScheduled. A Binding sets it, and so does the kubelet
      when it has admitted the pod. A pod that was created with its node lacks it until then, and
      its author cannot write it. `started`: a kubelet has written status.startTime, because it
      admitted or rejected the pod.
    - `reusable_name`: its name was not generated, so a later pod can have the same name.
    - `reason`: status.reason, for example `UnexpectedAdmissionError`.
    - `groups`: the decoded `…-devices-allocated`; None if it is absent or could not be decoded, for
      the reason `groups_error`.
    """

    uid: PodUid
    namespace: str
    name: str
    node: str
    phase: Phase
    created: dt.datetime
    containers: tuple[ContainerView, ...]
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    static: bool = False
    scheduled: bool = False
    started: bool = False
    scheduler: str = ""
    runtime_class: str = ""
    reusable_name: bool = False
    reason: str = ""
    message: str = ""
    resource_version: str = ""
    groups: tuple[tuple[Share, ...], ...] | None = None
    groups_error: str = ""

    @property
    def key(self) -> PodKey:
        """How the kubelet and the node lock name the pod."""
        return self.namespace, self.name

    @property
    def title(self) -> str:
        """Its name for messages."""
        return f"{self.namespace}/{self.name}"

    @property
    def terminal(self) -> bool:
        """True once none of its containers will run again."""
        return self.phase in {Phase.SUCCEEDED, Phase.FAILED}

    @property
    def has_run(self) -> bool:
        """True once one of its containers was started."""
        return any(each.has_run or each.running_id is not None for each in self.containers)

    @property
    def is_past_init(self) -> bool:
        """Whether all ordinary init containers have succeeded, even if they run again.

        If an app container was created they have, although the kubelet can lose their states.
        """
        return any(each.has_run for each in self.containers if each.role is Role.APP) or all(
            each.succeeded for each in self.containers if each.role is Role.INIT
        )

    @property
    def gpu_containers(self) -> tuple[ContainerView, ...]:
        """The containers that request slices of the agent's resource, in admission order."""
        return tuple(c for c in self.containers if c.count > 0)

    def unkept(self, container: str) -> str:
        """Why nothing keeps the limits of that container, one clause; empty: HAMi-core does."""
        if any(each.control_disabled for each in self.containers if each.name == container):
            return "CUDA_DISABLE_CONTROL keeps HAMi-core out"
        if _UNREACHED.search(self.runtime_class):
            return f"HAMi-core does not work under the runtime class {cap(self.runtime_class, 64)}"
        return ""

    def asking(self, resource: str) -> tuple[ContainerView, ...]:
        """The containers that request `resource`, in admission order."""
        return tuple(c for c in self.gpu_containers if c.resource == resource)

    def asking_by(self, resource: str) -> "PodView":
        """The same pod, its containers counted by that name of the agent's resource."""
        if all(container.resource == resource for container in self.containers):
            return self

        containers = tuple(container.asking_by(resource) for container in self.containers)
        return msgspec.structs.replace(self, containers=containers)


class Tombstone(msgspec.Struct, frozen=True):
    """A deleted pod. For up to 60 s the kubelet may still send an Allocate for it."""

    pod: PodView
    deleted_at: dt.datetime


class PodTable(msgspec.Struct, frozen=True):
    """All pods of this node by UID, and those deleted in the last minutes.

    `synced`: since the first LIST. `stale`: while the watch is down. `lost_at`: since when the API
    server cannot be followed; `lost_reason`: why.
    """

    pods: Mapping[PodUid, PodView] = msgspec.field(default_factory=dict)
    tombstones: tuple[Tombstone, ...] = ()
    synced: bool = False
    stale: bool = False
    lost_at: dt.datetime | None = None
    lost_reason: str = ""

    def named(self, namespace: str, name: str) -> PodView | None:
        """The pod of that name that is not deleted, or None."""
        return next((p for p in self.pods.values() if p.key == (namespace, name)), None)


class NodeView(msgspec.Struct, frozen=True):
    """This Node with all its annotations.

    `former_locks`: the texts of removed locks, the latest first, each with the loop's time until
    which it still proves a right.
    """

    name: str
    uid: str
    resource_version: str
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    former_locks: tuple[tuple[str, float], ...] = ()


class NodeLock(msgspec.Struct, frozen=True):
    """HAMi's lock on the Node. `value` is its exact text. A legacy lock names no owner."""

    value: str
    stamp: dt.datetime
    namespace: str = ""
    name: str = ""

    @property
    def owner(self) -> PodKey | None:
        """The pod that holds it, or None in the legacy form."""
        return (self.namespace, self.name) if self.name else None


# What the watches of pods and Node deliver, and the Events that the agent writes.


class PodList(msgspec.Struct, frozen=True):
    """The answer to a LIST of this node's pods."""

    pods: tuple[PodView, ...]
    resource_version: str


class PodChange(msgspec.Struct, frozen=True):
    """One frame of the pod watch. `deleted`: the pod left this node.

    `pod` is None for a bookmark, and for a pod that cannot be read.
    """

    resource_version: str
    pod: PodView | None = None
    deleted: bool = False


class NodeEvent(msgspec.Struct, frozen=True):
    """An Event on this Node (`pod_uid` empty) or on a pod."""

    reason: str
    text: str
    warning: bool
    namespace: str = ""
    pod: str = ""
    pod_uid: PodUid = NOT_HERE


def version_number(version: str) -> int:
    """A resource version as a number; 0, which is older than all others, if it is no number."""
    return int(version) if version.isascii() and version.isdigit() else 0


GPU_DEGRADED: Final = "GpuDegraded"


class NodeCondition(msgspec.Struct, frozen=True):
    """The condition GpuDegraded. As in node-problem-detector, true means a problem."""

    status: bool
    reason: str
    message: str
    since: dt.datetime


# Label selectors in kubectl's grammar: `gpu=h100,zone in (a, b),!spot`.

_NAME: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"
_KEY: Final = rf"(?:[A-Za-z0-9][-A-Za-z0-9_.]*/)?{_NAME}"
_VALUE: Final = rf"(?:{_NAME})?"
# No two runs of space may meet where a value is left out: that would take quadratic time.
_REQUIREMENT: Final = re.compile(
    rf"\s*(?:!\s*(?P<absent>{_KEY})"
    rf"|(?P<key>{_KEY})(?:\s+(?P<set>in|notin)\s*\((?P<values>[^()]*)\)"
    rf"|\s*(?P<sign>==?|!=)(?:\s*(?P<value>{_NAME}))?)?)\s*(?P<more>,|\Z)"
)


class Requirement(msgspec.Struct, frozen=True):
    """`key` has one of `values`; without values: `key` exists. `wanted` False negates it."""

    key: str
    values: tuple[str, ...] = ()
    wanted: bool = True

    @property
    def is_valid(self) -> bool:
        """Whether Kubernetes takes its key and its values."""
        return bool(re.fullmatch(_KEY, self.key)) and all(
            re.fullmatch(_VALUE, value) for value in self.values
        )

    def holds(self, labels: Mapping[str, str]) -> bool:
        """True when the labels meet it. An absent label has none of the values."""
        has_value = self.key in labels and (not self.values or labels[self.key] in self.values)
        return has_value is self.wanted


def parse_selector(text: str) -> tuple[Requirement, ...]:
    """Parse a label selector, which selects what meets all its requirements.

    Raises MalformedText. Source: kubernetes apimachinery pkg/labels/selector.go.
    """
    requirements: list[Requirement] = []
    start, more = 0, ","
    while more:
        match = _REQUIREMENT.match(text, start)
        if match is None:
            part, _, _ = text[start:].partition(",")
            raise MalformedText(
                f"{cap(part.strip(), 64)!r} is not a valid label selector; write key=value, "
                "key!=value, key in (a, b), key notin (a, b), key or !key"
            )
        values = tuple(map(str.strip, match["values"].split(","))) if match["set"] else ()
        for value in values:
            if not re.fullmatch(_VALUE, value):
                raise MalformedText(f"{cap(value, 64)!r} is not a valid label value")
        values = (match["value"] or "",) if match["sign"] else values
        wanted = not match["absent"] and match["set"] != "notin" and match["sign"] != "!="
        requirements.append(Requirement(match["key"] or match["absent"], values, wanted))
        start, more = match.end(), match["more"]
    return tuple(requirements)
