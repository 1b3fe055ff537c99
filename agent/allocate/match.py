"""Decides an Allocate: a grant, a refusal, or the next question."""

from collections.abc import Iterable, Mapping

import msgspec

from agent.allocate.candidates import (
    ASKED_AFTER_DELETION,
    UNREAD,
    AskKubelet,
    AwaitLock,
    AwaitOthers,
    Candidate,
    CheckRunning,
    Evidence,
    Grant,
    ListPods,
    LookAtNode,
    LookAtPod,
    MatchSettings,
    Question,
    ReadRecords,
    UnlockedPods,
    admitted,
    candidates,
    is_alive,
    is_at_admission,
    pair_groups,
    possible,
    to_ask,
)
from agent.allocate.room import (
    GpuUse,
    RoomClaim,
    Shortage,
    claim_of,
    counts,
    read_request,
    scheduled,
    scheduled_role,
    shortage,
)
from agent.cluster import ALLOCATED, VGPU_NODE, NodeLock, PodUid, PodView, Role
from agent.errors import Refusal, RefusalReason, cap
from agent.ledger import Row
from agent.model import Condition, GpuUuid, Share, SharedGpu

# Decides whether a pod has a right to an answer: the node lock must name it.


def right(candidate: Candidate, evidence: Evidence, settings: MatchSettings) -> Question | None:
    """The next question about the pod's right; None: the pod has it. Raises Refusal.

    The lock's time stamp and the pod's bind-time do not count: HAMi's scheduler writes the two in
    an order that differs by release, seconds apart. A pod that needs no lock is still waited for
    where HAMi takes one, and else the Node is read once, because HAMi after 2.10 takes one for
    each: only a lock that a row notes is removed at once.
    """
    pod = candidate.pod
    refusal = hopeless(candidate, settings)
    if refusal is not None:
        raise refusal
    if lock_of(pod, evidence):
        return None
    question = seek_lock(pod, evidence, settings)
    if question is not None or may_be_unlocked(pod, evidence, settings):
        return question
    name, lock = "/".join(pod.key), evidence.lock
    is_made_with_its_node = _is_made_with_its_node(pod)
    if evidence.node_unread and not is_made_with_its_node:
        raise Refusal(
            RefusalReason.PODS_UNKNOWN,
            "The agent could not ask the API server whether HAMi's scheduler placed pod "
            f"{name} on this node; the pod's controller starts it again.",
            transient=True,
        )
    if _takes_lock(pod) and lock is not None and lock.owner not in {None, pod.key}:
        raise Refusal(
            RefusalReason.NO_RIGHT,
            f"Pod {name} asks for GPUs, but HAMi's scheduler is placing "
            f"{'/'.join(lock.owner)} on this node: another scheduler bound the pod, or another pod "
            "took over its lock. Create it again with schedulerName of HAMi's scheduler.",
        )
    policy = UnlockedPods.UNIQUE
    if is_made_with_its_node:
        why = ": it was created with its node (spec.nodeName); create it again without nodeName"
    elif _was_bound_without(pod, settings):
        policy = UnlockedPods.SCHEDULED
        why = (
            " (it takes none if only init containers request GPUs); request the GPU in an app "
            "container too"
        )
    else:
        why = (
            ": another scheduler bound it, the lock was removed, or it started before without its "
            f"GPU; create it again with schedulerName {settings.scheduler_name}"
        )
    advice = [] if evidence.kubelet.witnessed else ["upgrade the kubelet to 1.34"]
    if settings.unlocked_pods not in {policy, UnlockedPods.UNIQUE}:
        advice.append(f"set allocation.unlockedPods to {policy}")
    raise Refusal(
        RefusalReason.NO_LOCK,
        f"Pod {name} holds no node lock of HAMi's scheduler{why}, or ask the operator to "
        f"{' and '.join(advice)}.",
    )


def seek_lock(pod: PodView, evidence: Evidence, settings: MatchSettings) -> Question | None:
    """The question whose answer may show the pod's lock; None: there is none, or it is shown."""
    if lock_of(pod, evidence) or _is_made_with_its_node(pod):
        return None
    is_free = may_be_unlocked(pod, evidence, settings)
    if (_takes_lock(pod) or not is_free) and not evidence.waited:
        return AwaitLock(*pod.key)
    return None if evidence.node_read else LookAtNode()


def hopeless(candidate: Candidate, settings: MatchSettings) -> Refusal | None:
    """Why the pod is refused with or without a lock; None: the lock decides."""
    pod, rules = candidate.pod, settings.requests
    name = "/".join(pod.key)
    if candidate.deleted:
        return Refusal(
            RefusalReason.POD_DELETED,
            f"Pod {name} was deleted before the kubelet admitted it; its controller makes a new "
            "one.",
        )
    if pod.static:
        return Refusal(
            RefusalReason.STATIC_POD,
            f"Pod {name} is a static pod, which HAMi's scheduler never sees; create it through the "
            "API server.",
        )
    for container in pod.asking(settings.resource):
        # The scheduler takes no lock for such a request, and leaves forged annotations as they are.
        amounts = dict(container.others)
        if read_request(container.count, amounts, rules) is None:
            return Refusal(
                RefusalReason.DROPPED_REQUEST,
                f"HAMi's scheduler dropped the request of container {container.name} of pod "
                f"{name}: it cannot count {amounts[rules.memory]} MiB; write {rules.memory} as a "
                "number of MiB without a unit.",
            )
    return None


def may_be_unlocked(pod: PodView, evidence: Evidence, settings: MatchSettings) -> bool:
    """Whether the pod needs no lock. A kubelet before 1.34 confirms no pod, so each needs one."""
    if settings.unlocked_pods is UnlockedPods.SCHEDULED:
        return evidence.kubelet.witnessed and _was_bound_without(pod, settings)
    return evidence.kubelet.witnessed and settings.unlocked_pods is UnlockedPods.UNIQUE


def _was_bound_without(pod: PodView, settings: MatchSettings) -> bool:
    """Whether HAMi's scheduler bound the pod, and took no lock for it.

    Of this the pod's author writes only the scheduler's name. Of a pod without startTime only a
    scheduler has set PodScheduled: the kubelet sets the two together, after the admission. Whether
    the annotation is the scheduler's is checked with the share.
    """
    is_bound = pod.scheduled and not pod.started
    return is_bound and pod.scheduler == settings.scheduler_name and not _takes_lock(pod)


def _is_made_with_its_node(pod: PodView) -> bool:
    """Whether no scheduler bound it.

    A kubelet that rejects a pod hides who bound it, and its successor asks again if it died before
    it had told the rejection. Such a pod counts as bound: no tenant can bring that about.
    """
    return not (pod.scheduled or pod.started)


def _takes_lock(pod: PodView) -> bool:
    """Whether HAMi's scheduler locks the node for the pod: not for init containers alone."""
    return any(container.role is Role.APP for container in pod.gpu_containers)


def lock_of(pod: PodView, evidence: Evidence) -> NodeLock | None:
    """The present or former lock that proves the pod's right, or None.

    It proves nothing for a pod that no scheduler bound: its author may have given it the name of a
    pod that was deleted before its answer.

    A former lock counts because another vendor's plugin removes the shared lock when its own part
    of the pod is done. A lock under which another pod of the same name was answered proves nothing:
    a tenant can make such a pod, and a late watch still shows the removed lock. There are two
    exceptions: the present lock after a GET of the Node, because two pods of a name can take it
    within 1 s; and a lock that outlived the answered pod, because HAMi lets the next pod of the
    name take it over.
    """
    if _is_made_with_its_node(pod):
        return None

    def is_unspent(lock: NodeLock) -> bool:
        uids = {evidence.used_locks.get(lock.value), *evidence.ledger.answered_under(lock.value)}
        return uids <= {None, pod.uid, evidence.outlived.get(lock.value)}

    lock = evidence.lock
    is_read = evidence.node_read and not evidence.node_unread
    if lock is not None and lock.owner == pod.key and (is_read or is_unspent(lock)):
        return lock
    former = (old for old in evidence.released_locks if old.owner == pod.key and is_unspent(old))
    return next(former, None)


# Picks the one candidate that the kubelet is admitting. Between several it never guesses.


def exactly_one(
    count: int, found: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> Candidate | Question:
    """The candidate that the kubelet admits, or the question that has to be answered first.

    PodResources answers by name, also for a pod that is deleted during its admission. If a deleted
    and an existing pod have the name, the existing one is taken: the deleted one is being killed,
    and a later Allocate for the existing one gets the same answer.

    Raises:
        Refusal: no pod or several pods are being admitted.
    """
    if not evidence.kubelet.witnessed:
        return _unwitnessed(count, found, evidence)
    known = admitted(found, evidence, settings)
    present = [each for each in known if not each.deleted]
    if len({each.pod.key for each in known}) == 1:
        return present[0] if present else known[0]
    if not present and evidence.ledger.rows and not evidence.records_read:
        return ReadRecords()  # the checkpoint may show that a container counts as held but is not
    if not evidence.listed:
        # The pod table lags, or one of the pods has ended: kubelets before 1.34.7 and 1.35.4 still
        # admit it. For the lock's owner the API server has longer, so the lock comes first if the
        # one in view is of no pod that may be asking, and a newer one can be read.
        owner = evidence.lock.owner if evidence.lock else None
        is_nobodys = owner is None or evidence.known.get(owner, True) is None
        is_lock_unseen = not known and is_nobodys and not evidence.node_read
        return LookAtNode() if is_lock_unseen else ListPods()
    # A pod from before may have been admitted without asking, and ask when its container starts.
    new = [
        each
        for each in present
        if each.pod.created >= evidence.kubelet.start.asks_since
        and is_at_admission(each.pod, evidence, settings.resource)
    ]
    # A deleted pod does not matter if the new one has its name: see above.
    is_clear = {each.pod.key for each in known if each.deleted} <= {
        each.pod.key for each in new
    } and all(
        # That call may be the new pod's, unless the kubelet did not know it yet when the call came.
        names is not None and not any(each.pod.key in names for each in new)
        for names in evidence.beside
    )
    if len(new) == 1 and new[0].row is None and is_clear:
        # The others have dead containers whose records the kubelet lost. It asks for them every few
        # seconds, and in vain if nothing tells them apart. They must not cost every new pod its
        # start: the kubelet is admitting this one now, and the scheduler has just placed it.
        # A deleted pod of its name that still runs may be the one that the kubelet knows, though:
        # then nothing tells its call from theirs.
        graves = (stone.pod for stone in evidence.table.tombstones)
        namesakes = [one for pod in graves if pod.key == new[0].pod.key for one in pod.containers]
        unchecked = {one.running_id for one in namesakes if one.running_id} - evidence.checked
        if unchecked:
            return CheckRunning(frozenset(unchecked))
        if any(is_alive(one, evidence.kubelet) for one in namesakes):
            raise _several(known, evidence)
        if lock_of(new[0].pod, evidence) or may_be_unlocked(new[0].pod, evidence, settings):
            is_first = new[0].pod.key in evidence.present and not evidence.beside
            is_asking = is_first or evidence.alone
            return new[0] if is_asking else AwaitOthers()
        if not (evidence.waited and evidence.node_read):
            return LookAtNode() if evidence.waited else AwaitLock(*new[0].pod.key)
    if present:
        raise _several(known, evidence)
    if known:
        return known[0]
    raise _nobody(count, evidence)


def rejected_pod(count: int, evidence: Evidence, settings: MatchSettings) -> PodUid | None:
    """The pod for which no further Allocate comes after this refusal; None: not known.

    The kubelet rejects a pod if one of its containers is refused at its admission. For a pod that
    has run, it sends Allocate again. If a deleted and an existing pod have the same name, the
    Allocate was for the deleted one, which came first.
    """
    possible = candidates(count, evidence, settings)
    is_witnessed = evidence.kubelet.witnessed
    if is_witnessed:
        if any(each.pod.key not in evidence.known for each in possible):
            return None  # the call may have been for the one of which the kubelet said nothing
        possible = admitted(possible, evidence, settings)
    deleted = [each for each in possible if each.deleted]
    if deleted and (not is_witnessed or len({each.pod.key for each in possible}) == 1):
        return deleted[0].pod.uid
    if len(possible) != 1 or possible[0].row is not None or possible[0].pod.has_run:
        return None
    for stone in evidence.table.tombstones:
        is_late = evidence.now - stone.deleted_at > ASKED_AFTER_DELETION
        if stone.pod.key == possible[0].pod.key and not is_late:
            rows = evidence.ledger.rows_of(stone.pod.uid)
            if any(row.epoch != evidence.kubelet.epoch for row in rows):
                return None  # the call may have been for that pod, though it is no candidate
    if not is_witnessed and lock_of(possible[0].pod, evidence) is None:
        return None  # the call may have been that of a pod that is gone
    return possible[0].pod.uid


def _unwitnessed(
    count: int, found: tuple[Candidate, ...], evidence: Evidence
) -> Candidate | Question:
    """Kubelets before 1.34: only a single candidate that holds the node lock is served."""
    is_alone = len(found) == 1
    if not evidence.listed:
        return ListPods()  # the watch may not have shown the pod that the kubelet asks for
    if evidence.list_failed and any(each.row is None for each in found):
        raise _nobody(count, evidence)
    if is_alone and lock_of(found[0].pod, evidence):
        return found[0]
    if not found:
        raise _nobody(count, evidence)
    if not evidence.waited:
        return AwaitLock(*found[0].pod.key) if is_alone else AwaitLock()
    if not evidence.node_read:
        return LookAtNode()
    if all(each.deleted for each in found) or (is_alone and found[0].row is None):
        return found[0]  # the next gate refuses it with the reason
    said = f"and {len(found)} pods are possible; upgrade the kubelet to 1.34 or later, or start "
    said += "GPU pods one at a time."
    if is_alone:
        name = "/".join(found[0].pod.key)
        said = f"and pod {name}, the only possible one, no longer holds the node lock; delete the "
        said += "pod, or upgrade the kubelet to 1.34."
    raise Refusal(
        RefusalReason.WITNESS_SILENT,
        f"This kubelet cannot say which pod it admits, {said}",
        transient=True,
    )


def _several(known: tuple[Candidate, ...], evidence: Evidence) -> Refusal:
    names = cap(", ".join(sorted({"/".join(each.pod.key) for each in known})))
    if evidence.list_failed:
        return Refusal(
            RefusalReason.PODS_UNKNOWN,
            f"The kubelet may admit one of several pods ({names}), but the API server does not "
            "say which pods are on this node; the pod's controller or the kubelet starts it again; "
            "if it has no controller, create it again.",
            transient=True,
        )
    if all(each.row is not None and not each.deleted for each in known):
        return Refusal(
            RefusalReason.MANY_PODS_ADMITTED,
            f"The kubelet lost its records of several pods with dead containers ({names}) and does "
            "not say which one it restarts, and the agent does not guess; delete all but one of "
            "them.",
        )
    return Refusal(
        RefusalReason.MANY_PODS_ADMITTED,
        f"The kubelet is admitting several pods at once ({names}) and does not say which of them "
        "this request is for, and the agent does not guess; create this pod again.",
    )


def _nobody(count: int, evidence: Evidence) -> Refusal:
    """Why no pod could be found for the request."""
    if evidence.blind:
        return Refusal(
            RefusalReason.PODS_UNKNOWN,
            "The agent could not ask the API server which pods are on this node, and no pod that "
            f"it knows and that requests {count} slice(s) is being admitted; the pod's controller "
            "starts it again.",
            transient=True,
        )
    return Refusal(
        RefusalReason.NO_POD_ADMITTED,
        f"The kubelet asks for {count} slice(s), but no pod of this node that requests this "
        "number is being admitted. Static pods and deleted pods cannot get GPUs; create the pod "
        "through the API server.",
    )


# Decides whether a container may get what the scheduler's annotation says.
#
# Tenants can write annotations. So every GPU and amount is checked against the pod's request, which
# nobody can change, the inventory and the ledger.


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
    for row in in_the_way if evidence.kubelet.witnessed else ():
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
    return row.is_live(evidence.table) and not (
        is_forgotten and row.epoch == evidence.kubelet.epoch
    )


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
        what = "is missing" if pod.groups is None else "names no GPU"
        raise Refusal(
            RefusalReason.NO_ANNOTATION,
            f"Pod {name} was not placed by HAMi's scheduler: annotation {ALLOCATED} {what}; create "
            "it with schedulerName of HAMi's scheduler.",
        )
    node = pod.annotations.get(VGPU_NODE)
    if node != settings.node:
        raise Refusal(
            RefusalReason.WRONG_NODE,
            f"Pod {name} was given GPUs of node {cap(node or 'none', 63)}, and this is "
            f"{settings.node}; create it again.",
        )
    try:
        paired = pair_groups(pod.groups or (), pod.asking(container.resource))
    except Refusal as refusal:
        raise Refusal(refusal.gate, f"Pod {name}: {refusal.sentence}") from refusal
    for assignment in paired:
        if assignment.container == container.name:
            return assignment.group_index, assignment.shares
    raise Refusal(
        RefusalReason.NO_CONTAINER_LEFT,
        f"HAMi's scheduler wrote no GPUs for container {container.name} of pod {name}; "
        "create it again.",
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
        if not gpu.serving and gpu.health.condition is Condition.UNMONITORED:
            raise Refusal(
                RefusalReason.DRIVER_UNRESPONSIVE,
                f"Pod {name} cannot start: the driver has not answered for its {gpu.gpu.title} for "
                "too long; ask the operator to check the node's driver.",
                transient=True,
            )
        if not gpu.serving:
            raise Refusal(
                RefusalReason.BAD_GPU,
                f"Pod {name} cannot start: its {gpu.gpu.title} {cap(gpu.plight)}; create it again, "
                "so that it is placed on another GPU.",
            )
        # With the greatest amounts of the last 60 s, by which the pod may have been placed.
        recent = evidence.registered.get(gpu.uuid, GpuUse())
        gpus[share.uuid] = msgspec.structs.replace(
            gpu,
            registered_mib=max(gpu.registered_mib, recent.memory_mib),
            core_percent=max(gpu.core_percent, recent.core_percent),
        )
    return gpus


# Decides which container an Allocate is for and what it gets, or returns the next question.
#
# An Allocate names no pod. The kubelet is the witness: it says which pod it admits. The node lock
# is the proof of right: writing it needs rights on the Node, while a tenant can write a pod's
# annotations. The caller asks the question, adds the answer to the evidence and decides again from
# the start, so that every decision uses the newest view.


def decide(count: int, evidence: Evidence, settings: MatchSettings) -> Question | Grant:
    """Grant one container that asks for `count` slices, or return the next question.

    Invariant: no container gets what belongs to another one. If the call may be for more than one
    container, none is served. Raises Refusal with its gate and a sentence for the pod's owner.

    1. Candidates: the pods of this node with a container that may be asking for `count` slices.
    2. Witness: the kubelet says which of them it is admitting.
    3. The kubelet is admitting exactly one of them.
    4. It is still the same pod: no new pod has its name, and no pod came that the watch lacks.
    5. The container is the next in order, or the only one that the kubelet can be asking for.
    6. A container that was answered before gets the same answer, as long as its GPUs are there.
    7. A first answer needs a right: the node lock names the pod.
    8. A first answer needs room: the GPUs in the annotation are here and serving; the shares fit.
    """
    pool = candidates(count, evidence, settings)
    candidate = to_ask(pool, evidence, settings) or exactly_one(count, pool, evidence, settings)
    if not isinstance(candidate, Candidate):
        return candidate
    pod, question = candidate.pod, None
    is_first = candidate.row is None and is_at_admission(pod, evidence, settings.resource)
    if is_first and pod.reusable_name and not hopeless(candidate, settings):
        # The lock comes before the GET of the pod: its owner may wait longer for the API server. A
        # replay needs no lock, no lock helps the hopeless, and the others are not read.
        question = seek_lock(pod, evidence, settings)
    question = question or _still_the_same(candidate, evidence, settings)
    if question is not None:
        return question
    asked = possible(pod, evidence, settings.resource)
    if sum(each.container.count == candidate.container.count for each in asked) > 1:
        raise Refusal(
            RefusalReason.MANY_PODS_ADMITTED,
            f"The kubelet lost its checkpoint and does not say which of several containers of pod "
            f"{'/'.join(pod.key)} it starts again; delete the pod, and its controller makes a new "
            "one.",
        )
    if candidate.row is not None:
        return replay(candidate, candidate.row, evidence)
    return right(candidate, evidence, settings) or check(candidate, evidence, settings)


def _still_the_same(
    candidate: Candidate, evidence: Evidence, settings: MatchSettings
) -> Question | None:
    """The question that must rule out a new pod that the watch has not shown; None: ruled out.

    A pod whose name was not generated can be created again with another share. Once a container of
    a pod was answered at its admission, the calls that follow are for the same pod. Raises Refusal.
    """
    pod = candidate.pod
    # PodResources says "known, no devices" of a pod that is being admitted, of one that was started
    # without an Allocate, and of one whose records are lost. The last two ask only when a container
    # has died. Then a pod that no view shows may be asking instead.
    is_newcomer_possible = not is_at_admission(pod, evidence, settings.resource)
    if not evidence.listed and (candidate.deleted or is_newcomer_possible):
        return ListPods()
    if evidence.list_failed and is_newcomer_possible:
        raise _unknown(
            f"The kubelet has no record of pod {'/'.join(pod.key)}, which may have run before, so "
            "a pod that the agent does not know may be asking"
        )
    if not pod.reusable_name or candidate.deleted or _is_under_way(candidate, evidence):
        return None
    if pod.key not in evidence.pod_uids_read:
        return None if evidence.listed and not evidence.list_failed else LookAtPod(*pod.key)
    uid_read = evidence.pod_uids_read[pod.key]
    if uid_read is UNREAD and not evidence.records_read:
        return ReadRecords()
    if uid_read == pod.uid:
        return None
    if uid_read is UNREAD:  # a GET that failed proves nothing
        # The kubelet names the pod's UID if PodResources has slices for a container that the
        # checkpoint has under it. The file alone proves nothing: it keeps a rejected pod's until
        # the kubelet allocates again.
        known = evidence.known.get(pod.key)
        if known is not None and any(
            key.pod_uid == pod.uid and known.ids_of(key.container, settings.resource)
            for key in evidence.kubelet.recorded or ()
        ):
            return None
        raise _unknown(f"The name of pod {'/'.join(pod.key)} may be another pod's by now")
    if evidence.list_failed:
        raise _unknown(f"Another pod now has the name {'/'.join(pod.key)}")
    return None if evidence.listed else ListPods()


def _unknown(what: str) -> Refusal:
    return Refusal(
        RefusalReason.PODS_UNKNOWN,
        f"{what}, and the agent could not ask the API server which pods are on this node; the "
        "pod's controller or the kubelet starts it again; if it has no controller, create it "
        "again.",
        transient=True,
    )


def _is_under_way(candidate: Candidate, evidence: Evidence) -> bool:
    """Whether an earlier container of the pod was answered at this admission.

    PodResources must say that the kubelet holds it, or a new pod may have its name. Of ordinary
    init containers it says nothing, so that they prove nothing.
    """
    epoch, known = evidence.kubelet.epoch, evidence.known.get(candidate.pod.key)
    return candidate.row is None and any(
        row.epoch == epoch
        and (known is None or bool(known.ids_of(row.key.container, row.resource)))
        for row in evidence.ledger.rows_of(candidate.pod.uid)
    )
