"""The types of a decision about an Allocate: its evidence, its questions and its grant."""

import dataclasses
import datetime as dt
from collections.abc import Mapping

import msgspec

from agent.core.allocation.room import GpuUse, Shortage
from agent.core.cluster.pods import ContainerView, NodeLock, PodKey, PodTable, PodUid, PodView
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory
from agent.core.inventory.share import Share
from agent.core.state.holdings import Holding, KubeletEpoch
from agent.core.state.ledger import ContainerKey, Ledger, Row

Known = Mapping[PodKey, Holding | None]
"""The witness's answers so far; None: it does not know the pod. A missing key: it was not asked."""

ALWAYS = dt.datetime.min.replace(tzinfo=dt.UTC)
"""Before any pod was made."""

NOT_HERE = PodUid("")
"""The result of a GET of a pod that is gone, or that this node may not read."""

UNREAD = None
"""The result of a GET that the API server did not answer in time."""


class Candidate(msgspec.Struct, frozen=True):
    """A pod that the kubelet may be admitting, and its next container.

    `row`: the row to replay; None: the container was not answered before. `deleted`: the pod is a
    tombstone. The kubelet still admits pods that were deleted while they queued.
    """

    pod: PodView
    container: ContainerView
    row: Row | None = None
    deleted: bool = False


class KubeletStart(msgspec.Struct, frozen=True):
    """What the agent saw when this kubelet began to take its lists.

    - `asks_since`: the kubelet asks for the containers of every pod that was made since then. Of
      the pods before it may have admitted some without asking, if it had lost its checkpoint.
    - `begun`: the pods that had a cgroup before the kubelet admitted its first pod; None: that is
      not known. Of all others it asks for each container when it admits them.
    """

    asks_since: dt.datetime = ALWAYS
    begun: frozenset[PodUid] | None = None


class Books(msgspec.Struct, frozen=True):
    """What is known of the kubelet besides its PodResources answers.

    - `recorded`: the containers in its checkpoint file, the only list with ordinary init
      containers; None: not read, or unreadable.
    - `alive`: the runtime ids of containers that run. After a reboot, the API server still reports
      containers as running that are gone.
    - `witnessed`: this kubelet serves Get; otherwise the agent uses the checkpoint file instead.
    - `start`: what the agent saw of its start.
    """

    epoch: KubeletEpoch
    recorded: frozenset[ContainerKey] | None = None
    alive: frozenset[str] = frozenset()
    witnessed: bool = True
    start: KubeletStart = KubeletStart()


class Evidence(msgspec.Struct, frozen=True):
    """All facts that a decision uses.

    - `ledger`: includes rows that are being written.
    - `former`: the former locks that still prove a right, the last one first.
    - `spent`: the last locks with the pods that were answered under them. It remembers longer than
      the rows. `outlived`: those of these locks that still stood when their pod was gone.
    - `known`: the witness's answers in this call.
    - `looked`: the UIDs from GETs of pods; also NOT_HERE and UNREAD.
    - `registered`: the greatest amounts registered in the last 60 s, if not the inventory's.
    - `records_read`, `listed`, `waited`, `node_read`: the questions that were asked already.
      `list_failed`: the LIST failed. `node_unread`: the GET of the Node failed. `checked`: the
      runtime ids that were asked about.
    - `claimed`: pods that cannot be asking: another call answers them, or they were refused.
    - `absent`, `present`: names that the kubelet did not know, or knew, when it began this call's
      container. `alone`: no other call came for a moment. `beside`: of each call that
      was under way then, the names that the kubelet knew when it began, if that is known.
    """

    table: PodTable
    ledger: Ledger
    lock: NodeLock | None
    inventory: Inventory
    books: Books
    now: dt.datetime
    known: Known
    former: tuple[NodeLock, ...] = ()
    spent: Mapping[str, PodUid] = msgspec.field(default_factory=dict)
    outlived: Mapping[str, PodUid] = msgspec.field(default_factory=dict)
    looked: Mapping[PodKey, PodUid | None] = msgspec.field(default_factory=dict)
    registered: Mapping[GpuUuid, GpuUse] = msgspec.field(default_factory=dict)
    records_read: bool = False
    checked: frozenset[str] = frozenset()
    listed: bool = False
    list_failed: bool = False
    waited: bool = False
    node_read: bool = False
    node_unread: bool = False
    claimed: frozenset[PodUid] = frozenset()
    absent: frozenset[PodKey] = frozenset()
    present: frozenset[PodKey] = frozenset()
    alone: bool = False
    beside: tuple[frozenset[PodKey] | None, ...] = ()

    @property
    def blind(self) -> bool:
        """Whether the pods are not known: they were never listed, or the LIST failed."""
        return self.listed and (self.list_failed or not self.table.synced)


@dataclasses.dataclass(frozen=True, slots=True)
class AskKubelet:
    """Ask PodResources for this pod, and then for `others` until the kubelet knows one of them."""

    namespace: str
    name: str
    others: tuple[PodKey, ...] = dataclasses.field(default=(), compare=False)


class ReadRecords(msgspec.Struct, frozen=True):
    """Read the kubelet's checkpoint file, the only record of ordinary init containers."""


class CheckRunning(msgspec.Struct, frozen=True):
    """Ask which of these runtime ids have a live container. A pod's status can be stale."""

    ids: frozenset[str]


class ListPods(msgspec.Struct, frozen=True):
    """LIST the pods of this node, because the watch may lag."""


class LookAtPod(msgspec.Struct, frozen=True):
    """GET this pod, because another pod may have its name now."""

    namespace: str
    name: str


class AwaitLock(msgspec.Struct, frozen=True):
    """Wait for the Node's watch to show this pod's lock; empty: any other lock than now."""

    namespace: str = ""
    name: str = ""


class LookAtNode(msgspec.Struct, frozen=True):
    """GET the Node, because its watch may lag or be broken."""


class AwaitOthers(msgspec.Struct, frozen=True):
    """Wait a moment for other calls: the new pod's own call comes if this one is not for it."""


Question = (
    AskKubelet
    | ReadRecords
    | CheckRunning
    | ListPods
    | LookAtPod
    | AwaitLock
    | LookAtNode
    | AwaitOthers
)


class Grant(msgspec.Struct, frozen=True):
    """The container that is served, its shares, and its position in `…-allocated`.

    `lock`: the text of the node lock that names its pod; empty: none. `oversold`: the scheduler
    promised more of this GPU than it has; None: it did not.
    """

    candidate: Candidate
    group: int
    shares: tuple[Share, ...]
    lock: str = ""
    oversold: Shortage | None = None

    @property
    def key(self) -> ContainerKey:
        """The key of the container's row."""
        return ContainerKey(self.candidate.pod.uid, self.candidate.container.name)

    @property
    def replay(self) -> Row | None:
        """The row that is answered again; None: this is a first answer."""
        return self.candidate.row
