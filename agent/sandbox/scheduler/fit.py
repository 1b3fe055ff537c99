"""Whether a pod fits on a node, and on which GPUs; if not, why, in the scheduler's words.

Source: HAMi v2.10 pkg/device/nvidia/device.go:Fit, pkg/scheduler/score.go:scoreNode.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agent.core.share import Share
from agent.sandbox.scheduler.model import (
    PERCENT_UNSET,
    GpuState,
    Load,
    NodeState,
    Reasons,
    Request,
)
from agent.sandbox.scheduler.steering import Steering

Groups = tuple[tuple[Share, ...], ...]


@dataclass(frozen=True, slots=True)
class NodeFit:
    """A node's answer: the groups of shares, or the reason (then `groups` is None)."""

    groups: Groups | None
    reason: str = ""


def fit_pod(
    node: NodeState, requests: Sequence[Request | None], inits: int, steering: Steering
) -> NodeFit:
    """Place all containers of a pod on one node.

    The first `inits` requests are those of init containers: each sees the node as it is, for they
    run one after another. The others add up. A container without a request has no group: HAMi
    keeps its empty groups under the name of the GPU's model, which nobody writes out.
    """
    visible = tuple(gpu for gpu in node.gpus if "nvidia" in gpu.capacity.type_name.lower())
    groups: list[tuple[Share, ...]] = []
    running: Sequence[GpuState] = visible
    for position, request in enumerate(requests):
        if request is None:
            continue
        gpus = steering.order(visible if position < inits else running)
        if request.count > len(gpus):
            return NodeFit(None, "NodeInsufficientDevice")
        shares, reasons = _fit_container(gpus, request, node.cordoned, steering)
        if shares is None:
            return NodeFit(None, _describe(reasons, len(gpus)))
        if position >= inits:
            running = _place(gpus, shares)
        groups.append(shares)
    return NodeFit(tuple(groups))


def _fit_container(
    gpus: Sequence[GpuState], request: Request, cordoned: frozenset[str], steering: Steering
) -> tuple[tuple[Share, ...] | None, Reasons]:
    reasons: Counter[str] = Counter()
    picked: list[Share] = []
    numa: int | None = None
    for gpu in reversed(gpus):
        refusal = _refuse_kind(gpu, cordoned, steering)
        if refusal is None and steering.numa_bind and numa != gpu.capacity.numa:
            if picked:
                reasons["NumaNotFit"] += len(picked)
            numa, picked = gpu.capacity.numa, []
        share = _share_of(gpu, request)
        refusal = refusal or _refuse_room(gpu, share, steering)
        if refusal is not None:
            reasons[refusal] += 1
            continue
        picked.append(share)
        if len(picked) == request.count:
            return tuple(picked), {}
    if picked:
        reasons["AllocatedCardsInsufficientRequest"] = len(picked)
    return None, reasons


def _refuse_kind(gpu: GpuState, cordoned: frozenset[str], steering: Steering) -> str | None:
    """What speaks against a GPU before its NUMA node is looked at."""
    if not gpu.capacity.healthy:
        return "CardNotHealth"
    if gpu.capacity.uuid in cordoned:
        return "CardCordoned"
    return None if steering.admits_type(gpu.capacity) else "CardTypeMismatch"


def _refuse_room(gpu: GpuState, share: Share, steering: Steering) -> str | None:
    """What speaks against a GPU of the right kind; the order of the questions is HAMi's."""
    has, used = gpu.capacity, gpu.load
    asked = share.core_percent
    is_full = has.core_percent != 0 and used.core_percent == has.core_percent
    refusals = (
        ("CardUuidMismatch", not steering.admits_uuid(has)),
        ("CardTimeSlicingExhausted", has.split_count <= used.slots),
        ("ExclusiveDeviceAllocateConflict", steering.is_mutex and used.slots > 0),
        ("CardInsufficientMemory", has.registered_mib - used.memory_mib < share.memory_mib),
        ("CardInsufficientCore", has.core_percent - used.core_percent < asked),
        (
            "ExclusiveDeviceAllocateConflict",
            has.core_percent == 100 and asked == 100 and used.slots > 0,
        ),
        ("CardComputeUnitsExhausted", is_full and asked == 0),
    )
    return next((reason for reason, applies in refusals if applies), None)


def _share_of(gpu: GpuState, request: Request) -> Share:
    memory_mib = request.memory_mib
    if memory_mib == 0 and request.memory_percent != PERCENT_UNSET:
        memory_mib = gpu.capacity.registered_mib * request.memory_percent // 100
    return Share(gpu.capacity.uuid, memory_mib, min(request.core_percent, 100))


def _place(gpus: Sequence[GpuState], shares: Sequence[Share]) -> list[GpuState]:
    """The GPUs with the shares on them, in the order they were sorted: later ties depend on it."""
    loads = {share.uuid: Load(1, share.memory_mib, share.core_percent) for share in shares}
    return [gpu.with_load(loads.get(gpu.capacity.uuid, Load())) for gpu in gpus]


def _describe(reasons: Reasons, total: int) -> str:
    return ", ".join(sorted(f"{count}/{total} {reason}" for reason, count in reasons.items()))
