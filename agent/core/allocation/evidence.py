"""What a decision about an Allocate rests on, what it may ask, and what it grants."""

import dataclasses
import datetime as dt
from collections.abc import Mapping

from agent.core.allocation.room import GpuUse, Shortage
from agent.core.cluster.pods import ContainerView, NodeLock, PodTable, PodUid, PodView
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory
from agent.core.inventory.share import Share
from agent.core.state.holdings import Holding, KubeletEpoch
from agent.core.state.ledger import ContainerKey, Ledger, Row

PodKey = tuple[str, str]
"""Namespace and name: all that PodResources and the node lock know of a pod."""

Known = Mapping[PodKey, Holding | None]
"""The witness's answers so far; a key that is absent was not asked."""

NOT_HERE = PodUid("")
"""What a GET says of a pod that is gone, or that this node may not read, for it is not here."""

UNREAD = None
"""What is known of a pod after a GET that the API server did not answer in time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A pod that may be the one being admitted, and the container that would be next in it.

    `row` is set for a replay: the container was answered before. `deleted`: the pod is a
    tombstone (the kubelet still admits pods that were deleted while they queued).
    """

    pod: PodView
    container: ContainerView
    row: Row | None = None
    deleted: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Books:
    """What is known of the kubelet beside the answers of the witness.

    `recorded`: the containers in the kubelet's checkpoint file, None while unread or unreadable
    (ordinary init containers are listed nowhere else). `alive`: runtime ids of containers that run
    for certain: after a reboot the API still says running for containers that are gone.
    `witnessed`: this kubelet serves Get; where it does not, its file stands in.
    """

    epoch: KubeletEpoch
    recorded: frozenset[ContainerKey] | None = None
    alive: frozenset[str] = frozenset()
    witnessed: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Evidence:
    """Everything a decision may rest on.

    `ledger` includes rows that are being written. `former` are the locks that went and still prove
    a right, the last one first; `spent` says under which of the last locks which pod was answered,
    for rows of pods that end soon do not last; `outlived`, which of them stood when that pod
    went. `known` holds the witness's answers of this request,
    `looked` the UIDs that single GETs brought: NOT_HERE where the pod is gone or may not be read,
    UNREAD where the API server was silent. `registered`: the greatest amounts of the last minute,
    where they differ from the inventory's. `records_read`, `listed`, `waited`, `node_read`: what
    was done already. `list_failed`: the LIST brought no answer. `checked`: runtime ids that were
    looked up. `claimed`: pods of calls in flight, and those that asked in vain.
    """

    table: PodTable
    ledger: Ledger
    lock: NodeLock | None
    inventory: Inventory
    books: Books
    now: dt.datetime
    known: Known
    former: tuple[NodeLock, ...] = ()
    spent: Mapping[str, PodUid] = dataclasses.field(default_factory=dict)
    outlived: Mapping[str, PodUid] = dataclasses.field(default_factory=dict)
    looked: Mapping[PodKey, PodUid | None] = dataclasses.field(default_factory=dict)
    registered: Mapping[GpuUuid, GpuUse] = dataclasses.field(default_factory=dict)
    records_read: bool = False
    checked: frozenset[str] = frozenset()
    listed: bool = False
    list_failed: bool = False
    waited: bool = False
    node_read: bool = False
    claimed: frozenset[PodUid] = frozenset()

    @property
    def blind(self) -> bool:
        """Whether the pods of this node cannot be known: never listed, or the LIST failed."""
        return self.listed and (self.list_failed or not self.table.synced)


@dataclasses.dataclass(frozen=True, slots=True)
class AskKubelet:
    """Ask PodResources for this pod, and then for `others` until the kubelet knows one.

    One that it does not know changes nothing but who is next, which needs no decision.
    """

    namespace: str
    name: str
    others: tuple[PodKey, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class ReadRecords:
    """Read the kubelet's checkpoint file: an init container's record is nowhere else."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckRunning:
    """Which of these runtime ids have a live container: a pod's status can be late or stale."""

    ids: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class ListPods:
    """Our view lags: one LIST of this node's pods."""


@dataclasses.dataclass(frozen=True, slots=True)
class LookAtPod:
    """One GET of this pod: another one may have come under its name since our watch showed it."""

    namespace: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class AwaitLock:
    """The Node's watch may lag behind the pods': wait a moment for this pod's lock, or for any."""

    namespace: str = ""
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class LookAtNode:
    """One GET of the Node: its watch may be late, or dead without a word."""


Question = AskKubelet | ReadRecords | CheckRunning | ListPods | LookAtPod | AwaitLock | LookAtNode


@dataclasses.dataclass(frozen=True, slots=True)
class Grant:
    """The container is served: what it gets, and its position in `…-allocated`.

    `lock`: the text of the node lock that names its pod; empty where none does. `oversold`: what is
    promised of a GPU beyond what it has, for the scheduler counts less than it gave.
    """

    candidate: Candidate
    group: int
    shares: tuple[Share, ...]
    lock: str = ""
    oversold: Shortage | None = None

    @property
    def key(self) -> ContainerKey:
        """Which container it is."""
        return ContainerKey(self.candidate.pod.uid, self.candidate.container.name)

    @property
    def replay(self) -> Row | None:
        """The row that is answered again, or None for a first answer."""
        return self.candidate.row
