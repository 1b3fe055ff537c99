"""Pods and the Node as the agent sees them: only the fields that decide something here."""

import dataclasses
import datetime as dt
import enum
from collections.abc import Mapping
from typing import NewType

from agent.core.inventory.share import Share

PodUid = NewType("PodUid", str)


class Phase(enum.StrEnum):
    """status.phase of a pod."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


class Role(enum.StrEnum):
    """What a container is in its pod."""

    INIT = "init"
    SIDECAR = "sidecar"
    """A restartable init container."""
    APP = "app"


@dataclasses.dataclass(frozen=True, slots=True)
class ContainerView:
    """One container: `count` slices of our resource (0: none asked).

    `resource` is the name that it asks for them by, and `others` are its other extended resources
    with their amounts: our resource may get another one.
    `control_disabled`: a literal env CUDA_DISABLE_CONTROL that Go's ParseBool reads as true.
    `running_id`: the runtime's id while status says running, else None. `has_run`: it was made.
    `started_at`: when it was started last, None: it was not. `stopped_at`: when it ended last,
    whatever comes then. `ended_at`: the same, if it is never started again, else None.
    `succeeded`: it ended with exit code 0 once, whatever it does now.
    `dropped_memory`: the text of a `gpumem` limit that HAMi drops, empty for all others.
    """

    name: str
    role: Role
    count: int
    control_disabled: bool = False
    running_id: str | None = None
    has_run: bool = False
    started_at: dt.datetime | None = None
    stopped_at: dt.datetime | None = None
    ended_at: dt.datetime | None = None
    succeeded: bool = False
    dropped_memory: str = ""
    resource: str = "nvidia.com/gpu"
    others: tuple[tuple[str, int], ...] = ()

    def asking_by(self, resource: str) -> "ContainerView":
        """The same container, counted by that name of our resource."""
        if self.resource == resource:
            return self
        asked = dict(self.others)
        if self.count:
            asked[self.resource] = self.count
        count = asked.pop(resource, 0)
        return dataclasses.replace(
            self, count=count, resource=resource, others=tuple(sorted(asked.items()))
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PodView:
    """One pod bound to this node. `containers`: init and sidecars first, then apps, spec order.

    `annotations` holds only the keys of hami.io/. `static`: a mirror pod of the kubelet's files.
    `reusable_name`: the name was not generated, so that another pod can come under it. `groups` is
    the decoded `…-devices-allocated`, None when it is absent; `groups_error` says why
    it could not be decoded.
    """

    uid: PodUid
    namespace: str
    name: str
    node: str
    phase: Phase
    created: dt.datetime
    containers: tuple[ContainerView, ...]
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    static: bool = False
    reusable_name: bool = False
    reason: str = ""
    """status.reason, `UnexpectedAdmissionError` for one."""
    message: str = ""
    resource_version: str = ""
    groups: tuple[tuple[Share, ...], ...] | None = None
    groups_error: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name: how the kubelet and the node lock name the pod."""
        return self.namespace, self.name

    @property
    def terminal(self) -> bool:
        """True once no container of it will ever run again."""
        return self.phase in {Phase.SUCCEEDED, Phase.FAILED}

    @property
    def has_run(self) -> bool:
        """True once a container of it was started."""
        return any(one.has_run or one.running_id is not None for one in self.containers)

    @property
    def gpu_containers(self) -> tuple[ContainerView, ...]:
        """The containers that ask for our resource, in admission order."""
        return tuple(c for c in self.containers if c.count > 0)

    def asking(self, resource: str) -> tuple[ContainerView, ...]:
        """The containers that ask for `resource`, in admission order."""
        return tuple(c for c in self.gpu_containers if c.resource == resource)

    def asking_by(self, resource: str) -> "PodView":
        """The same pod, its containers counted by that name of our resource."""
        containers = tuple(container.asking_by(resource) for container in self.containers)
        same = containers == self.containers
        return self if same else dataclasses.replace(self, containers=containers)


@dataclasses.dataclass(frozen=True, slots=True)
class Tombstone:
    """A pod that was deleted: the kubelet may still ask for it for a while."""

    pod: PodView
    deleted_at: dt.datetime


@dataclasses.dataclass(frozen=True, slots=True)
class PodTable:
    """All pods of this node by UID, and the ones deleted in the last minutes.

    `synced` is False until the first LIST; `stale` while the watch is down.
    """

    pods: Mapping[PodUid, PodView] = dataclasses.field(default_factory=dict)
    tombstones: tuple[Tombstone, ...] = ()
    synced: bool = False
    stale: bool = False

    def named(self, namespace: str, name: str) -> PodView | None:
        """The present pod of that name, or None."""
        return next((p for p in self.pods.values() if p.key == (namespace, name)), None)


@dataclasses.dataclass(frozen=True, slots=True)
class NodeView:
    """This Node: `annotations` holds all of them (the reporter compares what the server holds).

    `reported_by`: who but an agent wrote the register annotation last, and when; empty where it was
    an agent, or is not known. `former_locks`: the texts of the locks that were seen to go, the last
    one first, each with the moment, on the loop's clock, until which it still proves a right.
    """

    name: str
    uid: str
    resource_version: str
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reported_by: str = ""
    former_locks: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class NodeLock:
    """HAMi's mutex on the Node: `value` is its exact text. A legacy lock names no owner."""

    value: str
    stamp: dt.datetime
    namespace: str = ""
    name: str = ""

    @property
    def owner(self) -> tuple[str, str] | None:
        """Namespace and name of the pod that holds it, or None in the legacy form."""
        return (self.namespace, self.name) if self.name else None
