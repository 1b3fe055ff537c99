"""The Protocols of the outside world, on which services depend.

Async methods raise only errors of agent.errors. Unless a method keeps its own deadline, callers do.
"""

import datetime as dt
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Protocol

from agent.cluster import NodeView, PodChange, PodList, PodUid, PodView
from agent.ledger import ContainerKey, Holding
from agent.model import DriverEvent, GpuSample, GpuUuid, Probe, Scan, SliceId


class Clock(Protocol):
    """Wall time, for display and for stamps that other programs read."""

    def now(self) -> dt.datetime:
        """The present time, aware, in UTC."""


class Driver(Protocol):
    """The GPU driver: one session for the life of the process."""

    async def scan(self) -> Scan:
        """Describe all GPUs. Raises DriverMissing, DriverError."""

    async def probe(self, uuid: GpuUuid) -> Probe:
        """Check that one GPU answers. Raises DriverError if the driver as a whole fails."""

    async def sample(self, uuid: GpuUuid) -> GpuSample:
        """The present use of one GPU. Raises GpuError: it does not answer in time; DriverError."""

    def events(self, opened: Callable[[], None] | None = None) -> AsyncIterator[DriverEvent]:
        """The driver's events, for ever; after `opened` was called, none is missed.

        Raises DriverError when the session ends.
        """

    async def release(self, uuids: Collection[GpuUuid], *, everything: bool = False) -> None:
        """Close the handles of these GPUs and open none; the driver then no longer uses them.

        `everything`: also those of all GPUs that are not shared, until any GPU is taken back.
        Raises GpuError: an unknown GPU; DriverError: a handle cannot be closed now.
        """

    def take_back(self, uuid: GpuUuid) -> None:
        """Allow use of a released GPU again."""

    def check(self) -> None:
        """Raise DriverMissing: new containers get another library than the agent uses. Blocks."""

    async def renew(self) -> bool:
        """Start a new session with the next call, because all GPUs fail alike in this one.

        Returns False if it was renewed for that before and no GPU has answered since.
        """

    async def close(self) -> None:
        """End the session; a second call does nothing."""


class Witness(Protocol):
    """PodResources: the devices that the kubelet has recorded per pod."""

    async def get(self, namespace: str, pod: str) -> Holding | None:
        """The pod's devices; None: the pod is neither being admitted nor active.

        Raises WitnessThrottled, WitnessUnsupported, KubeletError: there was no answer.
        """

    async def list(self) -> tuple[Holding, ...]:
        """All active pods. Raises WitnessThrottled, KubeletError."""


RecordsReader = Callable[[str], Awaitable[Mapping[ContainerKey, frozenset[SliceId]] | None]]
"""Reads the kubelet's checkpoint: the ids of that resource of each container; None: not known."""


class Containers(Protocol):
    """The runtime's containers on this host."""

    async def running(self, ids: frozenset[str]) -> frozenset[str] | None:
        """The runtime ids among `ids` that have a live cgroup; None: that is not known."""

    async def begun(self) -> frozenset[PodUid] | None:
        """The pods that have a cgroup: the kubelet has begun to start them; None: not known."""


class NodeApi(Protocol):
    """This Node at the API server. Each request has 10 s. Methods raise ApiError."""

    def watch_node(self) -> AsyncIterator[NodeView | None]:
        """One WATCH: the Node and its changes; None: no Node, which may take two minutes to say."""

    async def get_node(self) -> NodeView | None:
        """One consistent GET; None: the Node does not exist."""

    async def annotate_node(self, annotations: Mapping[str, str | None]) -> NodeView:
        """Merge-patch annotations (None removes) and return the Node."""

    async def release_lock(self, key: str, value: str) -> None:
        """JSON patch: test that annotation `key` is `value`, then remove. Raises ApiInvalid."""


class PodApi(Protocol):
    """The pods of this node at the API server. Each request has 10 s. Methods raise ApiError."""

    async def list_pods(self) -> PodList:
        """One LIST with spec.nodeName of this node."""

    async def get_pod(self, namespace: str, name: str) -> PodView | None:
        """One consistent GET; None: no pod of this node has the name.

        A node's own identity gets ApiForbidden for a pod that is gone, or not yet seen here.
        """

    def watch_pods(self, resource_version: str) -> AsyncIterator[PodChange]:
        """One WATCH from that version on. It begins with a bookmark of it. Raises ApiGone."""

    async def annotate_pod(
        self, namespace: str, name: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        """Merge-patch through pods/status with metadata.uid.

        Raises ApiInvalid (the pod has another UID), ApiConflict (others write it), ApiNotFound.
        """


class Disk(Protocol):
    """The state directory: a few named files, replaced whole or not at all."""

    @property
    def place(self) -> str:
        """Its path, for messages."""

    async def read(self, name: str) -> bytes | None:
        """The content, or None when absent. Raises StateError."""

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        """Durably replace: temp, write, fsync, rename, directory fsync.

        `keep` names a file for the former content. Raises StateError; then that content is there,
        unless only the directory fsync failed.
        """
