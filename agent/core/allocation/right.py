"""The right to an answer: who owns the node lock, for only that needs rights on the Node."""

from agent.core.allocation.evidence import AwaitLock, Candidate, Evidence, LookAtNode, Question
from agent.core.allocation.settings import MatchSettings, UnlockedPods
from agent.core.cluster.pods import NodeLock, PodView, Role
from agent.core.errors import Refusal, RefusalReason, cap


def right(found: Candidate, evidence: Evidence, settings: MatchSettings) -> Question | None:
    """What must be known of the pod's right; None: it has one, for the lock names it.

    Raises Refusal.

    No time is looked at, neither the lock's stamp nor the pod's bind-time: HAMi's scheduler reads
    its clock for the two in an order that differs from release to release, and seconds lie between.
    A pod that is served without a lock is waited for all the same where HAMi takes one: only a text
    that its rows note is let go of at once.
    """
    pod = found.pod
    hopeless = _hopeless(found)
    if hopeless is not None:
        raise hopeless
    if lock_of(pod, evidence):
        return None
    if settings.unlocked_pods is not UnlockedPods.UNIQUE or _takes_lock(pod):
        if not evidence.waited:
            return AwaitLock(*pod.key)
        if not evidence.node_read:
            return LookAtNode()
    refusal = _refusal(pod, evidence, settings)
    if refusal is not None:
        raise refusal
    return None


def _hopeless(found: Candidate) -> Refusal | None:
    """Why a pod is not served whatever the lock says; None: the lock decides."""
    pod, dropped = found.pod, found.container.dropped_memory
    name = "/".join(pod.key)
    if found.deleted:
        return Refusal(
            RefusalReason.POD_DELETED,
            f"Pod {name} was deleted before the kubelet took it up; its controller starts a new "
            "one.",
        )
    if pod.static:
        return Refusal(
            RefusalReason.STATIC_POD,
            f"Pod {name} is a static pod, which HAMi's scheduler never sees; create it through the "
            "API server.",
        )
    if dropped and not any(pod.groups or ()):  # then the scheduler takes no lock for it
        return Refusal(
            RefusalReason.DROPPED_REQUEST,
            f"HAMi's scheduler dropped the request of pod {name}: gpumem {cap(dropped, 40)} is not "
            "a number of MiB that it can hold; write the number of MiB without a unit.",
        )
    return None


def _refusal(pod: PodView, evidence: Evidence, settings: MatchSettings) -> Refusal | None:
    """Why a pod that no lock names is not served; None: it is, by the operator's choice."""
    if settings.unlocked_pods is UnlockedPods.UNIQUE:
        return None
    name = "/".join(pod.key)
    lock = evidence.lock
    if lock is not None and lock.owner is not None:
        return Refusal(
            RefusalReason.NO_RIGHT,
            f"Pod {name} asks for GPUs, but HAMi's scheduler is placing "
            f"{'/'.join(lock.owner)} on this node: was the pod bound by another scheduler, or was "
            "its lock handed over? Create it again with schedulerName of HAMi's scheduler.",
        )
    return Refusal(
        RefusalReason.NO_LOCK, f"Pod {name} holds no node lock of HAMi's scheduler{_why(pod)}"
    )


def _why(pod: PodView) -> str:
    """What a pod without a lock is told: HAMi's scheduler takes none for init containers alone."""
    if _takes_lock(pod):
        return (
            ": it was bound by another scheduler, or the lock was taken away; create it again with "
            "schedulerName of HAMi's scheduler, or have the operator set allocation.unlockedPods."
        )
    return (
        " (it takes none when only an init container requests GPUs); request the GPU in an app "
        "container too, or have the operator set allocation.unlockedPods to unique."
    )


def _takes_lock(pod: PodView) -> bool:
    """Whether HAMi's scheduler locks the node for it: init containers alone are not worth it."""
    return any(one.role is Role.APP for one in pod.gpu_containers)


def lock_of(pod: PodView, evidence: Evidence) -> NodeLock | None:
    """The lock that names the pod: the one that is there, or one that went a moment ago.

    Another vendor's plugin on the node lets go of the lock that it shares with us when its own part
    of the pod is done. A lock under which another pod of that name was answered proves nothing: a
    tenant can make such a pod, and a watch that is late still shows the lock that went. After a GET
    of the Node the present one counts: two pods of a name can take it within one second. So does
    one that outlived the pod that was answered: HAMi lets the next of its name take it over as it
    is.
    """
    used = {(row.lock, row.key.pod_uid) for row in evidence.ledger.rows} | evidence.spent.items()
    spent = {text for text, uid in used - evidence.outlived.items() if uid != pod.uid}
    lock = evidence.lock
    if (
        lock is not None
        and lock.owner == pod.key
        and (evidence.node_read or lock.value not in spent)
    ):
        return lock
    went = (one for one in evidence.former if one.owner == pod.key and one.value not in spent)
    return next(went, None)
