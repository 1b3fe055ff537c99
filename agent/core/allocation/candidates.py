"""Finds the candidates of an Allocate: the pods of this node that it may be for.

A pod is a candidate if it has a container that requests that many slices and has no row, or whose
row the kubelet has no record of. Annotations do not matter.

The kubelet asks at two places. It *admits* one pod after the other: new pods, and after its start
all that were there before. There it asks in the order of the spec, stops at the first refusal and
rejects the pod. It asks for no container that it has a record of, and after a start for none that
ran at that moment by the runtime's word, even if it has died since. Later its *pod workers* start
dead containers again, in parallel and in any order; they ask where there is no record, and after a
refusal for the next container and for this one again some seconds later. So after a lost checkpoint
the order says something only while a pod is being admitted.
"""

import datetime as dt
from collections.abc import Iterator

import msgspec

from agent.core.allocation.evidence import Books, Candidate, Evidence
from agent.core.allocation.settings import MatchSettings
from agent.core.cluster.annotations import BIND_PHASE, PHASE_SUCCESS
from agent.core.cluster.pods import ContainerView, PodView, Role
from agent.core.state.holdings import KubeletEpoch
from agent.core.state.ledger import ContainerKey, Row

ASKED_AFTER_DELETION = dt.timedelta(seconds=60)
"""How long after its deletion a pod may still be in the kubelet's queue."""

ASKED_UNWITNESSED = dt.timedelta(seconds=10)
"""The same without a PodResources Get. It is shorter, because each deleted pod is one more
candidate, and two candidates cause a refusal."""

STAMP = dt.timedelta(seconds=1)
"""The resolution of times in a pod's status: an event may be this much later than its time."""


def candidates(count: int, evidence: Evidence, settings: MatchSettings) -> tuple[Candidate, ...]:
    """The candidates for `count` slices: pods that exist, oldest first, then deleted pods.

    Without pods that another Allocate in flight has claimed or whose first Allocate was refused.
    """
    present = (_next(count, pod, evidence, settings) for pod in _asking(count, evidence))
    deleted = (_next(count, pod, evidence, settings) for pod in _deleted_pods(evidence))
    every = (
        *(each for each in present if each is not None),
        *(msgspec.structs.replace(each, deleted=True) for each in deleted if each is not None),
    )
    return tuple(
        each
        for each in every
        if each.pod.uid not in evidence.claimed and each.pod.key not in evidence.absent
    )


def waiting(pod: PodView, evidence: Evidence, resource: str) -> tuple[Candidate, ...]:
    """The containers of `pod` for which the kubelet may still send Allocate, in its order.

    The order is init containers, then the others, as in the spec. The kubelet sends no Allocate for
    a container that runs. It does for an ended init container, if it started without its records.
    """
    rows = {row.key.container: row for row in evidence.ledger.rows_of(pod.uid)}
    return tuple(
        Candidate(pod, container, rows.get(container.name))
        for container in pod.asking(resource)
        if not is_alive(container, evidence.books)
        and not is_over(container, evidence.books.epoch)
        and not _is_held(pod, container, rows.get(container.name), evidence)
    )


def possible(pod: PodView, evidence: Evidence, resource: str) -> tuple[Candidate, ...]:
    """The containers of `pod` for which the kubelet may be asking now, of any count."""
    found = waiting(pod, evidence, resource)
    if is_new(pod, evidence):
        return found[:1]
    first = next((place for place, one in enumerate(found) if _was_dead(one, evidence)), None)
    if first is None:
        return found
    # It was dead when the kubelet started and has no record: the pod is being admitted.
    return found[: first + 1]


def is_at_admission(pod: PodView, evidence: Evidence, resource: str) -> bool:
    """Whether the kubelet can ask for this pod only when it admits it, which it does serially."""
    return is_new(pod, evidence) or any(
        _was_dead(one, evidence) for one in waiting(pod, evidence, resource)
    )


def is_new(pod: PodView, evidence: Evidence) -> bool:
    """Whether no kubelet before this one can have started a container of the pod."""
    rows = evidence.ledger.rows_of(pod.uid)
    return not pod.has_run and all(row.epoch == evidence.books.epoch for row in rows)


def is_alive(container: ContainerView, books: Books) -> bool:
    """Whether the container has a live cgroup. Its status can be late or from before a reboot."""
    return container.running_id is not None and container.running_id in books.alive


def _was_dead(candidate: Candidate, evidence: Evidence) -> bool:
    """Whether the kubelet found the container dead when it started, and asks for it at admission.

    Only a pod without a cgroup proves it. A status that says so may be out of date: the former
    kubelet may have started the container again without telling. That nobody saw it run proves
    nothing either: it can have died between the kubelet's look and the agent's.
    """
    books, started = evidence.books, candidate.container.started_at
    has_begun_since = started is not None and started + STAMP > books.epoch.since
    begun = books.start.begun
    return begun is not None and candidate.pod.uid not in begun and not has_begun_since


def is_over(container: ContainerView, epoch: KubeletEpoch) -> bool:
    """Whether the container ended for good since this kubelet started.

    If it ended before, the kubelet may send Allocate for it when it admits the whole pod again.
    """
    return container.ended_at is not None and container.ended_at > epoch.since


def _asking(count: int, evidence: Evidence) -> list[PodView]:
    """The pods, oldest first, with a container for `count` slices that is not plainly booked.

    Nearly all pods of a node are running. A call for each would make an Allocate slower with each.
    """
    books, known = evidence.books, evidence.known
    booked = evidence.ledger.booked_by(books.epoch) if books.recorded is None else set()
    pods = {
        pod.uid: pod
        for pod in evidence.table.pods.values()
        for container in pod.containers
        if container.count == count
        and (
            ContainerKey(pod.uid, container.name) not in booked
            or (pod.namespace, pod.name) in known
        )
    }
    present = [pod for pod in pods.values() if not pod.terminal]
    return sorted(present, key=lambda pod: (pod.created, pod.namespace, pod.name))


def _next(
    count: int, pod: PodView, evidence: Evidence, settings: MatchSettings
) -> Candidate | None:
    """The first container of the pod that an Allocate for `count` slices may be for.

    While the agent has not asked PodResources about the pod it may be any that waits, because
    records may be missing here.
    """
    is_asked = pod.key in evidence.known or not evidence.books.witnessed
    found = (possible if is_asked else waiting)(pod, evidence, settings.resource)
    return next((each for each in found if each.container.count == count), None)


def _is_held(pod: PodView, container: ContainerView, row: Row | None, evidence: Evidence) -> bool:
    """Whether the kubelet has a record of the container, as far as is known.

    Without a record it may send Allocate, for the first time or again. It loses records if it is
    killed before it writes its checkpoint, or if the checkpoint is lost. PodResources answers by
    name and does not list ordinary init containers. The checkpoint has UIDs and all containers.
    """
    books, holding = evidence.books, evidence.known.get(pod.key)
    if holding and holding.ids_of(container.name, container.resource):
        return True
    if books.recorded is not None and ContainerKey(pod.uid, container.name) in books.recorded:
        return True
    if container.role is Role.INIT or not books.witnessed:
        return books.recorded is None and row is not None and row.epoch == books.epoch
    # If PodResources was asked, it named no ids; the row may be booked for a pod of the same name.
    is_unasked = holding is None and books.recorded is None
    return is_unasked and row is not None and row.is_booked_by(books.epoch)


def _deleted_pods(evidence: Evidence) -> Iterator[PodView]:
    """Deleted pods without an answer that the kubelet may still have in its queue.

    - A pod that was answered before the kubelet lost its records is left out. It ends at once with
      any answer, but as a candidate it would cost its successor an answer.
    - A pod is left out if its successor has run, or this kubelet has sent Allocate for it.
    - A deletion time in the future was taken before the clock was set back; the pod is left out.
    """
    books, rows_of = evidence.books, evidence.ledger.rows_of
    life = ASKED_AFTER_DELETION if books.witnessed else ASKED_UNWITNESSED
    recent = [
        stone.pod
        for stone in evidence.table.tombstones
        if dt.timedelta(0) <= evidence.now - stone.deleted_at <= life
        and stone.pod.annotations.get(BIND_PHASE) != PHASE_SUCCESS
    ]
    for pod in recent:
        if not pod.terminal and pod.gpu_containers and not rows_of(pod.uid):
            successor = evidence.table.named(*pod.key)
            rows = rows_of(successor.uid) if successor else ()
            is_past = successor is not None and successor.has_run  # it admits them in their order
            if not is_past and all(row.epoch != books.epoch for row in rows):
                yield pod
