"""Domain values for tests: every builder takes keywords only and has a sensible default."""

import datetime as dt
from collections.abc import Iterable, Mapping

import msgspec

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
    Link,
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


def a_gpu(
    *,
    uuid: str | None = None,
    index: int = 0,
    name: str = "NVIDIA H100 80GB HBM3",
    memory_mib: int | None = 81559,
    pci: str | None = None,
    numa: int | None = 0,
    minor: int | None = None,
    mig_enabled: bool = False,
    links: tuple[Link, ...] = (),
) -> Gpu:
    """A GPU; UUID, PCI bus id and minor follow from the index unless given."""
    return Gpu(
        uuid=a_uuid(index) if uuid is None else GpuUuid(uuid),
        index=index,
        name=name,
        memory_mib=memory_mib,
        pci=f"0000:{0x10 + index:02x}:00.0" if pci is None else pci,
        numa=numa,
        minor=index if minor is None else minor,
        mig_enabled=mig_enabled,
        links=links,
    )


def a_health(
    *,
    condition: Condition = Condition.OK,
    serving: bool | None = None,
    since: dt.datetime = NOON,
    cause: str = "none",
    text: str = "",
    xid: int | None = None,
) -> Health:
    """A health; `serving` follows from the condition unless given."""
    serves = condition not in {Condition.BAD, Condition.LOST} if serving is None else serving
    return Health(condition=condition, since=since, cause=cause, text=text, xid=xid, serving=serves)


def a_shared_gpu(  # noqa: PLR0913 -- keyword-only, all have defaults
    *,
    gpu: Gpu | None = None,
    health: Health | None = None,
    split_count: int = 10,
    registered_mib: int | None = None,
    core_percent: int = 100,
    mode: str = "hami-core",
    present: bool = True,
    there: bool = True,
    obstacle: str = "",
    wanted: bool = True,
    numa_hint: bool = True,
) -> SharedGpu:
    """A GPU as it is offered; memory and type follow from the GPU unless given."""
    inner = a_gpu() if gpu is None else gpu
    return SharedGpu(
        gpu=inner,
        health=a_health() if health is None else health,
        split_count=split_count,
        registered_mib=(inner.memory_mib or 0) if registered_mib is None else registered_mib,
        core_percent=core_percent,
        type_name=type_name(inner.name),
        mode=mode,
        present=present,
        there=there,
        obstacle=obstacle,
        wanted=wanted,
        numa_hint=numa_hint,
    )


def an_inventory(
    *,
    count: int = 2,
    gpus: Iterable[SharedGpu] | None = None,
    generation: int = 1,
    driver_version: str = "570.86.15",
) -> Inventory:
    """`count` equal GPUs of index 0, 1, …, or the given ones."""
    shared = (
        tuple(a_shared_gpu(gpu=a_gpu(index=n)) for n in range(count))
        if gpus is None
        else tuple(gpus)
    )
    return Inventory(generation=generation, gpus=shared, driver_version=driver_version)


def a_container(
    *,
    name: str = "main",
    role: Role = Role.APP,
    count: int = 1,
    control_disabled: bool = False,
    running_id: str | None = None,
    asks: Mapping[str, int] | None = None,
    resource: str = RESOURCE,
) -> ContainerView:
    """A container that asks for `count` slices; `asks`: mem, mem-percentage, cores."""
    return ContainerView(
        name=name,
        role=role,
        count=count,
        control_disabled=control_disabled,
        running_id=running_id,
        resource=resource,
        others=tuple((f"nvidia.com/gpu{what}", amount) for what, amount in (asks or {}).items()),
    )


def a_pod(  # noqa: PLR0913 -- keyword-only, all have defaults
    *,
    uid: str = POD_UID,
    namespace: str = "team-a",
    name: str = "train-0",
    node: str = NODE,
    phase: Phase = Phase.PENDING,
    created: dt.datetime = NOON,
    containers: Iterable[ContainerView] | None = None,
    annotations: Mapping[str, str] | None = None,
    static: bool = False,
    scheduled: bool = True,
    started: bool = False,
    scheduler: str = "hami-scheduler",
    reason: str = "",
    message: str = "",
    resource_version: str = "1",
    groups_error: str = "",
    reusable_name: bool = False,
) -> PodView:
    """A pending pod of one GPU container; its groups are those that its annotations say."""
    text = (annotations or {}).get(ALLOCATED)
    return PodView(
        uid=PodUid(uid),
        namespace=namespace,
        name=name,
        node=node,
        phase=phase,
        created=created,
        containers=(a_container(),) if containers is None else tuple(containers),
        annotations={} if annotations is None else dict(annotations),
        static=static,
        scheduled=scheduled,
        started=started,
        scheduler=scheduler,
        reusable_name=reusable_name,
        reason=reason,
        message=message,
        resource_version=resource_version,
        groups=None if text is None or groups_error else decode_pod_devices(text),
        groups_error=groups_error,
    )


def a_share(*, uuid: str = G1, memory_mib: int = 3000, core_percent: int = 30) -> Share:
    """A share of one GPU."""
    return Share(uuid=GpuUuid(uuid), memory_mib=memory_mib, core_percent=core_percent)


def a_row(  # noqa: PLR0913 -- keyword-only, all have defaults
    *,
    pod_uid: str = POD_UID,
    container: str = "main",
    namespace: str = "team-a",
    pod: str = "train-0",
    role: Role = Role.APP,
    group: int = 0,
    shares: Iterable[Share] | None = None,
    slice_ids: Iterable[str] | None = None,
    edits: ContainerEdits | None = None,
    answered_at: dt.datetime = NOON,
    epoch: KubeletEpoch | None = None,
    confirmed: bool = False,
    offered: bool = False,
    resource: str = RESOURCE,
    lock: str = "",
) -> Row:
    """A ledger row of one container; its ids are slice 0 of each share unless given."""
    held = (a_share(),) if shares is None else tuple(shares)
    ids = (
        tuple(slice_id(share.uuid, 0) for share in held)
        if slice_ids is None
        else tuple(SliceId(text) for text in slice_ids)
    )
    return Row(
        key=ContainerKey(PodUid(pod_uid), container),
        holder=Holder(namespace, pod, container),
        role=role,
        group=group,
        shares=held,
        slice_ids=ids,
        edits=ContainerEdits() if edits is None else edits,
        answered_at=answered_at,
        epoch=EPOCH if epoch is None else epoch,
        confirmed=confirmed,
        offered=offered,
        resource=resource,
        lock=lock,
    )


def a_granted_share(
    share: Share, pci: str, mib: int, minor: int | None = None, index: int = NO_INDEX
) -> GrantedShare:
    """A share of a GPU at that place, which registered so much memory."""
    gpu = msgspec.structs.replace(a_gpu(uuid=share.uuid, pci=pci), minor=minor, index=index)
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
