"""What the kubelet says of the candidates: whom it is admitting.

The kubelet is the witness: it adds a pod to its books just before it admits it, so of all pods
that could be asking it knows, without ids, the one that is. PodResources names no UIDs; its
checkpoint file does.
"""

from agent.core.allocation.at_admission import is_at_admission
from agent.core.allocation.evidence import (
    AskKubelet,
    Candidate,
    CheckRunning,
    Evidence,
    Question,
    ReadRecords,
)
from agent.core.allocation.settings import MatchSettings
from agent.core.cluster.pods import Role

MANY = 8
"""Candidates beyond which not all are asked: after a reboot with a lost checkpoint there are 110,
and the kubelet answers 100 questions a second."""


def to_ask(
    found: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> Question | None:
    """What is to be asked before one of the candidates is taken; None: all is known of them."""
    if not evidence.records_read and _needs_records(found, evidence):
        return ReadRecords()
    running = {one.running_id for each in found for one in each.pod.containers if one.running_id}
    unchecked = frozenset(running) - evidence.checked
    if unchecked:
        return CheckRunning(unchecked)
    return _whom_to_ask(found, evidence, settings) if evidence.books.witnessed else None


def admitted(
    found: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> tuple[Candidate, ...]:
    """Those of whom the kubelet said that it admits them."""
    return tuple(one for one in found if _is_admitted(one, evidence, settings))


def _needs_records(found: tuple[Candidate, ...], evidence: Evidence) -> bool:
    """Whether something hangs on the kubelet's file.

    So it does for init containers, which are listed nowhere else; where this kubelet once named ids
    for a container and now does not, for it spoke of another pod of that name, then or now; and
    where many may be meant, for those in the file need not be asked about.
    """
    if not evidence.books.witnessed:
        return bool(found)
    epoch = evidence.books.epoch
    return len(found) > MANY or any(
        (one.row is not None and one.row.is_booked_by(epoch))
        or any(each.role is Role.INIT for each in one.pod.gpu_containers)
        for one in found
    )


def _whom_to_ask(
    found: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> AskKubelet | None:
    """Whom to ask about next, the lock's owner first; None: all that need be were asked.

    Those of static pods come last: anybody who may make pods can have some that no kubelet admits.
    The kubelet admits one pod after the other. So of many, behind the first that it knows, only
    those are asked about whose containers it may be starting again beside that.
    """
    owner = evidence.lock.owner if evidence.lock else None
    left = [one for one in found if one.pod.key not in evidence.known]
    if len(found) > MANY and any(
        not one.deleted and is_at_admission(one.pod, evidence)
        for one in admitted(found, evidence, settings)
    ):
        left = [one for one in left if not is_at_admission(one.pod, evidence)]
    left.sort(key=lambda one: (one.pod.key != owner, one.pod.static))
    if not left:
        return None
    first, *behind = left
    return AskKubelet(*first.pod.key, tuple(one.pod.key for one in behind))


def _is_admitted(one: Candidate, evidence: Evidence, settings: MatchSettings) -> bool:
    """Whether the kubelet knows the name, and its answer can be about this very pod.

    It names every container of it and no other, and, where the candidate was never answered, no ids
    for one that comes later: the kubelet asks in the order of the spec.
    """
    holding = evidence.known.get(one.pod.key)
    if holding is None:
        return False
    named = {each.name for each in holding.containers}
    known = {each.name for each in one.pod.containers}
    apps = {each.name for each in one.pod.containers if each.role is Role.APP}
    names = [each.name for each in one.pod.asking(settings.resource)]
    later = names[names.index(one.container.name) + 1 :]
    is_begun = any(holding.ids_of(name, settings.resource) for name in later)
    return apps <= named <= known and (one.row is not None or not is_begun)
