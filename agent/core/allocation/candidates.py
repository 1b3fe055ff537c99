"""Finds the candidates of an Allocate: the pods of this node that it may be for.

A pod is a candidate if it has a container that requests that many slices and has no row, or whose
row the kubelet has no record of. Annotations do not matter.
"""

import datetime as dt
from collections.abc import Iterator

import msgspec

from agent.core.allocation.at_admission import is_alive, is_at_admission
from agent.core.allocation.evidence import Candidate, Evidence
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
    return tuple(each for each in every if each.pod.uid not in evidence.claimed)


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
    """The waiting container of the pod that an Allocate for `count` slices would be for.

    - At the pod's admission it is the first one.
    - Later it may be any. The same holds while the agent has not asked PodResources about the pod,
      because records may be missing here.
    - Without a PodResources Get, each additional candidate costs an answer. So it is the first one
      while no container of the pod is alive.
    """
    if evidence.books.witnessed:
        is_in_order = pod.key in evidence.known and is_at_admission(pod, evidence)
    else:
        is_in_order = not any(is_alive(each, evidence.books) for each in pod.containers)
    for candidate in waiting(pod, evidence, settings.resource):
        if candidate.container.count == count:
            return candidate
        if is_in_order:
            return None
    return None


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
    - A pod is left out if this kubelet has already sent Allocate for its successor.
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
            if all(row.epoch != books.epoch for row in rows):
                yield pod
