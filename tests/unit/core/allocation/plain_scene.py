"""Rows of plain mode and what the kubelet says of their holders, for tests."""

import datetime as dt
from typing import Any

from msgspec.structs import replace

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


def a_plain_row(*, uid: PodUid = UID, limited: bool = True, minute: int = 0, **changes: Any) -> Row:
    """A row of plain mode, answered `minute` minutes after noon; one with a holder is confirmed."""
    row = Row(
        key=ContainerKey(uid, PLAIN),
        slice_ids=ids(0),
        shares=(Share(a_gpu(index=0).uuid, 8155, 0),) if limited else (),
        edits=ContainerEdits(),
        answered_at=NOON + dt.timedelta(minutes=minute),
        epoch=EPOCH,
        holder=None,
        decided_by=Decider.KUBELET,
        confirmed=bool(changes.get("adopted") or changes.get("holder")),
        resource=RESOURCE,
    )
    return replace(row, **changes)


def holds(holder: Holder, *slice_ids: SliceId, resource: str = RESOURCE) -> Holding:
    """The holder's pod at the kubelet, with these ids for its one container."""
    held = {resource: frozenset(slice_ids)} if slice_ids else {}
    return Holding(holder.namespace, holder.pod, {holder.container: held})
