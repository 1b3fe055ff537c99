"""Whether a share fits on its GPU beside the live rows, by HAMi's arithmetic.

Per pod and GPU what counts is the greater of the largest init container and the sum of the app
containers, for init containers run one after another and are gone before the apps start. Once all
init containers have succeeded only the app containers count.
Source: HAMi v2.10 pkg/device/initContainer.go, pkg/scheduler/scheduler.go onUpdatePod. Earlier
releases count more: the peak for as long as the pod is there.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from agent.core.cluster.pods import PodUid, PodView, Role
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import SharedGpu
from agent.core.inventory.share import Share
from agent.core.state.ledger import Row


@dataclasses.dataclass(frozen=True, slots=True)
class GpuUse:
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


@dataclasses.dataclass(frozen=True, slots=True)
class RoomClaim:
    """One container's shares, by role: what a row holds, or what a request wants."""

    pod_uid: PodUid
    role: Role
    shares: tuple[Share, ...]


def claim_of(row: Row) -> RoomClaim:
    """What a row holds."""
    return RoomClaim(row.key.pod_uid, row.role, row.shares)


def is_past_init(pod: PodView) -> bool:
    """Whether the scheduler counts only the app containers of the pod.

    It does so from when it first sees that all init containers have ended with exit code 0, also
    when they run again later because the pod's sandbox is made anew. To it a sidecar is one of
    them. An app container that was made tells the same of the ordinary ones, whose states the
    kubelet can lose.
    """
    has_begun = any(one.has_run for one in pod.containers if one.role is Role.APP)
    return all(
        one.succeeded or (has_begun and one.role is Role.INIT)
        for one in pod.containers
        if one.role is not Role.APP
    )


def counts(row: Row, pod: PodView | None) -> bool:
    """Whether a live row takes room yet; `pod` is None where it cannot be seen."""
    return row.role is Role.APP or pod is None or not is_past_init(pod)


def scheduled_role(role: Role, group: int, pod: PodView | None) -> Role:
    """What HAMi's scheduler takes the container of that group for; `pod` None: it is not seen.

    It goes by the number of the group among those of the annotation, as if every container had one.
    It writes none for a container without GPUs, so that behind an init container without GPUs it
    takes an app container for an init container.
    Source: HAMi v2.10 pkg/device/initContainer.go, CollapseInitContainerUsage.
    """
    if pod is None:
        return role
    is_init = group < sum(one.role is not Role.APP for one in pod.containers)
    return Role.INIT if is_init else Role.APP


def scheduled(row: Row, pod: PodView | None) -> RoomClaim | None:
    """What HAMi's scheduler counts of a live row; None: nothing any more."""
    role = scheduled_role(row.role, row.group, pod)
    if role is not Role.APP and pod is not None and is_past_init(pod):
        return None
    return RoomClaim(row.key.pod_uid, role, row.shares)


def _use_of(claim: RoomClaim, gpu: SharedGpu) -> GpuUse:
    """What one container uses of one GPU; 0 MiB means the whole of it."""
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
        by_pod.setdefault(claim.pod_uid, []).append(claim)
    total = GpuUse()
    for pod_claims in by_pod.values():
        total = total.plus(pod_use(pod_claims, gpu))
    return total


@dataclasses.dataclass(frozen=True, slots=True)
class Shortage:
    """A GPU on which the wanted share does not fit: what is there, what all together would use."""

    gpu: SharedGpu
    total: GpuUse
    memory: bool
    """True: memory is short. False: compute is."""

    @property
    def amounts(self) -> tuple[str, str, str]:
        """What is short, how much of it is promised, and how much there is."""
        if self.memory:
            return "memory", f"{self.total.memory_mib} MiB", f"{self.gpu.registered_mib} MiB"
        return "compute", f"{self.total.core_percent} %", f"{self.gpu.core_percent} %"


def shortage(
    wanted: RoomClaim, live: Iterable[RoomClaim], gpus: Mapping[GpuUuid, SharedGpu]
) -> Shortage | None:
    """The first GPU of `wanted` that would be oversold, or None: it fits.

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
