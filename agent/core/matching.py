"""Which pod an Allocate is for: one pure decision, or the next question.

The kubelet is the witness: it adds a pod to its books just before it admits it, so of all pods
that could be asking it knows, without ids, the one that is. The node lock is the proof of right:
only it needs rights on the Node, while a pod's annotations can be written by a tenant.
The caller performs a question, adds the answer to the evidence and decides again from the start,
so that every decision rests on the newest view.
"""

import dataclasses
import datetime as dt

from agent.core.candidates import Candidate, all_confirmed, candidates, remembered, waiting
from agent.core.errors import Gate, Refusal, cap
from agent.core.evidence import (
    AskKubelet,
    CheckRunning,
    Evidence,
    Grant,
    ListPods,
    Question,
    ReadRecords,
)
from agent.core.grant import check, renamed, replay
from agent.core.guess import guess
from agent.core.ledger import ContainerKey
from agent.core.match_settings import MatchSettings
from agent.core.namesakes import may_be_another, speaks_of
from agent.core.pods import PodUid, PodView, Role
from agent.core.right import right

TAKING_UP = dt.timedelta(seconds=30)
"""Seconds after its start within which a kubelet has taken up its pods again."""


def decide(count: int, evidence: Evidence, settings: MatchSettings) -> Question | Grant:
    """Serve one container that asks for `count` slices, or say what must be known first.

    Raises Refusal with the gate that closed and a sentence for the pod's owner.
    """
    if evidence.blind and evidence.books.witnessed and not evidence.table.synced:
        table = remembered(evidence.ledger, evidence.books.epoch)
        evidence = dataclasses.replace(evidence, table=table)
    found = _being_admitted(count, evidence, settings)
    if not isinstance(found, Candidate):
        return found
    is_doubtful = may_be_another(found, evidence) or _may_be_a_newcomer(found, evidence)
    if not evidence.listed and is_doubtful:
        return ListPods()
    if found.row is not None:
        if _is_uncertain(found, evidence, settings):
            raise _doubted(found)
        return replay(found, found.row, evidence)
    if settings.renamed:
        raise renamed(f"Pod {'/'.join(found.pod.key)}", settings.resource, settings.renamed)
    question = right(found, evidence, settings)
    if question is not None:
        return question
    return check(found, evidence, settings)


def _being_admitted(
    count: int, evidence: Evidence, settings: MatchSettings
) -> Candidate | Question:
    """The one candidate that the kubelet is admitting."""
    found = _found(count, evidence, settings)
    question = _unsure(found, evidence)
    if question is not None:
        return question
    if not evidence.books.witnessed:
        return _without_witness(count, found, evidence, settings)
    owner = evidence.lock.owner if evidence.lock else None
    for candidate in sorted(found, key=lambda one: one.pod.key != owner):
        if candidate.pod.key not in evidence.known:
            return AskKubelet(*candidate.pod.key)
        if candidate.pod.key == owner and _settles(candidate, found, evidence, settings):
            return candidate
    admitted = _known(found, evidence, settings)
    guessed = guess(count, admitted, evidence, settings)
    return _only(count, admitted, evidence) if guessed is None else guessed


def _found(count: int, evidence: Evidence, settings: MatchSettings) -> tuple[Candidate, ...]:
    """Everyone who may be asking."""
    found = candidates(
        count, evidence.table, evidence.ledger, evidence.books, settings.resource, evidence.known
    )
    return tuple(one for one in found if one.pod.uid not in evidence.claimed)


def _known(
    found: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> tuple[Candidate, ...]:
    """Those of whom the kubelet said that it admits them."""
    return tuple(one for one in found if _is_known(one, evidence, settings))


def _is_known(one: Candidate, evidence: Evidence, settings: MatchSettings) -> bool:
    holding = evidence.known.get(one.pod.key)
    return holding is not None and speaks_of(holding, one, settings.resource)


def used_up(count: int, evidence: Evidence, settings: MatchSettings) -> PodUid | None:
    """The deleted pod that will not ask again, now that this request was refused.

    None: there is none, or the request may have been for a pod of another name. The kubelet takes
    up the pods of one name in the order in which they lived, and asks for a refused one never
    again: whichever of them this request was for, the oldest is behind it. If it still counted,
    all pods after it under its name would be refused for as long as its grave is kept.
    """
    admitted = _known(_found(count, evidence, settings), evidence, settings)
    graves = [one.pod.uid for one in admitted if one.deleted]
    same_name = len({one.pod.key for one in admitted}) == 1
    return graves[0] if graves and same_name else None


def may_be_meant(count: int, evidence: Evidence, settings: MatchSettings) -> frozenset[PodUid]:
    """Pods that had answers, for a dead container of one of which this request may have been.

    It was refused, and the kubelet goes on with others. Those of which it said nothing may be
    meant as well, but not before it has taken up all its pods: till then it asks in their order.
    """
    is_young = evidence.now - evidence.books.epoch.since < TAKING_UP

    def is_possible(one: Candidate) -> bool:
        asked = one.pod.key in evidence.known
        return _is_known(one, evidence, settings) if asked or is_young else True

    found = _found(count, evidence, settings)
    return frozenset(one.pod.uid for one in found if one.row is not None and is_possible(one))


def _may_be_behind(found: Candidate, evidence: Evidence) -> bool:
    """Whether it is an init container that had ended before this kubelet admitted its pod.

    Then the pod was admitted without asking, for the plugin came later, and only a new sandbox runs
    the init container again.
    """
    if found.container.role is not Role.INIT or found.container.ended_at is None:
        return False
    since = evidence.books.epoch.since
    return any(one.started_at and one.started_at > since for one in found.pod.containers)


def _is_uncertain(found: Candidate, evidence: Evidence, settings: MatchSettings) -> bool:
    """Whether another dead container of the pod may be meant: which is next is not known."""
    if found.pod.uid not in evidence.in_doubt and not _may_be_behind(found, evidence):
        return False
    rows = {row.key: row for row in evidence.ledger.rows}
    holding = evidence.known.get(found.pod.key)
    dead = waiting(found.pod, rows, evidence.books, settings.resource, holding)
    return sum(one.container.count == found.container.count for one in dead) > 1


def _doubted(found: Candidate) -> Refusal:
    return Refusal(
        Gate.MANY_PODS_ADMITTED,
        f"The kubelet lost its records of pod {'/'.join(found.pod.key)}, several containers of "
        "which are dead, and does not say which it starts again, so none is guessed; delete the "
        "pod, and its controller makes a new one.",
    )


def _settles(
    owner: Candidate, found: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> bool:
    """Whether the lock owner's answer alone is enough: nobody else can be asking.

    A pod that was started without being asked for can, when one of its containers has died.
    """
    others = [one for one in found if one is not owner]
    is_alone = not any(
        one.pod.key == owner.pod.key or _has_run(one.pod) or _has_run(owner.pod) for one in others
    )
    admitted = _is_known(owner, evidence, settings) and not owner.deleted
    return (
        admitted
        and is_alone
        and not may_be_another(owner, evidence)
        and all_confirmed(
            evidence.table, evidence.ledger, evidence.books, settings.resource, evidence.known
        )
    )


def _has_run(pod: PodView) -> bool:
    return any(one.has_run or one.running_id is not None for one in pod.containers)


def _may_be_a_newcomer(found: Candidate, evidence: Evidence) -> bool:
    """Whether a pod that our watch has not shown yet may be asking instead.

    Of a pod that it started without asking, or of which it lost the record, the kubelet says for
    good what it says of one that it admits, and asks for it only when a container has died. While
    it takes up its pods again it asks in their order.
    """
    is_young = evidence.now - evidence.books.epoch.since < TAKING_UP
    return _has_run(found.pod) and not (is_young and found.row is not None)


def _unsure(found: tuple[Candidate, ...], evidence: Evidence) -> Question | None:
    """What must be known of the candidates' containers before anyone is asked."""
    if not evidence.records_read and _needs_records(found, evidence):
        return ReadRecords()
    running = {one.running_id for each in found for one in each.pod.containers if one.running_id}
    unchecked = frozenset(running) - evidence.checked
    return CheckRunning(unchecked) if unchecked else None


def _needs_records(found: tuple[Candidate, ...], evidence: Evidence) -> bool:
    """Whether something hangs on what the kubelet has of an init container, or of any.

    So it does where this kubelet once named ids for a container and now does not: it spoke of
    another pod of that name, then or now.
    """
    if not evidence.books.witnessed:
        return bool(found)
    return any(
        container.role is Role.INIT and not _is_confirmed(each.pod, container.name, evidence)
        for each in found
        for container in each.pod.gpu_containers
    ) or any(
        _is_confirmed(each.pod, each.container.name, evidence) and each.pod.key in evidence.known
        for each in found
    )


def _is_confirmed(pod: PodView, container: str, evidence: Evidence) -> bool:
    """Whether this kubelet booked the container's answer, or one to another pod of that name."""
    row = evidence.ledger.find(ContainerKey(pod.uid, container))
    return row is not None and row.is_booked_by(evidence.books.epoch)


def _only(count: int, admitted: tuple[Candidate, ...], evidence: Evidence) -> Candidate | Question:
    """The single one of `admitted`; equal shares of one name are the same answer."""
    present = tuple(one for one in admitted if not one.deleted)
    if len(admitted) == 1:
        return admitted[0]
    if not admitted:
        if not evidence.records_read and any(row.role is Role.INIT for row in evidence.ledger.rows):
            return ReadRecords()
        if not evidence.listed:
            return ListPods()
        raise _nobody(count, evidence)
    same_name = len({one.pod.key for one in admitted}) == 1
    if same_name and len(present) == 1 and len({one.pod.groups for one in admitted}) == 1:
        return present[0]
    names = cap(", ".join(sorted({"/".join(one.pod.key) for one in admitted})))
    if all(one.row is not None for one in present) and len(present) == len(admitted):
        raise Refusal(
            Gate.MANY_PODS_ADMITTED,
            f"The kubelet lost its records of several pods with dead containers ({names}) and does "
            "not say which it starts again, so none is guessed; delete all but one of them.",
        )
    raise Refusal(
        Gate.MANY_PODS_ADMITTED,
        f"The kubelet is admitting several pods at once ({names}) and does not say for which it "
        "asks, so none is guessed; create this pod again.",
    )


def _nobody(count: int, evidence: Evidence) -> Refusal:
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


def _without_witness(
    count: int, found: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> Candidate | Question:
    """Kubelets before 1.34: only a lock owner that is the only candidate is served, or a guess."""
    owner = evidence.lock.owner if evidence.lock else None
    if not found and not evidence.listed:
        return ListPods()
    if not found and evidence.blind:
        raise _nobody(count, evidence)
    if len(found) == 1 and found[0].pod.key == owner:
        return found[0]
    guessed = guess(count, found, evidence, settings)
    if guessed is not None:
        return guessed
    raise Refusal(
        Gate.WITNESS_SILENT,
        f"This kubelet cannot say which pod it admits and {len(found)} pods could be meant; "
        "upgrade the kubelet to 1.34 or later, or start GPU pods one at a time.",
        transient=True,
    )
