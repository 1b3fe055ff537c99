"""The one pod that is being admitted, or why there is none: nothing is guessed between several."""

from agent.core.allocation.candidates import candidates
from agent.core.allocation.evidence import (
    AwaitLock,
    Candidate,
    Evidence,
    ListPods,
    LookAtNode,
    Question,
    ReadRecords,
)
from agent.core.allocation.right import lock_of
from agent.core.allocation.settings import MatchSettings
from agent.core.allocation.witness import admitted
from agent.core.cluster.pods import PodUid
from agent.core.errors import Refusal, RefusalReason, cap


def exactly_one(
    count: int, found: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> Candidate | Question:
    """The single candidate that the kubelet admits; of one name the present one. Raises Refusal.

    The kubelet speaks by name, and of a pod that was deleted while it asks for it, too. That one is
    being killed, and its successor is answered again when it asks.
    """
    if not evidence.books.witnessed:
        return _unwitnessed(count, found, evidence)
    known = admitted(found, evidence, settings)
    present = [one for one in known if not one.deleted]
    if len({one.pod.key for one in known}) == 1:
        return present[0] if present else known[0]
    if not present and evidence.ledger.rows and not evidence.records_read:
        return ReadRecords()  # which may show that a container passes for held and is not
    if not evidence.listed:
        # Our view lags, or one of them is over: kubelets before 1.34.7 and 1.35.4 go on with it.
        return ListPods()
    if present:
        raise _several(known)
    if known:
        return known[0]
    raise _nobody(count, evidence)


def in_vain(count: int, evidence: Evidence, settings: MatchSettings) -> PodUid | None:
    """The pod that will not ask again, now that its first request was refused; None: not known.

    The kubelet rejects a pod one of whose containers is refused at its admission. One that has run
    asks again. Of several pods of one name the deleted one, which came first, was the one.
    """
    found = candidates(count, evidence, settings)
    is_witnessed = evidence.books.witnessed
    if is_witnessed:
        found = admitted(found, evidence, settings)
    graves = [one for one in found if one.deleted]
    if graves and (not is_witnessed or len({one.pod.key for one in found}) == 1):
        return graves[0].pod.uid
    if len(found) != 1 or found[0].row is not None or found[0].pod.has_run:
        return None
    return found[0].pod.uid


def _unwitnessed(
    count: int, found: tuple[Candidate, ...], evidence: Evidence
) -> Candidate | Question:
    """Kubelets before 1.34: only a lock owner that is the only candidate is served."""
    is_alone = len(found) == 1
    if is_alone and lock_of(found[0].pod, evidence):
        return found[0]
    if not evidence.listed:
        return ListPods()
    if not found:
        raise _nobody(count, evidence)
    if not evidence.waited:
        return AwaitLock(*found[0].pod.key) if is_alone else AwaitLock()
    if not evidence.node_read:
        return LookAtNode()
    if all(one.deleted for one in found) or (is_alone and found[0].row is None):
        return found[0]  # who is told why by the next gate
    raise _silent(found)


def _silent(found: tuple[Candidate, ...]) -> Refusal:
    if len(found) == 1:
        name = "/".join(found[0].pod.key)
        sentence = (
            f"This kubelet cannot say which pod it admits, and pod {name}, the only one that could "
            "be meant, holds no node lock any more; delete the pod, or upgrade the kubelet to 1.34."
        )
    else:
        sentence = (
            f"This kubelet cannot say which pod it admits and {len(found)} pods could be meant; "
            "upgrade the kubelet to 1.34 or later, or start GPU pods one at a time."
        )
    return Refusal(RefusalReason.WITNESS_SILENT, sentence, transient=True)


def _several(known: tuple[Candidate, ...]) -> Refusal:
    names = cap(", ".join(sorted({"/".join(one.pod.key) for one in known})))
    if all(one.row is not None and not one.deleted for one in known):
        return Refusal(
            RefusalReason.MANY_PODS_ADMITTED,
            f"The kubelet lost its records of several pods with dead containers ({names}) and does "
            "not say which it starts again, so none is guessed; delete all but one of them.",
        )
    return Refusal(
        RefusalReason.MANY_PODS_ADMITTED,
        f"The kubelet is admitting several pods at once ({names}) and does not say for which it "
        "asks, so none is guessed; create this pod again.",
    )


def _nobody(count: int, evidence: Evidence) -> Refusal:
    """Why no pod could be found for the request."""
    if evidence.blind:
        return Refusal(
            RefusalReason.PODS_UNKNOWN,
            "The API server cannot be asked which pods are on this node, and of those that the "
            f"agent knows none that requests {count} slice(s) is being admitted; the pod's "
            "controller starts it again.",
            transient=True,
        )
    return Refusal(
        RefusalReason.NO_POD_ADMITTED,
        f"The kubelet asks for {count} slice(s), but no pod of this node that requests as many "
        "is being admitted: static pods and deleted pods cannot be given GPUs; create the pod "
        "through the API server.",
    )
