"""Picks the one candidate that the kubelet is admitting. Between several it never guesses."""

from agent.core.allocation.candidates import (
    ASKED_AFTER_DELETION,
    candidates,
    is_at_admission,
)
from agent.core.allocation.evidence import (
    AwaitLock,
    AwaitOthers,
    Candidate,
    Evidence,
    ListPods,
    LookAtNode,
    Question,
    ReadRecords,
)
from agent.core.allocation.right import is_lock_unseen, lock_of, may_be_unlocked
from agent.core.allocation.settings import MatchSettings
from agent.core.allocation.witness import admitted
from agent.core.cluster.pods import PodUid
from agent.core.errors import Refusal, RefusalReason, cap


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
    if not evidence.books.witnessed:
        return _unwitnessed(count, found, evidence)
    known = admitted(found, evidence, settings)
    present = [each for each in known if not each.deleted]
    if len({each.pod.key for each in known}) == 1:
        return present[0] if present else known[0]
    if not present and evidence.ledger.rows and not evidence.records_read:
        return ReadRecords()  # the checkpoint may show that a container counts as held but is not
    if not evidence.listed:
        # The pod table lags, or one of the pods has ended: kubelets before 1.34.7 and 1.35.4 still
        # admit it. For the lock's owner the API server has longer, so the lock comes first.
        return LookAtNode() if not known and is_lock_unseen(evidence) else ListPods()
    # A pod from before may have been admitted without asking, and ask when its container starts.
    new = [
        each
        for each in present
        if each.pod.created >= evidence.books.start.asks_since
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
        if lock_of(new[0].pod, evidence) or may_be_unlocked(new[0].pod, evidence, settings):
            is_first = new[0].pod.key in evidence.present and not evidence.beside
            is_asking = is_first or evidence.alone
            return new[0] if is_asking else AwaitOthers()
        if not evidence.waited:
            return AwaitLock(*new[0].pod.key)
        if not evidence.node_read:
            return LookAtNode()
    if present:
        raise _several(known, evidence)
    if known:
        return known[0]
    raise _nobody(count, evidence)


def in_vain(count: int, evidence: Evidence, settings: MatchSettings) -> PodUid | None:
    """The pod for which no further Allocate comes after this refusal; None: not known.

    The kubelet rejects a pod if one of its containers is refused at its admission. For a pod that
    has run, it sends Allocate again. If a deleted and an existing pod have the same name, the
    Allocate was for the deleted one, which came first.
    """
    possible = candidates(count, evidence, settings)
    is_witnessed = evidence.books.witnessed
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
            if any(row.epoch != evidence.books.epoch for row in rows):
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
    raise _silent(found)


def _silent(found: tuple[Candidate, ...]) -> Refusal:
    if len(found) == 1:
        name = "/".join(found[0].pod.key)
        sentence = (
            f"This kubelet cannot say which pod it admits, and pod {name}, the only possible one, "
            "no longer holds the node lock; delete the pod, or upgrade the kubelet to 1.34."
        )
    else:
        sentence = (
            f"This kubelet cannot say which pod it admits, and {len(found)} pods are possible; "
            "upgrade the kubelet to 1.34 or later, or start GPU pods one at a time."
        )
    return Refusal(RefusalReason.WITNESS_SILENT, sentence, transient=True)


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
