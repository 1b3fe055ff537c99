"""Decides which container an Allocate is for and what it gets, or returns the next question.

An Allocate names no pod. The kubelet is the witness: it says which pod it admits. The node lock is
the proof of right: writing it needs rights on the Node, while a tenant can write a pod's
annotations. The caller asks the question, adds the answer to the evidence and decides again from
the start, so that every decision uses the newest view.
"""

from agent.core.allocation.candidates import candidates, is_at_admission, possible
from agent.core.allocation.evidence import (
    UNREAD,
    Candidate,
    Evidence,
    Grant,
    ListPods,
    LookAtPod,
    Question,
    ReadRecords,
)
from agent.core.allocation.exactly_one import exactly_one
from agent.core.allocation.grant import check, replay
from agent.core.allocation.right import hopeless, right, seek_lock
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
    5. The container is the next in order, or the only one that the kubelet can be asking for.
    6. A container that was answered before gets the same answer, as long as its GPUs are there.
    7. A first answer needs a right: the node lock names the pod.
    8. A first answer needs room: the GPUs in the annotation are here and serving; the shares fit.
    """
    pool = candidates(count, evidence, settings)
    candidate = to_ask(pool, evidence, settings) or exactly_one(count, pool, evidence, settings)
    if not isinstance(candidate, Candidate):
        return candidate
    question = _seek_owner(candidate, evidence, settings) or _still_the_same(
        candidate, evidence, settings
    )
    if question is not None:
        return question
    _require_order(candidate, evidence, settings)
    if candidate.row is not None:
        return replay(candidate, candidate.row, evidence)
    return right(candidate, evidence, settings) or check(candidate, evidence, settings)


def _seek_owner(
    candidate: Candidate, evidence: Evidence, settings: MatchSettings
) -> Question | None:
    """The lock's question before the pod is read: its owner may wait longer for the API server."""
    pod = candidate.pod
    if candidate.row is not None or not pod.reusable_name or hopeless(candidate, settings):
        return None  # a replay needs no lock, no lock helps the hopeless, the others are not read
    is_first = is_at_admission(pod, evidence, settings.resource)
    return seek_lock(pod, evidence, settings) if is_first else None


def _still_the_same(
    candidate: Candidate, evidence: Evidence, settings: MatchSettings
) -> Question | None:
    """The question that must rule out a new pod that the watch has not shown; None: ruled out.

    A pod whose name was not generated can be created again with another share. Once a container of
    a pod was answered at its admission, the calls that follow are for the same pod. Raises Refusal.
    """
    pod = candidate.pod
    # PodResources says "known, no devices" of a pod that is being admitted, of one that was started
    # without an Allocate, and of one whose records are lost. The last two ask only when a container
    # has died. Then a pod that no view shows may be asking instead.
    is_newcomer_possible = not is_at_admission(pod, evidence, settings.resource)
    if not evidence.listed and (candidate.deleted or is_newcomer_possible):
        return ListPods()
    if evidence.list_failed and is_newcomer_possible:
        raise _unknown(
            f"The kubelet has no record of pod {'/'.join(pod.key)}, which may have run before, so "
            "a pod that the agent does not know may be asking"
        )
    if not pod.reusable_name or candidate.deleted or _is_under_way(candidate, evidence):
        return None
    if pod.key not in evidence.looked:
        return None if evidence.listed and not evidence.list_failed else LookAtPod(*pod.key)
    looked = evidence.looked[pod.key]
    if looked is UNREAD and not evidence.records_read:
        return ReadRecords()
    if looked == pod.uid or (looked is UNREAD and _is_recorded(candidate, evidence, settings)):
        return None
    if looked is UNREAD:  # a GET that failed proves nothing
        raise _unknown(f"The name of pod {'/'.join(pod.key)} may be another pod's by now")
    if evidence.list_failed:
        raise _unknown(f"Another pod now has the name {'/'.join(pod.key)}")
    return None if evidence.listed else ListPods()


def _is_recorded(candidate: Candidate, evidence: Evidence, settings: MatchSettings) -> bool:
    """Whether PodResources names slices for a container that the checkpoint has under this UID.

    The file alone proves nothing: it keeps a rejected pod's until the kubelet allocates again.
    """
    known = evidence.known.get(candidate.pod.key)
    return known is not None and any(
        key.pod_uid == candidate.pod.uid and known.ids_of(key.container, settings.resource)
        for key in evidence.books.recorded or ()
    )


def _unknown(what: str) -> Refusal:
    return Refusal(
        RefusalReason.PODS_UNKNOWN,
        f"{what}, and the agent could not ask the API server which pods are on this node; the "
        "pod's controller or the kubelet starts it again; if it has no controller, create it "
        "again.",
        transient=True,
    )


def _is_under_way(candidate: Candidate, evidence: Evidence) -> bool:
    """Whether an earlier container of the pod was answered at this admission.

    PodResources must say that the kubelet holds it, or a new pod may have its name. Of ordinary
    init containers it says nothing, so that they prove nothing.
    """
    epoch, known = evidence.books.epoch, evidence.known.get(candidate.pod.key)
    return candidate.row is None and any(
        row.epoch == epoch
        and (known is None or bool(known.ids_of(row.key.container, row.resource)))
        for row in evidence.ledger.rows_of(candidate.pod.uid)
    )


def _require_order(candidate: Candidate, evidence: Evidence, settings: MatchSettings) -> None:
    """Require a single container that the kubelet can be asking for. Raises Refusal."""
    asked = possible(candidate.pod, evidence, settings.resource)
    if sum(each.container.count == candidate.container.count for each in asked) > 1:
        raise Refusal(
            RefusalReason.MANY_PODS_ADMITTED,
            f"The kubelet lost its checkpoint and does not say which of several containers of pod "
            f"{'/'.join(candidate.pod.key)} it starts again; delete the pod, and its controller "
            "makes a new one.",
        )
