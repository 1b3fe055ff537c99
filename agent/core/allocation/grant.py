"""Decides whether a container may get what the scheduler's annotation says.

Tenants can write annotations. So every GPU and amount is checked against the pod's request, which
nobody can change, the inventory and the ledger.
"""

from collections.abc import Iterable, Mapping

import msgspec

from agent.core.allocation.container_order import Assignment, pair_groups
from agent.core.allocation.evidence import (
    AskKubelet,
    Candidate,
    Evidence,
    Grant,
    ListPods,
    Question,
)
from agent.core.allocation.requests import read_request
from agent.core.allocation.right import lock_of
from agent.core.allocation.room import (
    RoomClaim,
    Shortage,
    claim_of,
    counts,
    scheduled,
    scheduled_role,
    shortage,
)
from agent.core.allocation.settings import MatchSettings, UnlockedPods
from agent.core.cluster.annotations import ALLOCATED, VGPU_NODE
from agent.core.cluster.pods import PodView
from agent.core.errors import Refusal, RefusalReason, cap
from agent.core.inventory.condition import Condition
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import SharedGpu
from agent.core.inventory.share import Share
from agent.core.state.ledger import Row


def replay(candidate: Candidate, row: Row, evidence: Evidence) -> Question | Grant:
    """The same answer again. Raises Refusal if one of its GPUs is gone, lost or in MIG mode.

    A GPU that the operator has filtered out since still counts: its container may start again.
    """
    name = "/".join(candidate.pod.key)
    for share in row.shares:
        gpu = evidence.inventory.find(share.uuid)
        # In MIG mode nothing can use the whole GPU.
        is_whole = gpu is not None and gpu.there and not gpu.gpu.mig_enabled
        if gpu is None or not is_whole or gpu.health.condition is Condition.LOST:
            if not evidence.listed:
                # A pod that the watch has not shown may ask, after this one was refused.
                return ListPods()
            raise Refusal(
                RefusalReason.BAD_GPU,
                f"Container {row.key.container} of pod {name} holds GPU {share.uuid}, which is "
                "gone, lost or in MIG mode; delete the pod so that it is placed again.",
            )
    return Grant(candidate, row.group, row.shares)


def check(candidate: Candidate, evidence: Evidence, settings: MatchSettings) -> Question | Grant:
    """Grant what the annotation says if its GPUs serve and have room, or ask. Raises Refusal."""
    group, shares = _assigned(candidate, settings)
    gpus = _usable(candidate, shares, evidence)
    lock = lock_of(candidate.pod, evidence)
    _require_requested(candidate, shares, gpus, settings, has_lock=lock is not None)
    uid, pods = candidate.pod.uid, evidence.table.pods
    # A dead row does not count here. Reconcile closes it and removes its directory.
    beside = {row.key: row for uuid in gpus for row in evidence.ledger.rows_on(uuid)}
    live = [row for row in beside.values() if _live(row, evidence)]
    wanted = RoomClaim(uid, candidate.container.role, shares, group)
    true = [claim_of(row) for row in live if counts(row, pods.get(row.key.pod_uid))]
    own = shortage(wanted, (claim for claim in true if claim.pod_uid == uid), gpus)
    if own is not None:
        raise _oversold(candidate, own, alone=True)
    oversold = shortage(wanted, true, gpus)
    hami = [claim for row in live if (claim := scheduled(row, pods.get(row.key.pod_uid)))]
    role = scheduled_role(wanted.role, group, candidate.pod)
    short = oversold and shortage(msgspec.structs.replace(wanted, role=role), hami, gpus)
    if short is None or oversold is None:
        return Grant(candidate, group, shares, lock=lock.value if lock else "", oversold=oversold)
    # One of the two sums must fit. Another pod that has ended, unseen as yet, may be in the way.
    full = {oversold.gpu.uuid, short.gpu.uuid}
    in_the_way = [
        row
        for row in live
        if row.key.pod_uid != uid and any(share.uuid in full for share in row.limits)
    ]
    for row in in_the_way if evidence.books.witnessed else ():
        if (row.namespace, row.pod) not in evidence.known:
            return AskKubelet(row.namespace, row.pod)
    if in_the_way and not evidence.listed:
        # The scheduler's watch may have shown a change that the agent's watch has not.
        return ListPods()
    raise _oversold(candidate, oversold)


def _require_requested(
    candidate: Candidate,
    shares: Iterable[Share],
    gpus: Mapping[GpuUuid, SharedGpu],
    settings: MatchSettings,
    *,
    has_lock: bool,
) -> None:
    """Require that no share is more than the container requests. Raises Refusal.

    HAMi after 2.10 requires the same. `gpus` have the greatest amounts that they registered lately,
    so that a percentage of an earlier amount is not more. 0 % of compute is no limit, and 0 MiB is
    all of the memory. Without a lock, nothing else tells that the scheduler wrote the annotation:
    amounts must be the same as in the request then, and the rules that are known must do.
    """
    container, rules = candidate.container, settings.requests
    is_exact = settings.unlocked_pods is UnlockedPods.SCHEDULED and not has_lock
    request = read_request(container.count, dict(container.others), rules)
    if request is None or not (rules.known or is_exact):
        return
    for share in shares:
        registered_mib = gpus[share.uuid].registered_mib
        most = request.memory_on(registered_mib) or registered_mib
        memory, cores = share.memory_mib or registered_mib, share.core_percent
        is_more = memory > most or 0 < request.cores < (cores or 101)
        is_other = cores != request.cores or (memory != most and request.memory_mib > 0)
        if is_more or (is_exact and is_other):
            raise Refusal(
                RefusalReason.NOT_AS_REQUESTED,
                f"Container {container.name} of pod {'/'.join(candidate.pod.key)} requests {most} "
                f"MiB and {_percent(request.cores)} of a GPU, but annotation {ALLOCATED} gives it "
                f"{memory} MiB and {_percent(cores)} of {share.uuid}: it was changed after "
                "HAMi's scheduler wrote it, or the agent has other settings than the scheduler; "
                "delete the pod, and its controller makes a new one.",
            )


def _percent(cores: int) -> str:
    return f"{cores} % of the compute" if cores else "all of the compute"


def _oversold(candidate: Candidate, short: Shortage, *, alone: bool = False) -> Refusal:
    gate = RefusalReason.MEMORY_EXCEEDED if short.memory else RefusalReason.CORES_EXCEEDED
    what, total, limit = short.amounts
    to_do = (
        "this pod alone was given that much: let its containers ask for less, and create the pod "
        "again."
        if alone
        else "create the pod again, so that it is placed again."
    )
    return Refusal(
        gate,
        f"With container {candidate.container.name} of pod {'/'.join(candidate.pod.key)}, GPU "
        f"{short.gpu.uuid} would have {total} of {what} promised, and it has {limit}; {to_do}",
    )


def _live(row: Row, evidence: Evidence) -> bool:
    """Whether the row still counts: its pod is there, not terminal, and known to the kubelet.

    A pod that the kubelet does not know is dead only if this kubelet instance was answered: a new
    one may not have admitted the pod yet.
    """
    key = (row.namespace, row.pod)
    is_forgotten = key in evidence.known and evidence.known[key] is None
    return row.is_live(evidence.table) and not (is_forgotten and row.epoch == evidence.books.epoch)


def _assigned(candidate: Candidate, settings: MatchSettings) -> tuple[int, tuple[Share, ...]]:
    """The container's group number and shares in the annotation. Raises Refusal."""
    pod, container = candidate.pod, candidate.container
    name = "/".join(pod.key)
    if pod.groups_error:
        raise Refusal(
            RefusalReason.MALFORMED_ANNOTATION,
            f"Annotation {ALLOCATED} of pod {name} cannot be read: {cap(pod.groups_error)}; "
            "create the pod again.",
        )
    if not any(pod.groups or ()):
        raise _unplaced(pod)
    node = pod.annotations.get(VGPU_NODE)
    if node != settings.node:
        raise Refusal(
            RefusalReason.WRONG_NODE,
            f"Pod {name} was given GPUs of node {cap(node or 'none', 63)}, and this is "
            f"{settings.node}; create it again.",
        )
    for assignment in _paired(pod, container.resource):
        if assignment.container == container.name:
            return assignment.group_index, assignment.shares
    raise Refusal(
        RefusalReason.NO_CONTAINER_LEFT,
        f"HAMi's scheduler wrote no GPUs for container {container.name} of pod {name}; "
        "create it again.",
    )


def _paired(pod: PodView, resource: str) -> tuple[Assignment, ...]:
    """The pod's groups, each with its container. Raises Refusal."""
    try:
        return pair_groups(pod.groups or (), pod.asking(resource))
    except Refusal as refusal:
        raise Refusal(refusal.gate, f"Pod {'/'.join(pod.key)}: {refusal.sentence}") from refusal


def _unplaced(pod: PodView) -> Refusal:
    what = "is missing" if pod.groups is None else "names no GPU"
    return Refusal(
        RefusalReason.NO_ANNOTATION,
        f"Pod {'/'.join(pod.key)} was not placed by HAMi's scheduler: annotation {ALLOCATED} "
        f"{what}; create it with schedulerName of HAMi's scheduler.",
    )


def _usable(
    candidate: Candidate, shares: tuple[Share, ...], evidence: Evidence
) -> dict[GpuUuid, SharedGpu]:
    """The GPUs of the shares. Raises Refusal unless all are known and serving."""
    name = "/".join(candidate.pod.key)
    gpus: dict[GpuUuid, SharedGpu] = {}
    for share in shares:
        gpu = evidence.inventory.find(share.uuid)
        gone = gpu is not None and not gpu.present and gpu.health.condition is not Condition.LOST
        if gpu is None or gone:
            why = f" ({gpu.obstacle})" if gpu and gpu.obstacle else ""
            raise Refusal(
                RefusalReason.UNKNOWN_GPU,
                f"Pod {name} was given GPU {cap(share.uuid, 64)}, which this node does not share"
                f"{why}; create it again, so that it is placed again.",
            )
        if not gpu.serving:
            raise _not_serving(name, gpu)
        gpus[share.uuid] = _as_placed(gpu, evidence)
    return gpus


def _not_serving(name: str, gpu: SharedGpu) -> Refusal:
    """The refusal of a pod whose GPU is not serving."""
    which = gpu.gpu.title
    if gpu.health.condition is Condition.UNMONITORED:
        return Refusal(
            RefusalReason.DRIVER_UNRESPONSIVE,
            f"Pod {name} cannot start: the driver has not answered for its {which} for too long; "
            "ask the operator to check the node's driver.",
            transient=True,
        )
    return Refusal(
        RefusalReason.BAD_GPU,
        f"Pod {name} cannot start: its {which} {cap(gpu.plight)}; create it again, so that it is "
        "placed on another GPU.",
    )


def _as_placed(gpu: SharedGpu, evidence: Evidence) -> SharedGpu:
    """The GPU with the greatest amounts of the last 60 s, by which the pod may have been placed."""
    recent = evidence.registered.get(gpu.uuid)
    if recent is None:
        return gpu
    return msgspec.structs.replace(
        gpu,
        registered_mib=max(gpu.registered_mib, recent.memory_mib),
        core_percent=max(gpu.core_percent, recent.core_percent),
    )
