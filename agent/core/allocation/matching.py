"""Which container an Allocate is for, and what it gets: one pure decision, or the next question.

An Allocate names no pod. The kubelet is the witness of whom it admits. The node lock is the proof
of right: only it needs rights on the Node, while a pod's annotations can be written by a tenant.
The caller performs a question, adds the answer to the evidence and decides again from the start,
so that every decision rests on the newest view.
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
    """Serve one container that asks for `count` slices, or say what must be known first.

    No container is ever given what is another one's: where more than one may be meant, nobody is
    served. Raises Refusal with the gate that closed and a sentence for the pod's owner.

    1. Candidates: all pods of the node of which a container may be asked for by that count.
    2. Witness: the kubelet is asked whom of them it admits.
    3. Exactly one of them is being admitted.
    4. It is still the same pod: none has come under its name, or unseen in its place.
    5. The container is the next in order, or the only one that can be meant.
    6. What was answered before is answered again, as long as its GPUs are there.
    7. The first answer needs a right: the node lock names the pod.
    8. And room: the GPUs that the scheduler wrote are here and well, and the shares fit.
    """
    found = candidates(count, evidence, settings)
    one = to_ask(found, evidence, settings) or exactly_one(count, found, evidence, settings)
    if not isinstance(one, Candidate):
        return one
    question = _still_the_same(one, evidence)
    if question is not None:
        return question
    _require_order(one, evidence, settings)
    if one.row is not None:
        return replay(one, one.row, evidence)
    return right(one, evidence, settings) or check(one, evidence, settings)


def _still_the_same(one: Candidate, evidence: Evidence) -> Question | None:
    """What must be asked until it is sure that no pod has come that our watch has not shown.

    A pod whose name was not generated can return under it with another share. Not while it is being
    admitted: what is asked for behind its first answer is its own. Raises Refusal.
    """
    pod = one.pod
    if not evidence.listed and (one.deleted or _may_be_a_newcomer(one, evidence)):
        return ListPods()
    if not pod.reusable_name or one.deleted or _is_under_way(one, evidence):
        return None
    if pod.key not in evidence.looked:
        return None if evidence.listed else LookAtPod(*pod.key)
    if evidence.looked[pod.key] in {UNREAD, pod.uid}:
        return None
    if evidence.list_failed:
        raise Refusal(
            RefusalReason.PODS_UNKNOWN,
            f"Another pod has the name {'/'.join(pod.key)} by now, and the API server cannot be "
            "asked which pods are on this node; the pod's controller starts it again.",
            transient=True,
        )
    return None if evidence.listed else ListPods()


def _is_under_way(one: Candidate, evidence: Evidence) -> bool:
    """Whether a container of the pod was answered before this one at its admission."""
    epoch, rows = evidence.books.epoch, evidence.ledger.rows_of(one.pod.uid)
    return one.row is None and any(row.epoch == epoch for row in rows)


def _may_be_a_newcomer(one: Candidate, evidence: Evidence) -> bool:
    """Whether a pod that our watch has not shown yet may be asking instead.

    Of a pod that it started without asking, or of which it lost the record, the kubelet says for
    good what it says of one that it admits, and asks for it only when a container has died. While
    it takes up its pods again it asks in their order.
    """
    is_young = is_taking_up(evidence.books.epoch, evidence.now)
    return one.pod.has_run and not (one.row is not None and is_young)


def _require_order(one: Candidate, evidence: Evidence, settings: MatchSettings) -> None:
    """Past a pod's admission the kubelet starts what died in no order. Raises Refusal."""
    if is_at_admission(one.pod, evidence):
        return
    dead = waiting(one.pod, evidence, settings.resource)
    if sum(each.container.count == one.container.count for each in dead) > 1:
        raise Refusal(
            RefusalReason.MANY_PODS_ADMITTED,
            f"The kubelet lost its records of pod {'/'.join(one.pod.key)} and does not say which "
            "of several containers it starts again, so none is guessed; delete the pod, and its "
            "controller makes a new one.",
        )
