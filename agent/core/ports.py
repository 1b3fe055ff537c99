"""The Protocols of the outside world. Services depend on these; agent.host implements them.

Every async method raises only errors of agent.core.errors. Deadlines are the caller's
(asyncio.timeout), except where a method says that it keeps its own.
"""

import datetime as dt
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from agent.core.cluster.changes import NodeChange, NodeEvent, PodChange, PodList
from agent.core.cluster.pods import NodeView, PodUid, PodView
from agent.core.containers.edits import HookFacts
from agent.core.health.news import NodeCondition
from agent.core.health.reports import DriverEvent, Probe
from agent.core.inventory.gpu import GpuSample, GpuUuid, Scan
from agent.core.inventory.slices import SliceId
from agent.core.node.leftovers import Agents, NodeLeftovers, NodeTraces
from agent.core.reconcile.clearing import Cleared
from agent.core.reconcile.measuring import DirectorySize, DiskRoom
from agent.core.state.holdings import Holding, KubeletEpoch
from agent.core.state.ledger import ContainerKey


class Clock(Protocol):
    """Wall time, for display and for stamps that other programs read."""

    def now(self) -> dt.datetime:
        """The present, aware, in UTC."""
        ...


class Driver(Protocol):
    """The GPU driver: one session for the life of the process."""

    async def scan(self) -> Scan:
        """Look at all GPUs. Raises DriverMissing, DriverError."""
        ...

    async def probe(self, uuid: GpuUuid) -> Probe:
        """Ask one GPU for a sign of life. Raises DriverError when the driver as a whole fails."""
        ...

    async def sample(self, uuid: GpuUuid) -> GpuSample:
        """How much one GPU is used now: cheap enough to be asked every few seconds.

        Raises GpuError when this GPU does not answer (in time), DriverError.
        """
        ...

    def events(self, opened: Callable[[], None] | None = None) -> AsyncIterator[DriverEvent]:
        """Reports as they come, for ever. Raises DriverError when the session ends.

        `opened` is called once, when nothing is missed any more.
        """
        ...

    async def release(self, uuids: Collection[GpuUuid], *, everything: bool = False) -> None:
        """Let go of these GPUs: no handle of them is held, and none is asked for.

        `everything`: of all others as well, which nobody shares, until any GPU is taken back.

        Raises GpuError for one that is not known, DriverError when they cannot be let go of now;
        all the same they are touched no more.
        """
        ...

    def take_back(self, uuid: GpuUuid) -> None:
        """It may be touched again."""
        ...

    async def renew(self) -> bool:
        """Have the next question begin another session, for all GPUs fail alike in this one.

        False: it was renewed for that before, and no GPU has answered since.
        """
        ...

    async def close(self) -> None:
        """End the session; a second call does nothing."""
        ...


class Witness(Protocol):
    """PodResources: what the kubelet has on its books."""

    async def get(self, namespace: str, pod: str) -> Holding | None:
        """The pod as the kubelet knows it, or None: it is not being admitted and not active.

        Raises WitnessThrottled, WitnessUnsupported, KubeletError.
        """
        ...

    async def list(self) -> tuple[Holding, ...]:
        """All active pods. Raises WitnessThrottled, KubeletError."""
        ...


class KubeletRecords(Protocol):
    """The kubelet's checkpoint file, read-only."""

    async def read(self, resource: str) -> Mapping[ContainerKey, frozenset[SliceId]] | None:
        """The ids of `resource` of each container it records; None when absent or unreadable."""
        ...


class Containers(Protocol):
    """The runtime's containers on this host."""

    async def running(self, ids: frozenset[str]) -> frozenset[str]:
        """Which of these runtime ids have a live cgroup; all of them where that cannot be seen."""
        ...


class Registrar(Protocol):
    """The kubelet's Registration service."""

    async def register(self, endpoint: str, resource: str, *, preferred: bool) -> None:
        """Register the socket named `endpoint`. Raises RegistrationRefused, KubeletError."""
        ...


class SocketWatch(Protocol):
    """The kubelet's device plugin directory."""

    def epoch(self) -> KubeletEpoch | None:
        """The kubelet's socket as it is now, or None when there is none."""
        ...

    def exists(self, name: str) -> bool:
        """True when `name` is there."""
        ...

    def changes(self) -> AsyncIterator[str]:
        """Names that appeared or went; an empty name means look at everything again."""
        ...


class FileWatch(Protocol):
    """Files that people write, wherever they lie."""

    async def follow(self, paths: Collection[Path], changed: Callable[[], None]) -> NoReturn:
        """Call `changed` once the files are watched, then whenever one of them may be another.

        They, and their directories, may be missing, come, go, be replaced or be links. For ever.
        """
        ...


class NodeApi(Protocol):
    """This Node at the API server. Methods keep their own deadline of 10 s a request."""

    def watch_node(self) -> AsyncIterator[NodeChange]:
        """One WATCH: first that it is open, then the Node as it is (if it is), then its changes.

        Raises ApiError.
        """
        ...

    async def get_node(self) -> NodeView | None:
        """One GET, of what is stored now; None: there is no such Node. Raises ApiError."""
        ...

    async def annotate_node(self, annotations: Mapping[str, str | None]) -> NodeView:
        """Merge-patch annotations (None removes) and return the Node. Raises ApiError."""
        ...

    async def release_lock(self, key: str, value: str) -> None:
        """JSON patch: test that annotation `key` is `value`, then remove. Raises ApiInvalid."""
        ...


class NodeStatusApi(Protocol):
    """The status of this Node. The method keeps its own deadline of 10 s."""

    async def set_condition(self, condition: NodeCondition) -> None:
        """Create or replace one condition; the others stay. Raises ApiError."""
        ...


class PodApi(Protocol):
    """The pods of this node at the API server. Methods keep their own deadline of 10 s."""

    async def list_pods(self) -> PodList:
        """One LIST with spec.nodeName of this node. Raises ApiError."""
        ...

    async def get_pod(self, namespace: str, name: str) -> PodView | None:
        """One GET, of what is stored now; None: there is no such pod.

        Raises ApiError; ApiForbidden also where a node's own identity asks for a pod that is gone
        or on another node, or that was bound to this one a moment ago.
        """
        ...

    def watch_pods(self, resource_version: str) -> AsyncIterator[PodChange]:
        """One WATCH from there on; first a bookmark of that version: it is open. Raises ApiGone."""
        ...

    async def annotate_pod(
        self, namespace: str, name: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        """Merge-patch through pods/status with metadata.uid.

        Raises ApiInvalid (the pod has another UID), ApiConflict (others write it), ApiNotFound.
        """
        ...

    async def post_event(self, event: NodeEvent) -> None:
        """Create or update an Event. Raises ApiError."""
        ...


class Disk(Protocol):
    """The state directory: a few named files, replaced whole or not at all."""

    @property
    def place(self) -> str:
        """Where it is, for people."""
        ...

    async def read(self, name: str) -> bytes | None:
        """The content, or None when absent. Raises StateError."""
        ...

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        """Durably replace: temp, write, fsync, rename, directory fsync.

        `keep` names a file that receives the content before (a second durable generation).
        Raises StateError; then the old content stands.
        """
        ...


class HookDirs(Protocol):
    """HAMi-core's directories below the hook path. Link-safe; nothing outside is touched."""

    async def facts(self) -> HookFacts:
        """What lies in the hook directory now. Raises StateError."""
        ...

    async def prepare(self, name: str, *, wipe: bool) -> None:
        """Make the container directory `name`, whatever is in its place. Raises StateError."""
        ...

    async def remove(self, name: str) -> None:
        """Take the container directory `name` away; absent is done. Raises StateError.

        What was in it goes with clear().
        """
        ...

    async def clear(self, *, again: bool) -> Cleared:
        """Remove a bounded part of what was taken away or replaced. Raises StateError.

        `again`: what could not be removed is tried once more.
        """
        ...

    async def found(self) -> Mapping[str, dt.datetime]:
        """The container directories that are there, and when each changed. Raises StateError."""
        ...

    async def measure(self, name: str, *, anew: bool) -> DirectorySize:
        """What the container directory `name` holds, after a look at a bounded part of it.

        `anew`: at the first part. One that is absent holds nothing. Raises StateError.
        """
        ...

    async def room(self) -> DiskRoom:
        """What is left on their file system. Raises StateError."""
        ...


class ServiceNotifier(Protocol):
    """systemd, or nobody."""

    def ready(self) -> None:
        """The service serves."""
        ...

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        ...

    def stopping(self) -> None:
        """The service is about to end."""
        ...

    def reloading(self) -> None:
        """A reload has begun; ready() ends it."""
        ...

    def alive(self) -> None:
        """The watchdog's sign of life."""
        ...

    @property
    def watchdog(self) -> dt.timedelta | None:
        """How often alive() is expected at the latest, or None."""
        ...


class Leftovers(Protocol):
    """All Nodes and the agents' pods, for an uninstallation. Methods raise ApiError."""

    async def nodes(self) -> tuple[NodeTraces, ...]:
        """All Nodes."""
        ...

    async def node(self, name: str) -> NodeTraces:
        """One Node. Raises ApiNotFound."""
        ...

    async def remove(self, node: NodeTraces, keys: Sequence[str]) -> None:
        """Take annotations off the Node as it was seen. Raises ApiConflict: it is another now."""
        ...

    async def forget_condition(self, name: str) -> None:
        """Take the condition GpuDegraded off the Node."""
        ...

    async def agents(self, agents: Agents) -> tuple[str, ...]:
        """The names of the agents' pods."""
        ...

    async def places(self, agents: Agents) -> Mapping[str, str]:
        """The agents' pods, each with its node; empty where it has none yet."""
        ...

    async def look(self, name: str, resource: str) -> NodeLeftovers:
        """What the Node says of itself; of one that is not there, nothing."""
        ...
