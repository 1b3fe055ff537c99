"""The facts that the ledger is compared with, and the findings, in both modes."""

import datetime as dt
import uuid
from collections.abc import Mapping, Sequence

import msgspec

from agent.core.cluster.pods import ContainerView, PodTable, PodUid, PodView
from agent.core.containers.edits import ContainerEdits
from agent.core.inventory.slices import SliceId
from agent.core.state.holdings import Holding, KubeletEpoch
from agent.core.state.ledger import PLAIN, ContainerKey, Decider, Holder, Row

EVER = dt.datetime.min.replace(tzinfo=dt.UTC)


class ReconcileFacts(msgspec.Struct, frozen=True):
    """The facts that a reconcile compares with the ledger.

    - `holdings`: the kubelet's answers; `complete`: they are from a List, so they have all pods.
    - `recorded`: the ids in the kubelet's checkpoint file by container; None: not read.
    - `directories`: the names of the container directories; empty: not searched.
    - `since`: when this process began to see all pods.
    - `failed`: since when pods are seen as failed.
    - `idle`: since when rows are seen without a holder.
    """

    table: PodTable
    holdings: Sequence[Holding]
    epoch: KubeletEpoch
    now: dt.datetime
    complete: bool
    recorded: Mapping[ContainerKey, frozenset[SliceId]] | None = None
    directories: frozenset[str] = frozenset()
    since: dt.datetime = EVER
    failed: Mapping[PodUid, dt.datetime] = msgspec.field(default_factory=dict)
    idle: Mapping[ContainerKey, dt.datetime] = msgspec.field(default_factory=dict)


class Adoption(msgspec.Struct, frozen=True):
    """A container that was answered and that the ledger does not know.

    `ids`: the kubelet's; empty: the kubelet lost its checkpoint too.
    """

    pod: PodView
    container: ContainerView
    ids: tuple[SliceId, ...]


class Stranger(msgspec.Struct, frozen=True):
    """A container that holds ids of `resource` and whose answer is not known."""

    holder: Holder
    ids: tuple[SliceId, ...]
    resource: str

    def row(self, now: dt.datetime, epoch: KubeletEpoch) -> Row:
        """A row that only keeps the ids in use. Equal holders and ids get equal keys."""
        name = "/".join((*msgspec.structs.astuple(self.holder), *self.ids))
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


class Findings(msgspec.Struct, frozen=True):
    """What differs between the ledger and the facts.

    - `confirmed`: rows that the kubelet confirms, with their new values.
    - `mismatched`: those of them with a mismatch that was not reported yet.
    - `over`: rows that no container can use any more.
    - `adopt`: containers to adopt. `strangers`: holders whose ids are only kept in use.
    - `idle`: for the next reconcile. `due`: when the next row may be over if nothing changes.
    - `drifted`: how many rows have drift or cannot be compared.
    - `unconfirmed`: how many rows the kubelet should have confirmed by now.
    """

    confirmed: tuple[Row, ...] = ()
    mismatched: tuple[ContainerKey, ...] = ()
    over: tuple[Row, ...] = ()
    adopt: tuple[Adoption, ...] = ()
    strangers: tuple[Stranger, ...] = ()
    idle: Mapping[ContainerKey, dt.datetime] = msgspec.field(default_factory=dict)
    due: dt.datetime | None = None
    drifted: int = 0
    unconfirmed: int = 0
