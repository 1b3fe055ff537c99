"""The right to an answer: who owns the node lock, for only that needs rights on the Node."""

from agent.core.annotations import BIND_TIME
from agent.core.candidates import Candidate
from agent.core.errors import Gate, Refusal
from agent.core.evidence import AwaitLock, Evidence, ListPods, Question
from agent.core.guess import no_lock
from agent.core.match_settings import MatchSettings
from agent.core.pods import NodeLock, PodView


def right(found: Candidate, evidence: Evidence, settings: MatchSettings) -> Question | None:
    """Whether the pod has a right to an answer: it owns the node lock."""
    pod, lock = found.pod, evidence.lock
    name = "/".join(pod.key)
    if found.deleted:
        raise Refusal(
            Gate.POD_DELETED,
            f"Pod {name} was deleted before the kubelet took it up; its controller starts a new "
            "one.",
        )
    if pod.static:
        raise Refusal(
            Gate.STATIC_POD,
            f"Pod {name} is a static pod, which HAMi's scheduler never sees; create it through the "
            "API server.",
        )
    if lock is not None and lock.owner == pod.key:
        return _right_of_owner(pod, lock, evidence)
    if not evidence.waited:
        return AwaitLock()
    if lock is not None and lock.owner is not None:
        raise Refusal(
            Gate.NO_RIGHT,
            f"Pod {name} asks for GPUs, but HAMi's scheduler is placing "
            f"{'/'.join(lock.owner)} on this node: was the pod bound by another scheduler, or was "
            "its lock handed over? Create it again with schedulerName of HAMi's scheduler.",
        )
    refusal = no_lock(pod, settings)
    if refusal is not None:
        raise refusal
    return None


def _right_of_owner(pod: PodView, lock: NodeLock, evidence: Evidence) -> Question | None:
    """The same for a pod of the name in the lock, which names no UID.

    A pod that was bound before the lock was taken is another one. A bind that is tried again stamps
    the lock a moment before the pod, so it is waited for.
    """
    if not _is_outdated(pod, lock):
        return None
    if not evidence.listed:
        return ListPods()
    if not evidence.waited:
        return AwaitLock()
    raise Refusal(
        Gate.NO_RIGHT,
        f"Pod {'/'.join(pod.key)} asks for GPUs, but the node lock was taken for a later pod of "
        "that name; create it again with schedulerName of HAMi's scheduler.",
    )


def _is_outdated(pod: PodView, lock: NodeLock) -> bool:
    """Whether a later pod of this name took the lock, which our watch has not shown yet.

    The lock names no UID. The scheduler stamps it first and the pod's bind-time then.
    """
    bound = pod.annotations.get(BIND_TIME, "")
    is_number = bound.isdecimal() and len(bound) < 20
    return is_number and int(bound) < int(lock.stamp.timestamp())
