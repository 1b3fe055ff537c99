"""Kubelets before 1.34, which do not say whom they admit; and the refusal where that is nobody.

Nothing here asks such a kubelet anything: who may be asking is known from the pods alone.
"""

from agent.core.candidates import Candidate
from agent.core.errors import Gate, Refusal
from agent.core.evidence import AwaitLock, Evidence, ListPods, LookAtNode, Question
from agent.core.right import lock_of


def without_witness(
    count: int, found: tuple[Candidate, ...], evidence: Evidence
) -> Candidate | Question:
    """Kubelets before 1.34: only a lock owner that is the only candidate is served."""
    is_alone = len(found) == 1
    if is_alone and lock_of(found[0].pod, evidence):
        return found[0]
    question = _up_to_date(found, evidence)
    if question is not None:
        return question
    if not found:
        raise nobody(count, evidence)
    if all(one.deleted for one in found) or (is_alone and found[0].row is None):
        return found[0]  # who is told why by the next gate
    raise Refusal(
        Gate.WITNESS_SILENT,
        f"This kubelet cannot say which pod it admits and {len(found)} pods could be meant; "
        "upgrade the kubelet to 1.34 or later, or start GPU pods one at a time.",
        transient=True,
    )


def _up_to_date(found: tuple[Candidate, ...], evidence: Evidence) -> Question | None:
    """What has to be asked before anybody is refused: our views may lag."""
    if not evidence.listed:
        return ListPods()
    if found and not evidence.waited:
        return AwaitLock(*found[0].pod.key) if len(found) == 1 else AwaitLock()
    return LookAtNode() if found and not evidence.node_read else None


def nobody(count: int, evidence: Evidence) -> Refusal:
    """Why no pod could be found for the request."""
    if evidence.blind:
        return Refusal(
            Gate.PODS_UNKNOWN,
            "The API server cannot be asked which pods are on this node, and of those that the "
            f"agent knows none that requests {count} slice(s) is being admitted; the pod's "
            "controller starts it again.",
            transient=True,
        )
    return Refusal(
        Gate.NO_POD_ADMITTED,
        f"The kubelet asks for {count} slice(s), but no pod of this node that requests as many "
        "is being admitted: static pods and deleted pods cannot be given GPUs; create the pod "
        "through the API server.",
    )
