"""What the ledger is held against, and what differs: the same, whoever decides the shares."""

import dataclasses
import datetime as dt
import uuid
from collections.abc import Mapping, Sequence

from agent.core.cluster.pods import ContainerView, PodTable, PodUid, PodView
from agent.core.containers.edits import ContainerEdits
from agent.core.inventory.slices import SliceId
from agent.core.state.holdings import Holding, KubeletEpoch
from agent.core.state.ledger import PLAIN, ContainerKey, Decider, Holder, Row

EVER = dt.datetime.min.replace(tzinfo=dt.UTC)


@dataclasses.dataclass(frozen=True, slots=True)
class ReconcileFacts:
    """What reconcile looks at.

    `holdings` are the kubelet's answers; `complete`: they are all pods it knows (a List).
    `recorded`: the ids of each container in the kubelet's checkpoint file, None where it was not
    read. `directories`: the names of container directories, where they were looked for. `since`:
    when this process began to see all pods. `failed`: since when rows' pods were seen as failed.
    `idle`: since when rows were seen without a holder.
    """

    table: PodTable
    holdings: Sequence[Holding]
    epoch: KubeletEpoch
    now: dt.datetime
    complete: bool
    recorded: Mapping[ContainerKey, frozenset[SliceId]] | None = None
    directories: frozenset[str] = frozenset()
    since: dt.datetime = EVER
    failed: Mapping[PodUid, dt.datetime] = dataclasses.field(default_factory=dict)
    idle: Mapping[ContainerKey, dt.datetime] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Adoption:
    """A container that was answered and that the ledger does not know.

    `ids` are the kubelet's; none: it has lost its records as well.
    """

    pod: PodView
    container: ContainerView
    ids: tuple[SliceId, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Stranger:
    """A container that holds ids of `resource`, and of which nothing says what it was answered."""

    holder: Holder
    ids: tuple[SliceId, ...]
    resource: str

    def row(self, now: dt.datetime, epoch: KubeletEpoch) -> Row:
        """A row that keeps the ids listed, and no more: the same for the same holder and ids."""
        name = "/".join((*dataclasses.astuple(self.holder), *self.ids))
        return Row(
            key=ContainerKey(PodUid(uuid.uuid5(uuid.NAMESPACE_OID, name).hex), PLAIN),
            holder=self.holder,
            shares=(),
            slice_ids=self.ids,
            edits=ContainerEdits(),
            answered_at=now,
            epoch=epoch,
            decided_by=Decider.KUBELET,
            confirmed=True,
            adopted=True,
            resource=self.resource,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """What differs.

    `confirmed`: rows with what was learnt of them; those in `mismatched`, too, are of other GPUs
    than was answered and offered, which was not said yet. `over`: rows by which nobody can live
    any more. `adopt`: containers to take over. `strangers`: holders whose ids are only to be kept,
    as are those of `adopt` that cannot be read. `idle`: for the next look. `due`: when the next row
    may be over if nothing changes. `drifted`: rows of other GPUs which nobody could prevent, and
    rows that cannot be compared. `unconfirmed`: rows that the kubelet should have confirmed by now.
    """

    confirmed: tuple[Row, ...] = ()
    mismatched: tuple[ContainerKey, ...] = ()
    over: tuple[Row, ...] = ()
    adopt: tuple[Adoption, ...] = ()
    strangers: tuple[Stranger, ...] = ()
    idle: Mapping[ContainerKey, dt.datetime] = dataclasses.field(default_factory=dict)
    due: dt.datetime | None = None
    drifted: int = 0
    unconfirmed: int = 0
