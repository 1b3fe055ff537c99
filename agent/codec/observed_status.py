"""The status of a node as its objects at the API server show it, where no agent answers."""

import datetime as dt
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from agent.codec.nodelock import decode_node_lock
from agent.codec.register import RegisteredGpu
from agent.codec.register_colon import decode_either
from agent.codec.status_document import (
    AllocationStatus,
    GpuStatus,
    LockStatus,
    NodeStatus,
    ShareStatus,
    StatusDocument,
)
from agent.core.allocation.container_order import pair_groups
from agent.core.allocation.room import RoomClaim, gpu_use, is_past_init
from agent.core.cluster.annotations import CORDON, MUTEX_LOCK, REGISTER
from agent.core.cluster.pods import NodeView, PodView, Role
from agent.core.errors import MalformedText, Refusal, cap
from agent.core.inventory.condition import Condition, Health
from agent.core.inventory.gpu import Gpu
from agent.core.inventory.inventory import SharedGpu
from agent.core.inventory.share import Share
from agent.core.node.cordon import read_cordon

REPORTED: Final = "the Node's register annotation says that it is unhealthy; its agent knows why"


def observed_status(
    node: NodeView, pods: Iterable[PodView], resource: str, now: dt.datetime
) -> StatusDocument:
    """The node by its annotations, and its pods by theirs. What is used is not known.

    Raises:
        MalformedText: the register annotation cannot be read.
    """
    held = [pod for pod in pods if pod.groups and not pod.terminal]
    text = node.annotations.get(REGISTER)
    registered = () if not text else decode_either(text)
    labels = {str(gpu.uuid): str(gpu.index) for gpu in registered}
    parts = [part for pod in held for part in _parts(pod, labels)]
    claims = [claim for claim, row in parts if not row.ended]
    closed = read_cordon(node.annotations.get(CORDON))
    gpus = tuple(_gpu(gpu, claims, closed, now) for gpu in registered)
    rows = sorted(
        (row for _, row in parts), key=lambda row: (row.namespace, row.pod, row.container)
    )
    about = NodeStatus(name=node.name, resource=resource, lock=lock_status(node.annotations))
    return StatusDocument(node=about, gpus=gpus, allocations=tuple(rows))


def lock_status(annotations: Mapping[str, str]) -> LockStatus | None:
    """HAMi's lock on the Node; None if it is free."""
    text = annotations.get(MUTEX_LOCK)
    if text is None:
        return None
    try:
        lock = decode_node_lock(text)
    except MalformedText:
        return LockStatus(since=None, holder=cap(text))
    return LockStatus(since=lock.stamp, holder="/".join(lock.owner) if lock.owner else "")


def _gpu(
    gpu: RegisteredGpu, claims: list[RoomClaim], closed: Collection[str], now: dt.datetime
) -> GpuStatus:
    shared = SharedGpu(
        Gpu(gpu.uuid, gpu.index, gpu.type_name, None, ""),
        Health(Condition.OK, now),
        gpu.split_count,
        gpu.registered_mib,
        gpu.core_percent,
        gpu.type_name,
        gpu.mode,
    )
    use = gpu_use(claims, shared)
    shares = [share for claim in claims for share in claim.shares if share.uuid == gpu.uuid]
    return GpuStatus(
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.type_name.removeprefix("NVIDIA-"),
        numa=gpu.numa,
        mode=gpu.mode,
        condition=Condition.OK if gpu.healthy else Condition.BAD,
        serving=gpu.healthy,
        cordoned=gpu.uuid in closed,
        text="" if gpu.healthy else REPORTED,
        slices=gpu.split_count,
        slices_held=len(shares),
        sellable_mib=gpu.registered_mib,
        promised_mib=use.memory_mib,
        sellable_cores=gpu.core_percent,
        promised_cores=use.core_percent,
    )


def _parts(pod: PodView, labels: Mapping[str, str]) -> Iterator[tuple[RoomClaim, AllocationStatus]]:
    """What each container takes, and how it is shown."""
    roles = {container.name: container.role for container in pod.containers}
    for place, (name, shares) in enumerate(_groups(pod)):
        role = roles.get(name, Role.APP)
        shown = AllocationStatus(
            namespace=pod.namespace,
            pod=pod.name,
            container=name,
            ended=role is Role.INIT and is_past_init(pod),
            shares=tuple(
                ShareStatus(
                    gpu=labels.get(share.uuid, share.uuid),
                    uuid=share.uuid,
                    memory_mib=share.memory_mib,
                    cores=share.core_percent,
                )
                for share in shares
            ),
        )
        yield RoomClaim(pod.uid, role, shares, place), shown


def _groups(pod: PodView) -> Iterator[tuple[str, tuple[Share, ...]]]:
    """The containers with their shares; without names where the two do not fit together."""
    groups = pod.groups or ()
    try:
        yield from ((one.container, one.shares) for one in pair_groups(groups, pod.containers))
    except Refusal:
        yield from (("", group) for group in groups if group)
