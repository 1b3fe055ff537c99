"""Which of the candidates the kubelet is admitting: what it says of each, until one is left.

The kubelet is the witness: it adds a pod to its books just before it admits it, so of all pods
that could be asking it knows, without ids, the one that is. It admits one pod after the other.
"""

import datetime as dt

from agent.core.ages import has_passed
from agent.core.candidates import (
    Candidate,
    candidates,
    is_taken_up,
    recent_graves,
)
from agent.core.errors import Gate, Refusal, cap
from agent.core.evidence import (
    AskKubelet,
    CheckRunning,
    Evidence,
    ListPods,
    Question,
    ReadRecords,
)
from agent.core.holdings import Holding, KubeletEpoch
from agent.core.ledger import ContainerKey
from agent.core.match_settings import MatchSettings
from agent.core.pods import PodUid, PodView, Role
from agent.core.unwitnessed import nobody, without_witness

MANY = 8
"""Candidates beyond which not all are asked: after a reboot with a lost checkpoint there are 110,
and the kubelet answers 100 questions a second."""

TAKING_UP = dt.timedelta(seconds=30)
"""Seconds after its start within which a kubelet has taken up its pods again."""


def being_admitted(count: int, evidence: Evidence, settings: MatchSettings) -> Candidate | Question:
    """The one candidate that the kubelet is admitting, or what must be known first."""
    found = _found(count, evidence, settings)
    question = _unsure(found, evidence)
    if question is not None:
        return question
    if not evidence.books.witnessed:
        return without_witness(count, found, evidence)
    asked = _next_to_ask(found, evidence, settings)
    if asked is not None:
        return asked
    return _only(count, _known(found, evidence, settings), evidence)


def _next_to_ask(
    found: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> AskKubelet | None:
    """Whom to ask about next, the lock's owner first; None: all that need be were asked.

    The kubelet admits one pod after the other. So of many, behind the first that it knows, only
    those are asked about whose containers it may be starting again beside that.
    """
    owner = evidence.lock.owner if evidence.lock else None
    left = [one for one in found if one.pod.key not in evidence.known]
    if len(found) > MANY and any(
        not one.deleted and is_at_admission(one.pod, evidence)
        for one in _known(found, evidence, settings)
    ):
        left = [one for one in left if not is_at_admission(one.pod, evidence)]
    left.sort(key=lambda one: one.pod.key != owner)
    if not left:
        return None
    first, *behind = left
    return AskKubelet(*first.pod.key, tuple(one.pod.key for one in behind))


def _found(count: int, evidence: Evidence, settings: MatchSettings) -> tuple[Candidate, ...]:
    """Everyone who may be asking."""
    table = recent_graves(evidence.table, evidence.books, evidence.now)
    found = candidates(
        count, table, evidence.ledger, evidence.books, settings.resource, evidence.known
    )
    return tuple(one for one in found if one.pod.uid not in evidence.claimed)


def _known(
    found: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> tuple[Candidate, ...]:
    """Those of whom the kubelet said that it admits them."""
    return tuple(one for one in found if _is_known(one, evidence, settings))


def _is_known(one: Candidate, evidence: Evidence, settings: MatchSettings) -> bool:
    holding = evidence.known.get(one.pod.key)
    return holding is not None and _speaks_of(holding, one, settings.resource)


def _speaks_of(holding: Holding, one: Candidate, resource: str) -> bool:
    """Whether the kubelet's answer, which is by name, can be about this very pod.

    It names every container of it and no other, and, where the candidate was never answered, no ids
    for one that comes later: the kubelet asks in the order of the spec.
    """
    named = {each.name for each in holding.containers}
    known = {each.name for each in one.pod.containers}
    if any(each.name not in named for each in one.pod.containers if each.role is Role.APP):
        return False
    if not named <= known:
        return False
    names = [each.name for each in one.pod.asking(resource)]
    later = names[names.index(one.container.name) + 1 :]
    return one.row is not None or not any(holding.ids_of(name, resource) for name in later)


def in_vain(count: int, evidence: Evidence, settings: MatchSettings) -> PodUid | None:
    """The pod that will not ask again, now that its first request was refused; None: not known.

    The kubelet rejects a pod one of whose containers is refused at its admission. One that has run
    asks again. Of several pods of one name the deleted one, which came first, was the one.
    """
    found = _found(count, evidence, settings)
    if evidence.books.witnessed:
        found = _known(found, evidence, settings)
    graves = [one for one in found if one.deleted]
    if len({one.pod.key for one in found}) > 1 and evidence.books.witnessed:
        graves = []
    if graves:
        return graves[0].pod.uid
    if len(found) != 1 or found[0].row is not None or has_run(found[0].pod):
        return None
    return found[0].pod.uid


def is_taking_up(epoch: KubeletEpoch, now: dt.datetime) -> bool:
    """Whether the kubelet may still be admitting the pods that were here before it."""
    return not has_passed(TAKING_UP, epoch.since, now)


def has_run(pod: PodView) -> bool:
    """Whether a container of the pod was started."""
    return any(one.has_run or one.running_id is not None for one in pod.containers)


def is_at_admission(pod: PodView, evidence: Evidence) -> bool:
    """Whether the kubelet asks for the pod at its admission alone.

    That is one pod after the other, and in each the order of the spec. A status is late by some
    milliseconds: so of a pod that has run, only a kubelet that takes up its pods again is believed
    to be at its admission.
    """
    is_young = is_taking_up(evidence.books.epoch, evidence.now)
    return not has_run(pod) or (is_young and not is_taken_up(pod, evidence.books))


def _unsure(found: tuple[Candidate, ...], evidence: Evidence) -> Question | None:
    """What must be known of the candidates' containers before anyone is asked."""
    if not evidence.records_read and (len(found) > MANY or _needs_records(found, evidence)):
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
    """The single one of `admitted`; of one name the present one.

    The kubelet speaks by name, and of a pod that was deleted while it asks for it, too. That one is
    being killed, and its successor is answered again when it asks.
    """
    present = tuple(one for one in admitted if not one.deleted)
    if len({one.pod.key for one in admitted}) == 1:
        return present[0] if present else admitted[0]
    if present:
        return _one_of_several(admitted, present, evidence)
    if not evidence.records_read and _may_be_misjudged(evidence):
        return ReadRecords()
    if not evidence.listed:
        return ListPods()
    if admitted:
        return admitted[0]
    raise nobody(count, evidence)


def _may_be_misjudged(evidence: Evidence) -> bool:
    """Whether the kubelet's file may show a container that passes for held without being asked for.

    That is an init container, or one whose row was booked for the ids of a pod of the same name.
    """
    epoch = evidence.books.epoch
    return any(row.role is Role.INIT or row.is_booked_by(epoch) for row in evidence.ledger.rows)


def _one_of_several(
    admitted: tuple[Candidate, ...], present: tuple[Candidate, ...], evidence: Evidence
) -> Question:
    """What may settle it yet, before nobody is guessed. Raises Refusal."""
    if not evidence.listed:
        return ListPods()  # one of them may be over: kubelets before 1.34.7 and 1.35.4 go on
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
