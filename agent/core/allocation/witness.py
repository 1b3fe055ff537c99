"""Asks the kubelet about the candidates, to find the pod that it is admitting.

PodResources Get knows a pod from just before its admission. So among the candidates, the pod being
admitted is the one that Get knows without device ids. PodResources has no UIDs; the kubelet's
checkpoint file has.
"""

from agent.core.allocation.candidates import is_at_admission, is_new
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
"""With more candidates than this, the agent does not ask about all. After a reboot with a lost
checkpoint there are up to 110, and the kubelet answers 100 calls a second."""


def to_ask(
    found: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> Question | None:
    """The next question that has to be answered before a candidate is taken; None: none is left."""
    if not evidence.records_read and _needs_records(found, evidence):
        return ReadRecords()
    containers = (container for each in found for container in each.pod.containers)
    running = frozenset(each.running_id for each in containers if each.running_id)
    unchecked = running - evidence.checked
    if unchecked:
        return CheckRunning(unchecked)
    return _whom_to_ask(found, evidence, settings) if evidence.books.witnessed else None


def admitted(
    found: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> tuple[Candidate, ...]:
    """The candidates that the kubelet is admitting by its own answer."""
    return tuple(each for each in found if _is_admitted(each, evidence, settings))


def _needs_records(found: tuple[Candidate, ...], evidence: Evidence) -> bool:
    """Whether the decision needs the kubelet's checkpoint file.

    - Init containers are listed nowhere else.
    - If this kubelet once named ids for a candidate's container and now does not, one of the two
      answers was about another pod of that name.
    - With many candidates, those in the file need no PodResources Get.
    """
    if not evidence.books.witnessed:
        return bool(found)
    epoch = evidence.books.epoch
    return len(found) > MANY or any(
        (each.row is not None and each.row.is_booked_by(epoch))
        or any(container.role is Role.INIT for container in each.pod.gpu_containers)
        for each in found
    )


def _whom_to_ask(
    found: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> AskKubelet | None:
    """The pod to ask about next and those behind it; None: no further pod needs a question.

    The owner of the node lock comes first. Static pods come last, because a tenant can create
    mirror pods that no kubelet admits. The kubelet admits one pod after the other. So with many
    candidates, once one is known to be admitted, only those remain whose containers the kubelet may
    be restarting in parallel.
    """
    owner = evidence.lock.owner if evidence.lock else None
    left = [each for each in found if each.pod.key not in evidence.known]
    if len(found) > MANY and any(
        not each.deleted and is_at_admission(each.pod, evidence, settings.resource)
        for each in admitted(found, evidence, settings)
    ):
        left = [each for each in left if not is_at_admission(each.pod, evidence, settings.resource)]
    left.sort(key=lambda each: (each.pod.key != owner, each.pod.static))
    if not left:
        return None
    first, *behind = left
    return AskKubelet(*first.pod.key, tuple(each.pod.key for each in behind))


def _is_admitted(candidate: Candidate, evidence: Evidence, settings: MatchSettings) -> bool:
    """Whether the kubelet knows the name, and its answer can be about this pod.

    The answer must name all app containers of the pod and no container of another. If the pod is
    new, the answer must have no ids for a later container, because the kubelet sends Allocate in
    the order of the spec.
    """
    holding = evidence.known.get(candidate.pod.key)
    if holding is None:
        return False
    named = {each.name for each in holding.containers}
    known = {each.name for each in candidate.pod.containers}
    apps = {each.name for each in candidate.pod.containers if each.role is Role.APP}
    names = [each.name for each in candidate.pod.asking(settings.resource)]
    later = names[names.index(candidate.container.name) + 1 :]
    has_later_ids = any(holding.ids_of(name, settings.resource) for name in later)
    return apps <= named <= known and not (is_new(candidate.pod, evidence) and has_later_ids)
