"""Whether what the scheduler wrote for a container may be granted.

Everything is held against the inventory and the ledger: annotations can be written by tenants, so
a GPU, an amount or a count is never taken on trust.
"""

import dataclasses

from agent.core.allocation.container_order import Assignment, pair_groups
from agent.core.allocation.evidence import (
    AskKubelet,
    Candidate,
    Evidence,
    Grant,
    ListPods,
    Question,
)
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
from agent.core.allocation.settings import MatchSettings
from agent.core.cluster.annotations import ALLOCATED, VGPU_NODE
from agent.core.cluster.pods import PodView
from agent.core.errors import Refusal, RefusalReason, cap
from agent.core.inventory.condition import Condition
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.inventory import SharedGpu
from agent.core.inventory.share import Share
from agent.core.state.ledger import Row


def replay(found: Candidate, row: Row, evidence: Evidence) -> Grant:
    """The same answer again; only a GPU that is gone can stand in the way.

    One that is filtered out since is there: the container that has it may start again.
    """
    name = "/".join(found.pod.key)
    for share in row.shares:
        gpu = evidence.inventory.find(share.uuid)
        # In MIG mode nothing runs on the whole of it.
        is_whole = gpu is not None and gpu.there and not gpu.gpu.mig_enabled
        if gpu is None or not is_whole or gpu.health.condition is Condition.LOST:
            raise Refusal(
                RefusalReason.BAD_GPU,
                f"Container {row.key.container} of pod {name} holds GPU {share.uuid}, which is no "
                "longer there as it was; delete the pod so that it is placed again.",
            )
    return Grant(found, row.group, row.shares)


def check(found: Candidate, evidence: Evidence, settings: MatchSettings) -> Question | Grant:
    """What the scheduler wrote for the container, held against the inventory and the ledger."""
    group, shares = _assigned(found, settings)
    gpus = _usable(found, shares, evidence)
    role = found.container.role
    # A dead row only stops counting here: reconcile closes it, together with its directory.
    live = [row for row in evidence.ledger.rows if _live(row, evidence)]
    pods = evidence.table.pods
    as_scheduled = [scheduled(row, pods.get(row.key.pod_uid)) for row in live]
    short = shortage(
        RoomClaim(found.pod.uid, scheduled_role(role, group, found.pod), shares),
        (one for one in as_scheduled if one is not None),
        gpus,
    )
    if short is None:
        true = [claim_of(row) for row in live if counts(row, pods.get(row.key.pod_uid))]
        oversold = shortage(RoomClaim(found.pod.uid, role, shares), true, gpus)
        lock = lock_of(found.pod, evidence)
        return Grant(found, group, shares, lock=lock.value if lock else "", oversold=oversold)
    in_the_way = [row for row in live if _blocks(row, found, short)]
    for row in in_the_way if evidence.books.witnessed else ():
        if (row.namespace, row.pod) not in evidence.known:
            return AskKubelet(row.namespace, row.pod)
    if in_the_way and not evidence.listed:
        # The scheduler may have seen by its watch what ours has not shown yet.
        return ListPods()
    raise _oversold(found, short)


def _blocks(row: Row, found: Candidate, short: Shortage) -> bool:
    """Whether another pod has of the GPU that is short."""
    uses = any(share.uuid == short.gpu.uuid for share in row.shares)
    return uses and row.key.pod_uid != found.pod.uid


def _oversold(found: Candidate, short: Shortage) -> Refusal:
    gate = RefusalReason.MEMORY_EXCEEDED if short.memory else RefusalReason.CORES_EXCEEDED
    what, total, limit = short.amounts
    return Refusal(
        gate,
        f"With container {found.container.name} of pod {'/'.join(found.pod.key)}, GPU "
        f"{short.gpu.uuid} would have {total} of {what} promised, and it has {limit}; create the "
        "pod again, so that it is placed anew.",
    )


def _live(row: Row, evidence: Evidence) -> bool:
    """Whether a row still counts: its pod is there, not terminal, and the kubelet knows it.

    A pod that the kubelet, asked, does not know is dead only if this kubelet was the one answered:
    a new kubelet may not have taken the pod up yet.
    """
    pod = evidence.table.pods.get(row.key.pod_uid)
    if pod is None or pod.terminal:
        return False
    key = (row.namespace, row.pod)
    is_forgotten = key in evidence.known and evidence.known[key] is None
    return not (is_forgotten and row.epoch == evidence.books.epoch)


def _assigned(found: Candidate, settings: MatchSettings) -> tuple[int, tuple[Share, ...]]:
    """Group number and shares of the container in the scheduler's annotation."""
    pod, container = found.pod, found.container
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
    """The groups of the pod with its containers; a refusal names the pod."""
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
    found: Candidate, shares: tuple[Share, ...], evidence: Evidence
) -> dict[GpuUuid, SharedGpu]:
    """The GPUs of the shares, all known and serving."""
    name = "/".join(found.pod.key)
    gpus: dict[GpuUuid, SharedGpu] = {}
    for share in shares:
        gpu = evidence.inventory.find(share.uuid)
        gone = gpu is not None and not gpu.present and gpu.health.condition is not Condition.LOST
        if gpu is None or gone:
            raise Refusal(
                RefusalReason.UNKNOWN_GPU,
                f"Pod {name} was given GPU {cap(share.uuid, 64)}, which this node does not share; "
                "create it again, so that it is placed anew.",
            )
        if not gpu.serving:
            raise _not_serving(name, gpu)
        gpus[share.uuid] = _as_placed(gpu, evidence)
    return gpus


def _not_serving(name: str, gpu: SharedGpu) -> Refusal:
    """Why the GPU of that pod is not given out."""
    which = gpu.gpu.title
    if gpu.health.condition is Condition.UNMONITORED:
        return Refusal(
            RefusalReason.DRIVER_UNRESPONSIVE,
            f"Pod {name} cannot start: the driver has not answered for its {which} for too long; "
            "ask the operator to look at the node's driver.",
            transient=True,
        )
    return Refusal(
        RefusalReason.BAD_GPU,
        f"Pod {name} cannot start: its {which} {cap(gpu.plight)}; create it again, so that it is "
        "placed on another GPU.",
    )


def _as_placed(gpu: SharedGpu, evidence: Evidence) -> SharedGpu:
    """The GPU with what the scheduler may have placed by: now, or up to a minute ago."""
    recent = evidence.registered.get(gpu.uuid)
    if recent is None:
        return gpu
    return dataclasses.replace(
        gpu,
        registered_mib=max(gpu.registered_mib, recent.memory_mib),
        core_percent=max(gpu.core_percent, recent.core_percent),
    )
