"""What a decision about an Allocate rests on, what it may ask, and what it grants."""

import dataclasses
import datetime as dt
from collections.abc import Container, Mapping

from agent.core.candidates import Books, Candidate, Known
from agent.core.gpu import GpuUuid
from agent.core.inventory import Inventory
from agent.core.ledger import Ledger, Row
from agent.core.pods import NodeLock, PodTable, PodUid
from agent.core.room import Use
from agent.core.share import Share


@dataclasses.dataclass(frozen=True, slots=True)
class Evidence:
    """Everything a decision may rest on.

    `ledger` includes rows that are being written. `known` holds the witness's answers of this
    request. `registered`: the greatest amounts of the last minute, where they differ from the
    inventory's. `records_read`, `listed`, `waited`: what was done already. `list_failed`: the LIST
    brought no answer. `checked`: runtime ids that were looked up. `claimed`: pods of calls in
    flight, and deleted ones that asked in vain. `in_doubt`: pods one of whose dead containers may
    have been refused, nobody knows which.
    """

    table: PodTable
    ledger: Ledger
    lock: NodeLock | None
    inventory: Inventory
    books: Books
    now: dt.datetime
    known: Known
    registered: Mapping[GpuUuid, Use] = dataclasses.field(default_factory=dict)
    records_read: bool = False
    checked: frozenset[str] = frozenset()
    listed: bool = False
    list_failed: bool = False
    waited: bool = False
    claimed: frozenset[PodUid] = frozenset()
    in_doubt: Container[PodUid] = frozenset()

    @property
    def blind(self) -> bool:
        """Whether the pods of this node cannot be known: never listed, or the LIST failed."""
        return self.listed and (self.list_failed or not self.table.synced)


@dataclasses.dataclass(frozen=True, slots=True)
class AskKubelet:
    """Ask PodResources for this pod."""

    namespace: str
    name: str


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
class AwaitLock:
    """The Node's watch may lag behind the pods': wait a moment for its next frame."""


Question = AskKubelet | ReadRecords | CheckRunning | ListPods | AwaitLock


@dataclasses.dataclass(frozen=True, slots=True)
class Grant:
    """The container is served: what it gets, and its position in `…-allocated`."""

    candidate: Candidate
    group: int
    shares: tuple[Share, ...]

    @property
    def replay(self) -> Row | None:
        """The row that is answered again, or None for a first answer."""
        return self.candidate.row
