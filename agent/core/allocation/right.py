"""Decides whether a pod has a right to an answer: the node lock must name it."""

from agent.core.allocation.evidence import AwaitLock, Candidate, Evidence, LookAtNode, Question
from agent.core.allocation.settings import MatchSettings, UnlockedPods
from agent.core.cluster.pods import NodeLock, PodView, Role
from agent.core.errors import Refusal, RefusalReason, cap


def right(candidate: Candidate, evidence: Evidence, settings: MatchSettings) -> Question | None:
    """The next question about the pod's right; None: the pod has it. Raises Refusal.

    The lock's time stamp and the pod's bind-time do not count: HAMi's scheduler writes the two in
    an order that differs by release, seconds apart. With unlockedPods=unique the agent still waits
    for the lock if HAMi takes one: only a lock that a row notes is removed at once.
    """
    pod = candidate.pod
    hopeless = _hopeless(candidate)
    if hopeless is not None:
        raise hopeless
    if lock_of(pod, evidence):
        return None
    if pod.scheduled and (not _may_be_unlocked(evidence, settings) or _takes_lock(pod)):
        if not evidence.waited:
            return AwaitLock(*pod.key)
        if not evidence.node_read:
            return LookAtNode()
    refusal = _refusal(pod, evidence, settings)
    if refusal is not None:
        raise refusal
    return None


def _hopeless(candidate: Candidate) -> Refusal | None:
    """Why the pod is refused with or without a lock; None: the lock decides."""
    pod, dropped = candidate.pod, candidate.container.dropped_memory
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
    if dropped and not any(pod.groups or ()):  # the scheduler then takes no lock for it
        return Refusal(
            RefusalReason.DROPPED_REQUEST,
            f"HAMi's scheduler dropped the request of pod {name}: it cannot read gpumem "
            f"{cap(dropped, 40)} as a number of MiB; write the number of MiB without a unit.",
        )
    return None


def _may_be_unlocked(evidence: Evidence, settings: MatchSettings) -> bool:
    """Whether the operator's settings allow a pod without a lock.

    `unique` means a pod that the kubelet confirms. A kubelet before 1.34 confirms none.
    """
    return settings.unlocked_pods is UnlockedPods.UNIQUE and evidence.books.witnessed


def _refusal(pod: PodView, evidence: Evidence, settings: MatchSettings) -> Refusal | None:
    """Why a pod without a lock is refused; None: the operator's settings allow it."""
    if _may_be_unlocked(evidence, settings):
        return None
    name = "/".join(pod.key)
    lock = evidence.lock
    if lock is not None and lock.owner not in {None, pod.key}:
        return Refusal(
            RefusalReason.NO_RIGHT,
            f"Pod {name} asks for GPUs, but HAMi's scheduler is placing "
            f"{'/'.join(lock.owner)} on this node: another scheduler bound the pod, or another pod "
            "took over its lock. Create it again with schedulerName of HAMi's scheduler.",
        )
    return Refusal(
        RefusalReason.NO_LOCK,
        f"Pod {name} holds no node lock of HAMi's scheduler{_why(pod)}, or ask the operator to "
        + _setting(evidence, settings),
    )


def _why(pod: PodView) -> str:
    """Why the pod has no lock, and what its owner can do; part of a sentence."""
    if not pod.scheduled:
        return ": it was created with its node (spec.nodeName); create it again without nodeName"
    if _takes_lock(pod):
        return (
            ": another scheduler bound it, or the lock was removed; create it again with "
            "schedulerName of HAMi's scheduler"
        )
    return (
        " (it takes none if only init containers request GPUs); request the GPU in an app "
        "container too"
    )


def _setting(evidence: Evidence, settings: MatchSettings) -> str:
    """What the operator can do for pods without a lock; the end of a sentence."""
    upgrade = "" if evidence.books.witnessed else "upgrade the kubelet to 1.34"
    if settings.unlocked_pods is UnlockedPods.UNIQUE:
        return f"{upgrade}."
    joined = " and " if upgrade else ""
    return f"{upgrade}{joined}set allocation.unlockedPods to unique."


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
    if not pod.scheduled:
        return None

    def is_unspent(lock: NodeLock) -> bool:
        uids = {evidence.spent.get(lock.value), *evidence.ledger.answered_under(lock.value)}
        return uids <= {None, pod.uid, evidence.outlived.get(lock.value)}

    lock = evidence.lock
    if lock is not None and lock.owner == pod.key and (evidence.node_read or is_unspent(lock)):
        return lock
    former = (old for old in evidence.former if old.owner == pod.key and is_unspent(old))
    return next(former, None)
