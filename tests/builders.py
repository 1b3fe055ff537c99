"""Domain values for tests: each builder has sensible defaults; `changes` are fields of its kind."""

import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from agent.cluster import ALLOCATED, ContainerView, NodeLock, Phase, PodUid, PodView, Role
from agent.hami.annotations import decode_pod_devices
from agent.hami.region import MemoryUse, RegionGpu, RegionState
from agent.ledger import ContainerEdits, ContainerKey, GrantedShare, Holder, KubeletEpoch, Row
from agent.model import (
    MIB,
    NO_INDEX,
    Condition,
    Gpu,
    GpuUuid,
    Health,
    Inventory,
    Share,
    SharedGpu,
    SliceId,
    slice_id,
    type_name,
)
from agent.usage import ContainerUse

NOON = dt.datetime(2026, 9, 1, 12, 0, 0, tzinfo=dt.UTC)
"""The moment at which tests begin."""

EPOCH = KubeletEpoch(inode=7, ctime_ns=1)
"""The kubelet that recorded the answers."""

NODE = "node-1"
RESOURCE = "nvidia.com/gpu"
G1 = GpuUuid("GPU-11111111-2222-3333-4444-555555555555")
G2 = GpuUuid("GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee")
POD_UID = PodUid("6f1c1f0e-8f5a-4a52-9d2e-6b8b8a1d0001")


def a_uuid(number: int) -> GpuUuid:
    """A well-formed UUID of a GPU, a function of `number`."""
    return GpuUuid(f"GPU-{number:08x}-0000-4000-8000-{number:012x}")


def a_pod_uid(number: int) -> PodUid:
    """A well-formed UID of a pod, a function of `number`."""
    return PodUid(f"{number:08x}-0000-4000-9000-{number:012x}")


def a_gpu(*, index: int = 0, **changes: Any) -> Gpu:
    """A GPU; UUID, PCI bus id and minor follow from the index."""
    gpu = Gpu(
        uuid=a_uuid(index),
        index=index,
        name="NVIDIA H100 80GB HBM3",
        memory_mib=81559,
        pci=f"0000:{0x10 + index:02x}:00.0",
        numa=0,
        minor=index,
    )
    return replace(gpu, **changes)


def a_health(*, condition: Condition = Condition.OK, **changes: Any) -> Health:
    """A health; `serving` follows from the condition unless given."""
    serves = condition not in {Condition.BAD, Condition.LOST}
    return replace(Health(condition=condition, since=NOON, cause="none", serving=serves), **changes)


def a_shared_gpu(*, gpu: Gpu | None = None, **changes: Any) -> SharedGpu:
    """A GPU as it is offered; memory and type follow from the GPU unless given."""
    inner = a_gpu() if gpu is None else gpu
    shared = SharedGpu(
        gpu=inner,
        health=a_health(),
        split_count=10,
        registered_mib=inner.memory_mib or 0,
        core_percent=100,
        type_name=type_name(inner.name),
        mode="hami-core",
    )
    return replace(shared, **changes)


def an_inventory(
    *, count: int = 2, gpus: Iterable[SharedGpu] | None = None, **changes: Any
) -> Inventory:
    """`count` equal GPUs of index 0, 1, …, or the given ones."""
    equal = (a_shared_gpu(gpu=a_gpu(index=n)) for n in range(count))
    shared = tuple(equal if gpus is None else gpus)
    return replace(Inventory(generation=1, gpus=shared, driver_version="570.86.15"), **changes)


def a_container(*, asks: Mapping[str, int] | None = None, **changes: Any) -> ContainerView:
    """A container that asks for one slice; `asks`: mem, mem-percentage, cores."""
    others = tuple((f"nvidia.com/gpu{what}", amount) for what, amount in (asks or {}).items())
    made = ContainerView(name="main", role=Role.APP, count=1, resource=RESOURCE, others=others)
    return replace(made, **changes)


POD = PodView(
    uid=POD_UID,
    namespace="team-a",
    name="train-0",
    node=NODE,
    phase=Phase.PENDING,
    created=NOON,
    containers=(a_container(),),
    scheduled=True,
    scheduler="hami-scheduler",
    resource_version="1",
)


def a_pod(*, annotations: Mapping[str, str] | None = None, **changes: Any) -> PodView:
    """A pending pod of one GPU container; its groups are those that its annotations say."""
    text = (annotations or {}).get(ALLOCATED)
    groups = None if text is None or "groups_error" in changes else decode_pod_devices(text)
    return replace(POD, annotations=dict(annotations or {}), groups=groups, **changes)


def a_share(*, uuid: str = G1, memory_mib: int = 3000, core_percent: int = 30) -> Share:
    """A share of one GPU."""
    return Share(uuid=GpuUuid(uuid), memory_mib=memory_mib, core_percent=core_percent)


def a_row(
    *,
    pod_uid: str = POD_UID,
    container: str = "main",
    namespace: str = "team-a",
    pod: str = "train-0",
    shares: Iterable[Share] | None = None,
    slice_ids: Iterable[str] | None = None,
    **changes: Any,
) -> Row:
    """A ledger row of one container; its ids are slice 0 of each share unless given."""
    held = (a_share(),) if shares is None else tuple(shares)
    ids = (slice_id(share.uuid, 0) for share in held) if slice_ids is None else slice_ids
    row = Row(
        key=ContainerKey(PodUid(pod_uid), container),
        holder=Holder(namespace, pod, container),
        shares=held,
        slice_ids=tuple(map(SliceId, ids)),
        edits=ContainerEdits(),
        answered_at=NOON,
        epoch=EPOCH,
        resource=RESOURCE,
    )
    return replace(row, **changes)


def a_granted_share(
    share: Share, pci: str, mib: int, minor: int | None = None, index: int = NO_INDEX
) -> GrantedShare:
    """A share of a GPU at that place, which registered so much memory."""
    gpu = replace(a_gpu(uuid=share.uuid, pci=pci), minor=minor, index=index)
    return GrantedShare(share, a_shared_gpu(gpu=gpu, registered_mib=mib))


def a_gpu_use(
    uuid: str = G1, *, mib: int = 1500, sm_percent: int = 20, limit_mib: int = 3000
) -> RegionGpu:
    """The use of one GPU by one container."""
    return RegionGpu(
        uuid=uuid,
        memory_limit=limit_mib * MIB,
        memory=MemoryUse(context=100 * MIB, buffer=(mib - 100) * MIB, total=mib * MIB),
        sm_percent=sm_percent,
    )


def a_container_use(
    *gpus: RegionGpu, at: dt.datetime = NOON, idle: dt.timedelta = dt.timedelta()
) -> ContainerUse:
    """What one container uses, `idle` after its last kernel."""
    return ContainerUse(
        at, RegionState.READABLE, gpus or (a_gpu_use(),), last_kernel=at - idle, processes=1
    )


def a_lock(
    *, stamp: dt.datetime = NOON, namespace: str = "team-a", name: str = "train-0"
) -> NodeLock:
    """A node lock; an empty name makes the legacy form."""
    text = stamp.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    value = f"{text},{namespace},{name}" if name else text
    return NodeLock(value=value, stamp=stamp, namespace=namespace if name else "", name=name)
