"""Which pod an Allocate is for: one pure decision, or the next question.

The kubelet is the witness of whom it admits. The node lock is the proof of right: only it needs
rights on the Node, while a pod's annotations can be written by a tenant. The caller performs a
question, adds the answer to the evidence and decides again from the start, so that every decision
rests on the newest view.
"""

import dataclasses

from agent.core.admission import being_admitted, has_run, is_at_admission, is_taking_up
from agent.core.candidates import Candidate, waiting
from agent.core.errors import Gate, Refusal
from agent.core.evidence import UNREAD, Evidence, Grant, ListPods, LookAtPod, Question
from agent.core.grant import check, renamed, replay
from agent.core.match_settings import MatchSettings
from agent.core.right import lock_of, right


def decide(count: int, evidence: Evidence, settings: MatchSettings) -> Question | Grant:
    """Serve one container that asks for `count` slices, or say what must be known first.

    Raises Refusal with the gate that closed and a sentence for the pod's owner.
    """
    found = being_admitted(count, evidence, settings)
    if not isinstance(found, Candidate):
        return found
    if not evidence.listed and (_may_be_a_newcomer(found, evidence) or found.deleted):
        return ListPods()
    question = _same(found, evidence)
    if question is not None:
        return question
    if _is_one_of_several(found, evidence, settings):
        raise _ambiguous(found)
    if found.row is None:
        return _first(found, evidence, settings)
    return replay(found, found.row, evidence)


def _first(found: Candidate, evidence: Evidence, settings: MatchSettings) -> Question | Grant:
    """The same for a container that was never answered."""
    if settings.renamed:
        raise renamed(f"Pod {'/'.join(found.pod.key)}", settings.resource, settings.renamed)
    question = right(found, evidence, settings)
    if question is not None:
        return question
    granted = check(found, evidence, settings)
    lock = lock_of(found.pod, evidence)
    if isinstance(granted, Grant) and lock is not None:
        return dataclasses.replace(granted, lock=lock.value)
    return granted


def _same(found: Candidate, evidence: Evidence) -> Question | None:
    """What must be asked until it is sure that the pod is still the one that our watch showed.

    A pod whose name was not generated can return under it with another share. Not while it is being
    admitted: what is asked for behind its first answer is its own. Raises Refusal.
    """
    pod = found.pod
    if not pod.reusable_name or found.deleted or _is_under_way(found, evidence):
        return None
    if pod.key not in evidence.looked:
        return None if evidence.listed else LookAtPod(*pod.key)
    if evidence.looked[pod.key] in {UNREAD, pod.uid}:
        return None
    if evidence.list_failed:
        raise Refusal(
            Gate.PODS_UNKNOWN,
            f"Another pod has the name {'/'.join(pod.key)} by now, and the API server cannot be "
            "asked which pods are on this node; the pod's controller starts it again.",
            transient=True,
        )
    return None if evidence.listed else ListPods()


def _is_under_way(found: Candidate, evidence: Evidence) -> bool:
    """Whether a container of the pod was answered before this one at its admission."""
    epoch, rows = evidence.books.epoch, evidence.ledger.rows_of(found.pod.uid)
    return found.row is None and any(row.epoch == epoch for row in rows)


def _may_be_a_newcomer(found: Candidate, evidence: Evidence) -> bool:
    """Whether a pod that our watch has not shown yet may be asking instead.

    Of a pod that it started without asking, or of which it lost the record, the kubelet says for
    good what it says of one that it admits, and asks for it only when a container has died. While
    it takes up its pods again it asks in their order.
    """
    return has_run(found.pod) and not (
        found.row is not None and is_taking_up(evidence.books.epoch, evidence.now)
    )


def _is_one_of_several(found: Candidate, evidence: Evidence, settings: MatchSettings) -> bool:
    """Whether another dead container of the pod may be meant: which is next is not known."""
    if is_at_admission(found.pod, evidence):
        return False
    pod, rows = found.pod, {row.key: row for row in evidence.ledger.rows_of(found.pod.uid)}
    known = evidence.known.get(pod.key)
    dead = waiting(pod, rows, evidence.books, settings.resource, known)
    return sum(one.container.count == found.container.count for one in dead) > 1


def _ambiguous(found: Candidate) -> Refusal:
    return Refusal(
        Gate.MANY_PODS_ADMITTED,
        f"The kubelet lost its records of pod {'/'.join(found.pod.key)}, several containers of "
        "which are dead, and does not say which it starts again, so none is guessed; delete the "
        "pod, and its controller makes a new one.",
    )
