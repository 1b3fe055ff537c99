"""What an Allocate looks at, whom it may ask, and what else is under way."""

import dataclasses
from collections.abc import Awaitable, Callable, Mapping

from agent.core.allocation.room import GpuUse
from agent.core.cluster.pods import NodeView, PodTable, PodUid
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import Inventory
from agent.core.ports import Clock, Containers, KubeletRecords, Witness
from agent.core.state.holdings import KubeletEpoch
from agent.core.state.ledger import Ledger
from agent.kit.cell import Cell


@dataclasses.dataclass(frozen=True, slots=True)
class AllocationViews:
    """The facts that a decision reads.

    `registered`: the greatest amounts of the last minute. `outlived`: which of the last locks stood
    when the pod that was answered under it went.
    """

    pods: Cell[PodTable]
    node: Cell[NodeView | None]
    inventory: Cell[Inventory]
    ledger: Cell[Ledger]
    outlived: Cell[Mapping[str, PodUid]]
    registered: Callable[[], Mapping[GpuUuid, GpuUse]] = dict


@dataclasses.dataclass(frozen=True, slots=True)
class AllocationPeers:
    """Whom an inquiry asks.

    `refresh` makes the one LIST of this node's pods, `look_at_pod` a GET that tells whose the name
    is now, `look_at_node` one of the Node. `epoch` names the kubelet that is there now. `look` has
    the Node's watch opened at once where it is down: after an outage the scheduler and the kubelet
    may be back before it.
    """

    witness: Witness
    records: KubeletRecords
    containers: Containers
    refresh: Callable[[], Awaitable[PodTable]]
    look_at_pod: Callable[[str, str], Awaitable[PodUid]]
    look_at_node: Callable[[], Awaitable[None]]
    epoch: Callable[[], KubeletEpoch | None]
    clock: Clock
    look: Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Underway:
    """What this process has under way at a moment.

    `ledger` has the rows that are being written; the others are as in Evidence and Books.
    """

    ledger: Ledger
    claimed: frozenset[PodUid]
    spent: Mapping[str, PodUid]
