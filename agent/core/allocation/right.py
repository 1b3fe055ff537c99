"""Decides whether a pod has a right to an answer: the node lock must name it."""

from agent.core.allocation.evidence import AwaitLock, Candidate, Evidence, LookAtNode, Question
from agent.core.allocation.requests import read_request
from agent.core.allocation.settings import MatchSettings, UnlockedPods
from agent.core.cluster.pods import NodeLock, PodView, Role
from agent.core.errors import Refusal, RefusalReason


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
    if question is None and not may_be_unlocked(pod, evidence, settings):
        raise _refusal(pod, evidence, settings)
    return question


def seek_lock(pod: PodView, evidence: Evidence, settings: MatchSettings) -> Question | None:
    """The question whose answer may show the pod's lock; None: there is none, or it is shown."""
    if lock_of(pod, evidence) or _is_made_with_its_node(pod):
        return None
    is_free = may_be_unlocked(pod, evidence, settings)
    if (_takes_lock(pod) or not is_free) and not evidence.waited:
        return AwaitLock(*pod.key)
    return None if evidence.node_read else LookAtNode()


def is_lock_unseen(evidence: Evidence) -> bool:
    """Whether the lock in view is of no pod that may be asking, and a newer one can be read."""
    owner = evidence.lock.owner if evidence.lock else None
    is_nobodys = owner is None or evidence.known.get(owner, True) is None
    return is_nobodys and not evidence.node_read


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
        return evidence.books.witnessed and _was_bound_without(pod, settings)
    return evidence.books.witnessed and settings.unlocked_pods is UnlockedPods.UNIQUE


def _was_bound_without(pod: PodView, settings: MatchSettings) -> bool:
    """Whether HAMi's scheduler bound the pod, and took no lock for it.

    Of this the pod's author writes only the scheduler's name. Of a pod without startTime only a
    scheduler has set PodScheduled: the kubelet sets the two together, after the admission. Whether
    the annotation is the scheduler's is checked with the share.
    """
    is_bound = pod.scheduled and not pod.started
    return is_bound and pod.scheduler == settings.scheduler_name and not _takes_lock(pod)


def _refusal(pod: PodView, evidence: Evidence, settings: MatchSettings) -> Refusal:
    """Why a pod without a lock is refused, and what its owner and the operator can do."""
    name, lock = "/".join(pod.key), evidence.lock
    if evidence.node_unread and not _is_made_with_its_node(pod):
        return Refusal(
            RefusalReason.PODS_UNKNOWN,
            "The agent could not ask the API server whether HAMi's scheduler placed pod "
            f"{name} on this node; the pod's controller starts it again.",
            transient=True,
        )
    if _takes_lock(pod) and lock is not None and lock.owner not in {None, pod.key}:
        return Refusal(
            RefusalReason.NO_RIGHT,
            f"Pod {name} asks for GPUs, but HAMi's scheduler is placing "
            f"{'/'.join(lock.owner)} on this node: another scheduler bound the pod, or another pod "
            "took over its lock. Create it again with schedulerName of HAMi's scheduler.",
        )
    policy = UnlockedPods.UNIQUE
    if _is_made_with_its_node(pod):
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
    advice = [] if evidence.books.witnessed else ["upgrade the kubelet to 1.34"]
    if settings.unlocked_pods not in {policy, UnlockedPods.UNIQUE}:
        advice.append(f"set allocation.unlockedPods to {policy}")
    return Refusal(
        RefusalReason.NO_LOCK,
        f"Pod {name} holds no node lock of HAMi's scheduler{why}, or ask the operator to "
        f"{' and '.join(advice)}.",
    )


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
        uids = {evidence.spent.get(lock.value), *evidence.ledger.answered_under(lock.value)}
        return uids <= {None, pod.uid, evidence.outlived.get(lock.value)}

    lock = evidence.lock
    is_read = evidence.node_read and not evidence.node_unread
    if lock is not None and lock.owner == pod.key and (is_read or is_unspent(lock)):
        return lock
    former = (old for old in evidence.former if old.owner == pod.key and is_unspent(old))
    return next(former, None)
