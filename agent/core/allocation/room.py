"""Checks by HAMi's arithmetic whether a share fits on its GPU beside the live rows.

Per pod and GPU, HAMi counts the greater of two values: the largest init container, and the sum of
the app containers. Init containers run one after another and end before the apps start. Once all
init containers have succeeded, only the app containers count.
Source: HAMi v2.10 pkg/device/initContainer.go, pkg/scheduler/scheduler.go onUpdatePod. Earlier
releases count the peak for as long as the pod exists.
"""

from collections.abc import Iterable, Mapping

import msgspec

from agent.core.cluster.pods import PodUid, PodView, Role
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import SharedGpu
from agent.core.inventory.share import Share
from agent.core.state.ledger import Row


class GpuUse(msgspec.Struct, frozen=True):
    """Memory in MiB and compute in percent."""

    memory_mib: int = 0
    core_percent: int = 0

    def plus(self, other: "GpuUse") -> "GpuUse":
        """The sum."""
        return GpuUse(self.memory_mib + other.memory_mib, self.core_percent + other.core_percent)

    def peak(self, other: "GpuUse") -> "GpuUse":
        """The greater of each."""
        return GpuUse(
            max(self.memory_mib, other.memory_mib), max(self.core_percent, other.core_percent)
        )


class RoomClaim(msgspec.Struct, frozen=True):
    """One container's shares, by role: what a row holds, or what a request wants."""

    pod_uid: PodUid
    role: Role
    shares: tuple[Share, ...]


def claim_of(row: Row) -> RoomClaim:
    """What a row holds."""
    return RoomClaim(row.key.pod_uid, row.role, row.limits)


def is_past_init(pod: PodView) -> bool:
    """Whether the scheduler counts only the app containers of the pod.

    It does so once it has seen that all init containers, sidecars included, ended with exit code 0,
    even if they run again later in a new sandbox. If an app container was created, all ordinary
    init containers have succeeded; the kubelet can lose their states.
    """
    has_begun = any(each.has_run for each in pod.containers if each.role is Role.APP)
    return all(
        each.succeeded or (has_begun and each.role is Role.INIT)
        for each in pod.containers
        if each.role is not Role.APP
    )


def counts(row: Row, pod: PodView | None) -> bool:
    """Whether a live row takes room. `pod` is None if it is not in the pod table."""
    return row.role is Role.APP or pod is None or not is_past_init(pod)


def scheduled_role(role: Role, group: int, pod: PodView | None) -> Role:
    """The role that HAMi's scheduler assumes for the container of that group.

    It takes the index of the group for the index of the container, but writes no group for a
    container without GPUs. So behind an init container without GPUs, it takes an app container for
    an init container. `pod` is None if it is not in the pod table.
    Source: HAMi v2.10 pkg/device/initContainer.go, CollapseInitContainerUsage.
    """
    if pod is None:
        return role
    is_init = group < sum(each.role is not Role.APP for each in pod.containers)
    return Role.INIT if is_init else Role.APP


def scheduled(row: Row, pod: PodView | None) -> RoomClaim | None:
    """The part of a live row that HAMi's scheduler counts; None: it no longer counts the row."""
    role = scheduled_role(row.role, row.group, pod)
    if role is not Role.APP and pod is not None and is_past_init(pod):
        return None
    return RoomClaim(row.key.pod_uid, role, row.limits)


def _use_of(claim: RoomClaim, gpu: SharedGpu) -> GpuUse:
    """What one container uses of one GPU. A share of 0 MiB counts as all registered memory."""
    total = GpuUse()
    for share in claim.shares:
        if share.uuid == gpu.uuid:
            total = total.plus(GpuUse(share.memory_mib or gpu.registered_mib, share.core_percent))
    return total


def pod_use(claims: Iterable[RoomClaim], gpu: SharedGpu) -> GpuUse:
    """What the containers of one pod use of `gpu`: max(largest init, sum of the others)."""
    peak, total = GpuUse(), GpuUse()
    for claim in claims:
        use = _use_of(claim, gpu)
        if claim.role is Role.APP:
            total = total.plus(use)
        else:
            peak = peak.peak(use)
    return peak.peak(total)


def gpu_use(claims: Iterable[RoomClaim], gpu: SharedGpu) -> GpuUse:
    """What all pods together use of `gpu`."""
    by_pod: dict[PodUid, list[RoomClaim]] = {}
    for claim in claims:
        if any(share.uuid == gpu.uuid for share in claim.shares):
            by_pod.setdefault(claim.pod_uid, []).append(claim)
    total = GpuUse()
    for pod_claims in by_pod.values():
        total = total.plus(pod_use(pod_claims, gpu))
    return total


class Shortage(msgspec.Struct, frozen=True):
    """A GPU on which the wanted share does not fit, with the total use including that share."""

    gpu: SharedGpu
    total: GpuUse
    memory: bool
    """True if memory is short, False if compute is."""

    @property
    def amounts(self) -> tuple[str, str, str]:
        """What is short, the total use of it, and the amount that the GPU has."""
        if self.memory:
            return "memory", f"{self.total.memory_mib} MiB", f"{self.gpu.registered_mib} MiB"
        return "compute", f"{self.total.core_percent} %", f"{self.gpu.core_percent} %"


def shortage(
    wanted: RoomClaim, live: Iterable[RoomClaim], gpus: Mapping[GpuUuid, SharedGpu]
) -> Shortage | None:
    """The first GPU of `wanted` that would be oversold, or None if `wanted` fits.

    Every GPU of `wanted` must be in `gpus`.
    """
    claims = (*live, wanted)
    for uuid in dict.fromkeys(share.uuid for share in wanted.shares):
        gpu = gpus[uuid]
        total = gpu_use(claims, gpu)
        if total.memory_mib > gpu.registered_mib:
            return Shortage(gpu, total, memory=True)
        if total.core_percent > gpu.core_percent:
            return Shortage(gpu, total, memory=False)
    return None
