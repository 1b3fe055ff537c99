"""The facts that an Allocate reads, the peers it may ask, and the other calls under way."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from agent.core.allocation.room import GpuUse
from agent.core.cluster.pods import NodeView, PodTable, PodUid
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory
from agent.core.ports import Clock, Containers, KubeletRecords, Witness
from agent.core.state.holdings import KubeletEpoch
from agent.core.state.ledger import Ledger
from agent.kit.cell import Cell
from agent.kit.running_time import Lag


class AllocationViews(msgspec.Struct, frozen=True):
    """The facts that a decision reads.

    - `registered`: the greatest amounts registered for each GPU in the last 60 s.
    - `outlived`: the locks that still stood when the pod that was answered under them was gone.
    """

    pods: Cell[PodTable]
    node: Cell[NodeView | None]
    inventory: Cell[Inventory]
    ledger: Cell[Ledger]
    outlived: Cell[Mapping[str, PodUid]]
    registered: Callable[[], Mapping[GpuUuid, GpuUse]] = dict


class Refresh(Protocol):
    """LISTs this node's pods. Raises ApiError."""

    def __call__(self, *, is_owners: bool) -> Awaitable[PodTable]: ...  # noqa: D102


class AllocationPeers(msgspec.Struct, frozen=True):
    """The peers that an inquiry asks.

    - `refresh`: makes the one LIST of this node's pods; `is_owners`: the lock's owner may need it.
    - `look_at_pod`: GETs the UID of the pod that has a name now. `look_at_node`: GETs the Node.
    - `epoch`: the present kubelet instance. `streams`: how many list streams it has open.
    - `look`: opens the Node's watch at once if it is down. After an outage the scheduler and the
      kubelet may be back before it.
    - `lag`: extends the deadlines of all calls.
    """

    witness: Witness
    records: KubeletRecords
    containers: Containers
    refresh: Refresh
    look_at_pod: Callable[[str, str], Awaitable[PodUid]]
    look_at_node: Callable[[], Awaitable[None]]
    epoch: Callable[[], KubeletEpoch | None]
    streams: Cell[int]
    clock: Clock
    look: Callable[[], None]
    lag: Lag = msgspec.field(default_factory=Lag)


class Underway(msgspec.Struct, frozen=True):
    """What the calls of this process have under way now.

    `ledger` includes rows that are being written. `claimed` and `spent` are as in Evidence.
    """

    ledger: Ledger
    claimed: frozenset[PodUid]
    spent: Mapping[str, PodUid]
