"""What containers request of GPUs, what pods take, and whether one more share fits.

What is true is Kubernetes' rule: a sidecar runs as long as its pod; ordinary init containers run
one after another, each beside the sidecars before it, and end before the apps start. So a pod takes
the greater of the peak of its init phase and the sum of app containers and sidecars; once the init
containers have succeeded, the sum.

HAMi 2.10 takes sidecars for ordinary init containers, so it can place more than fits. All other
releases count at least what is true.
Source: Kubernetes component-helpers resource/helpers.go AggregateContainerRequests; HAMi v2.10
pkg/device/initContainer.go, pkg/scheduler/scheduler.go onUpdatePod.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Final

import msgspec

from agent.cluster import NOT_WHOLE, PodTable, PodUid, PodView, Role
from agent.errors import Refusal, RefusalReason, cap
from agent.ledger import Ledger, Row
from agent.model import Condition, GpuUuid, Share, SharedGpu
from agent.setting import Field, ValueType, optional_resource, whole

# What HAMi's scheduler makes of a container's request of GPUs.
#
# Source: HAMi v2.10 pkg/device/nvidia/device.go, GenerateResourceRequests and Fit.

PERCENT_UNSET: Final = 101
"""The memory percentage of a request that names none."""
_INT32_MAX: Final = 2**31 - 1


def _rule(key: str, read: ValueType, words: str) -> Field:
    text = f"Requests of pods as HAMi's scheduler reads them: {words}."
    return Field(key, read, text, live=True, profiled=False)


_AMOUNT: Final = whole(-(2**31), _INT32_MAX)


class RequestRules(msgspec.Struct, frozen=True):
    """Resource names and defaults of HAMi's device-config.yaml. `known`: that file was read."""

    # fmt: off
    memory: Annotated[str, _rule("sharing.memoryResourceName", optional_resource,
        "the resource for MiB of each GPU")] = "nvidia.com/gpumem"
    memory_percent: Annotated[str, _rule("sharing.memoryPercentResourceName", optional_resource,
        "the resource for percent of each GPU's memory")] = "nvidia.com/gpumem-percentage"
    cores: Annotated[str, _rule("sharing.coreResourceName", optional_resource,
        "the resource for percent of compute")] = "nvidia.com/gpucores"
    # fmt: on
    memory_factor: Annotated[int, _rule("sharing.memoryFactor", _AMOUNT, "the factor on MiB")] = 1
    default_memory_mib: Annotated[
        int, _rule("sharing.defaultMemoryMiB", _AMOUNT, "MiB in place of none; 0: all memory")
    ] = 0
    default_core_percent: Annotated[
        int, _rule("sharing.defaultCorePercent", _AMOUNT, "compute in place of none; 0: no limit")
    ] = 0
    known: bool = False


class ContainerRequest(msgspec.Struct, frozen=True):
    """The request of one container: `count` GPUs, each with memory (0: by percent) and cores."""

    count: int
    memory_mib: int
    memory_percent: int
    core_percent: int

    def memory_on(self, registered_mib: int) -> int:
        """The MiB that the scheduler gives of a GPU that registered so many."""
        is_by_percent = self.memory_mib == 0 and self.memory_percent != PERCENT_UNSET
        return registered_mib * self.memory_percent // 100 if is_by_percent else self.memory_mib

    @property
    def cores(self) -> int:
        """The percent of compute that the scheduler gives of each GPU; 0: no limit."""
        return min(self.core_percent, 100)


def read_request(
    count: int, amounts: Mapping[str, int], rules: RequestRules
) -> ContainerRequest | None:
    """The request for `count` GPUs. `amounts`: by resource its limit, else its request.

    None: it requests no GPU, or HAMi drops the whole request because it cannot count its memory.
    """
    factor = max(rules.memory_factor, 1)
    memory_mib = amounts.get(rules.memory, 0)
    if count <= 0 or not 0 <= memory_mib <= _INT32_MAX // factor:
        return None
    memory_mib *= factor
    percent = min(amounts.get(rules.memory_percent, 0), 100)
    percent = percent if percent > 0 else PERCENT_UNSET
    if percent == PERCENT_UNSET and memory_mib == 0:
        memory_mib = rules.default_memory_mib
        percent = percent if memory_mib else 100
    cores = amounts.get(rules.cores, NOT_WHOLE)
    cores = cores if 0 <= cores <= _INT32_MAX else rules.default_core_percent
    return ContainerRequest(count, memory_mib, percent, cores)


class GpuUse(msgspec.Struct, frozen=True):
    """Memory in MiB and compute in percent."""

    memory_mib: int = 0
    core_percent: int = 0

    def __add__(self, other: "GpuUse") -> "GpuUse":
        return GpuUse(self.memory_mib + other.memory_mib, self.core_percent + other.core_percent)

    def peak(self, other: "GpuUse") -> "GpuUse":
        """The greater of each."""
        memory_mib = max(self.memory_mib, other.memory_mib)
        return GpuUse(memory_mib, max(self.core_percent, other.core_percent))


class RoomClaim(msgspec.Struct, frozen=True):
    """One container's shares, by role: what a row holds, or what a request wants.

    `place`: its order among the containers of its pod.
    """

    pod_uid: PodUid
    role: Role
    shares: tuple[Share, ...]
    place: int = 0


def claim_of(row: Row) -> RoomClaim:
    """What a row holds."""
    return RoomClaim(row.key.pod_uid, row.role, row.limits, row.group)


def promised(ledger: Ledger, table: PodTable, gpu: SharedGpu) -> GpuUse:
    """What is allocated of `gpu`: the sum by which the next pod is let in."""
    rows = (row for row in ledger.rows_on(gpu.uuid) if row.takes_room(table))
    return gpu_use(map(claim_of, rows), gpu)


def scheduled_role(role: Role, group: int, pod: PodView | None) -> Role:
    """The role that HAMi 2.10 assumes for the container of that group: init or app.

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
    """The part of a live row that HAMi 2.10 counts; None: it no longer counts the row.

    It drops init containers once it has seen that all, sidecars included, ended with exit code 0.
    """
    role = scheduled_role(row.role, row.group, pod)
    if role is not Role.APP and pod is not None and pod.is_past_init:
        sidecars = (each for each in pod.containers if each.role is Role.SIDECAR)
        if all(each.succeeded for each in sidecars):
            return None
    return RoomClaim(row.key.pod_uid, role, row.limits, row.group)


def pod_use(claims: Iterable[RoomClaim], gpu: SharedGpu) -> GpuUse:
    """What the containers of one pod use of `gpu`: max(peak of init, apps and sidecars)."""
    peak, lasting = GpuUse(), GpuUse()
    for claim in sorted(claims, key=lambda one: (one.place, one.role is not Role.INIT)):
        # A share of 0 MiB counts as all registered memory.
        of_gpu = (share for share in claim.shares if share.uuid == gpu.uuid)
        use = sum(
            (GpuUse(one.memory_mib or gpu.registered_mib, one.core_percent) for one in of_gpu),
            lasting,
        )
        if claim.role is Role.INIT:
            peak = peak.peak(use)
        else:
            lasting = use
    return peak.peak(lasting)


def gpu_use(claims: Iterable[RoomClaim], gpu: SharedGpu) -> GpuUse:
    """What all pods together use of `gpu`."""
    by_pod: dict[PodUid, list[RoomClaim]] = {}
    for claim in claims:
        if any(share.uuid == gpu.uuid for share in claim.shares):
            by_pod.setdefault(claim.pod_uid, []).append(claim)
    return sum((pod_use(pod_claims, gpu) for pod_claims in by_pod.values()), GpuUse())


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
    """The first GPU of `wanted` that would be oversold, or None if `wanted` fits."""
    claims = (*live, wanted)
    for uuid in dict.fromkeys(share.uuid for share in wanted.shares):
        gpu = gpus[uuid]
        total = gpu_use(claims, gpu)
        if total.memory_mib > gpu.registered_mib:
            return Shortage(gpu, total, memory=True)
        if total.core_percent > gpu.core_percent:
            return Shortage(gpu, total, memory=False)
    return None


def require_serving(gpu: SharedGpu, who: str) -> None:
    """Require that new containers may use the GPU. `who`: whose it is. Raises Refusal."""
    if gpu.serving:
        return
    if gpu.present and gpu.health.condition is Condition.UNMONITORED:
        what = (
            f"{who} cannot start: the driver has not answered for its {gpu.gpu.title} for too long"
        )
        to_do = "an operator has to check the node's driver."
        raise Refusal(RefusalReason.DRIVER_UNRESPONSIVE, f"{what}; {to_do}")
    what = f"{who} cannot start: its {gpu.gpu.title} {cap(gpu.unavailable_reason)}"
    to_do = "create the pod again, so that it is placed on another GPU."
    raise Refusal(RefusalReason.BAD_GPU, f"{what}; {to_do}")
