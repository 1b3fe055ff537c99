"""A row of plain mode: one answer to the kubelet, which named ids and no pod."""

import dataclasses
import datetime as dt
import uuid

from agent.core.cluster.pods import PodUid
from agent.core.containers.edits import ContainerEdits
from agent.core.inventory.share import Share
from agent.core.inventory.slices import SliceId
from agent.core.state.holdings import KubeletEpoch


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Holder:
    """A container as PodResources names it; it has no UID there."""

    namespace: str
    pod: str
    container: str


@dataclasses.dataclass(frozen=True, slots=True)
class PlainRow:
    """One answer of plain mode.

    `uid` is drawn for this answer and stands where a pod's UID stands in names of files. `shares`
    are the memory limits that the answer sets, none without `plain.memoryLimits`. `epoch` is the
    kubelet that was answered, later the one that named `holder`. `recorded`: the kubelet's
    checkpoint file named the ids after the answer, which is all that is ever seen of an init
    container. `adopted`: somebody else answered; the row only keeps the ids listed. `resource` is
    the name that was asked by; empty in files from before it was kept.
    """

    uid: PodUid
    slice_ids: tuple[SliceId, ...]
    shares: tuple[Share, ...]
    edits: ContainerEdits
    answered_at: dt.datetime
    epoch: KubeletEpoch
    holder: Holder | None = None
    recorded: bool = False
    adopted: bool = False
    resource: str = ""

    @property
    def confirmed(self) -> bool:
        """Whether the kubelet was ever seen to have booked the answer."""
        return self.holder is not None or self.recorded

    @property
    def has_directory(self) -> bool:
        """Whether the answer mounts a directory of its own: only limits need one."""
        return bool(self.shares)


@dataclasses.dataclass(frozen=True, slots=True)
class Stranger:
    """A container that holds ids of `resource`, and of which nothing says what it was answered."""

    holder: Holder
    ids: tuple[SliceId, ...]
    resource: str

    def row(self, uid: PodUid, now: dt.datetime, epoch: KubeletEpoch) -> PlainRow:
        """A row that keeps the ids listed, and no more."""
        return PlainRow(
            uid=uid,
            slice_ids=self.ids,
            shares=(),
            edits=ContainerEdits(),
            answered_at=now,
            epoch=epoch,
            holder=self.holder,
            adopted=True,
            resource=self.resource,
        )


def adopted_uid(holder: Holder) -> PodUid:
    """The UID of the row of a holder of whom nothing but the name is known."""
    name = f"{holder.namespace}/{holder.pod}/{holder.container}"
    return PodUid(str(uuid.uuid5(uuid.NAMESPACE_OID, name)))
