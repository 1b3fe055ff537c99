"""Rows of plain mode and what the kubelet says of their holders, for tests."""

import datetime as dt

from agent.cluster import PodUid
from agent.ledger import (
    PLAIN,
    ContainerEdits,
    ContainerKey,
    Decider,
    Holder,
    Holding,
    KubeletEpoch,
    Row,
)
from agent.model import Share, SliceId, slice_id
from tests.builders import NOON, a_gpu

RESOURCE = "nvidia.com/gpu"
EPOCH, NEXT = KubeletEpoch(7, 1), KubeletEpoch(7, 2)
UID = PodUid("a" * 32)
HOLDER = Holder("team-a", "train-0", "main")


def ids(*numbers: int, gpu: int = 0) -> tuple[SliceId, ...]:
    """Slices of one GPU, as the kubelet names them."""
    return tuple(slice_id(a_gpu(index=gpu).uuid, number) for number in numbers)


def a_plain_row(
    *,
    uid: PodUid = UID,
    slice_ids: tuple[SliceId, ...] = ids(0),
    limited: bool = True,
    minute: int = 0,
    epoch: KubeletEpoch = EPOCH,
    holder: Holder | None = None,
    confirmed: bool = False,
    adopted: bool = False,
    resource: str = RESOURCE,
) -> Row:
    """A row of plain mode, answered `minute` minutes after noon."""
    return Row(
        key=ContainerKey(uid, PLAIN),
        slice_ids=slice_ids,
        shares=(Share(a_gpu(index=0).uuid, 8155, 0),) if limited else (),
        edits=ContainerEdits(),
        answered_at=NOON + dt.timedelta(minutes=minute),
        epoch=epoch,
        holder=holder,
        decided_by=Decider.KUBELET,
        confirmed=confirmed or adopted or holder is not None,
        adopted=adopted,
        resource=resource,
    )


def holds(holder: Holder, *slice_ids: SliceId, resource: str = RESOURCE) -> Holding:
    """The holder's pod at the kubelet, with these ids for its one container."""
    held = {resource: frozenset(slice_ids)} if slice_ids else {}
    return Holding(holder.namespace, holder.pod, {holder.container: held})
