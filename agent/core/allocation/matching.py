"""Decides which container an Allocate is for and what it gets, or returns the next question.

An Allocate names no pod. The kubelet is the witness: it says which pod it admits. The node lock is
the proof of right: writing it needs rights on the Node, while a tenant can write a pod's
annotations. The caller asks the question, adds the answer to the evidence and decides again from
the start, so that every decision uses the newest view.
"""

from agent.core.allocation.at_admission import is_at_admission, is_taking_up
from agent.core.allocation.candidates import candidates, waiting
from agent.core.allocation.evidence import (
    UNREAD,
    Candidate,
    Evidence,
    Grant,
    ListPods,
    LookAtPod,
    Question,
)
from agent.core.allocation.exactly_one import exactly_one
from agent.core.allocation.grant import check, replay
from agent.core.allocation.right import right
from agent.core.allocation.settings import MatchSettings
from agent.core.allocation.witness import to_ask
from agent.core.errors import Refusal, RefusalReason


def decide(count: int, evidence: Evidence, settings: MatchSettings) -> Question | Grant:
    """Grant one container that asks for `count` slices, or return the next question.

    Invariant: no container gets what belongs to another one. If the call may be for more than one
    container, none is served. Raises Refusal with its gate and a sentence for the pod's owner.

    1. Candidates: the pods of this node with a container that may be asking for `count` slices.
    2. Witness: the kubelet says which of them it is admitting.
    3. The kubelet is admitting exactly one of them.
    4. It is still the same pod: no new pod has its name, and no pod came that the watch lacks.
    5. The container is the next in order, or the only one that can be meant.
    6. A container that was answered before gets the same answer, as long as its GPUs are there.
    7. A first answer needs a right: the node lock names the pod.
    8. A first answer needs room: the GPUs in the annotation are here and serving; the shares fit.
    """
    pool = candidates(count, evidence, settings)
    candidate = to_ask(pool, evidence, settings) or exactly_one(count, pool, evidence, settings)
    if not isinstance(candidate, Candidate):
        return candidate
    question = _still_the_same(candidate, evidence)
    if question is not None:
        return question
    _require_order(candidate, evidence, settings)
    if candidate.row is not None:
        return replay(candidate, candidate.row, evidence)
    return right(candidate, evidence, settings) or check(candidate, evidence, settings)


def _still_the_same(candidate: Candidate, evidence: Evidence) -> Question | None:
    """The question that must rule out a new pod that the watch has not shown; None: ruled out.

    A pod whose name was not generated can be created again with another share. Once a container of
    a pod was answered at its admission, the calls that follow are for the same pod. Raises Refusal.
    """
    pod = candidate.pod
    if not evidence.listed and (candidate.deleted or _may_be_a_newcomer(candidate, evidence)):
        return ListPods()
    if not pod.reusable_name or candidate.deleted or _is_under_way(candidate, evidence):
        return None
    if pod.key not in evidence.looked:
        return None if evidence.listed else LookAtPod(*pod.key)
    if evidence.looked[pod.key] in {UNREAD, pod.uid}:
        return None
    if evidence.list_failed:
        raise Refusal(
            RefusalReason.PODS_UNKNOWN,
            f"Another pod now has the name {'/'.join(pod.key)}, and the API server cannot be asked "
            "which pods are on this node; the pod's controller starts it again.",
            transient=True,
        )
    return None if evidence.listed else ListPods()


def _is_under_way(candidate: Candidate, evidence: Evidence) -> bool:
    """Whether an earlier container of the pod was answered at this admission."""
    epoch, rows = evidence.books.epoch, evidence.ledger.rows_of(candidate.pod.uid)
    return candidate.row is None and any(row.epoch == epoch for row in rows)


def _may_be_a_newcomer(candidate: Candidate, evidence: Evidence) -> bool:
    """Whether a pod that the watch has not shown yet may be asking instead.

    The kubelet reports "known, no devices" in three cases: the pod is being admitted; it was
    started without an Allocate; the kubelet lost its checkpoint. In the last two it asks only when
    a container has died. While it admits its pods again after a start, it asks in their order.
    """
    is_young = is_taking_up(evidence.books.epoch, evidence.now)
    return candidate.pod.has_run and not (candidate.row is not None and is_young)


def _require_order(candidate: Candidate, evidence: Evidence, settings: MatchSettings) -> None:
    """Require a single possible container: dead containers restart in any order. Raises Refusal."""
    if is_at_admission(candidate.pod, evidence):
        return
    dead = waiting(candidate.pod, evidence, settings.resource)
    if sum(each.container.count == candidate.container.count for each in dead) > 1:
        raise Refusal(
            RefusalReason.MANY_PODS_ADMITTED,
            f"The kubelet lost its checkpoint and does not say which of several containers of pod "
            f"{'/'.join(candidate.pod.key)} it starts again; delete the pod, and its controller "
            "makes a new one.",
        )
