"""Who may be asking: the pods of this node that the kubelet could be admitting right now.

Every pod of the node with a container that has no row yet and asks for that many slices may be the
one, annotated or not; so may a pod with a row that the kubelet lost.
"""

import dataclasses
import datetime as dt
from collections.abc import Iterator

from agent.core.allocation.at_admission import is_alive, is_at_admission
from agent.core.allocation.evidence import Candidate, Evidence
from agent.core.allocation.settings import MatchSettings
from agent.core.cluster.annotations import BIND_PHASE, PHASE_SUCCESS
from agent.core.cluster.pods import ContainerView, PodView, Role
from agent.core.state.holdings import KubeletEpoch
from agent.core.state.ledger import ContainerKey, Row

ASKED_AFTER_DELETION = dt.timedelta(seconds=60)
"""How long the kubelet may still ask for a deleted pod, which it has in its queue."""

ASKED_UNWITNESSED = dt.timedelta(seconds=10)
"""The same where the kubelet cannot say whom it admits: there each grave is one candidate more,
and two candidates are one too many."""


def candidates(count: int, evidence: Evidence, settings: MatchSettings) -> tuple[Candidate, ...]:
    """All who may be asking for `count` slices, present pods before tombstones, oldest first.

    Not those that a call in flight has, nor those whose first request was refused.
    """
    pods = (pod for pod in evidence.table.pods.values() if not pod.terminal)
    present = sorted(pods, key=lambda pod: (pod.created, pod.namespace, pod.name))
    standing = (_next(count, pod, evidence, settings) for pod in present)
    buried = (_next(count, pod, evidence, settings) for pod in _graves(evidence))
    found = (
        *(one for one in standing if one is not None),
        *(dataclasses.replace(one, deleted=True) for one in buried if one is not None),
    )
    return tuple(one for one in found if one.pod.uid not in evidence.claimed)


def waiting(pod: PodView, evidence: Evidence, resource: str) -> tuple[Candidate, ...]:
    """The containers of `pod` that the kubelet may still ask for by `resource`, in its order.

    It walks init containers first, then the others, in the order of the pod's spec. It never asks
    for one that runs; for an init container that has ended it does, when it starts without its
    records.
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
    """Whether the container ended for good under this kubelet.

    A kubelet asks for one that ended before its own time: it takes the whole pod up again.
    """
    return container.ended_at is not None and container.ended_at > epoch.since


def _next(
    count: int, pod: PodView, evidence: Evidence, settings: MatchSettings
) -> Candidate | None:
    """The one of the pod's waiting containers that a request for `count` slices would be for.

    At the pod's admission that is the first. Later it may be any, and so it may while the witness
    was not asked for the pod, for records may be missing here. Where there is no witness each
    candidate more costs an answer, so there the order counts as long as nothing of the pod lives.
    """
    if evidence.books.witnessed:
        is_in_order = pod.key in evidence.known and is_at_admission(pod, evidence)
    else:
        is_in_order = not any(is_alive(each, evidence.books) for each in pod.containers)
    for one in waiting(pod, evidence, settings.resource):
        if one.container.count == count:
            return one
        if is_in_order:
            return None
    return None


def _is_held(pod: PodView, container: ContainerView, row: Row | None, evidence: Evidence) -> bool:
    """Whether the kubelet has a record of the container, as far as is known.

    Without one it may ask, for the first time or again: it loses records when it is killed before
    its checkpoint is written, or when the checkpoint is lost. PodResources answers by name and
    never lists ordinary init containers; its file has UIDs, and all of them.
    """
    books, holding = evidence.books, evidence.known.get(pod.key)
    if holding and holding.ids_of(container.name, container.resource):
        return True
    if books.recorded is not None and ContainerKey(pod.uid, container.name) in books.recorded:
        return True
    if container.role is Role.INIT or not books.witnessed:
        return books.recorded is None and row is not None and row.epoch == books.epoch
    # Where it was asked, it named no ids; and the row may be booked for the ids of a namesake.
    is_unasked = holding is None and books.recorded is None
    return is_unasked and row is not None and row.is_booked_by(books.epoch)


def _graves(evidence: Evidence) -> Iterator[PodView]:
    """Deleted pods that were never answered: the kubelet may still have them in its queue.

    One that was answered before the kubelet lost its records could be asked for as well. It ends
    at once, whatever it is given; counted here, it would cost its successor an answer. Where this
    kubelet asked for the successor already, it is past this one. One that was deleted in the future
    was deleted before the clock was set back.
    """
    books, pods, rows = evidence.books, evidence.table.pods, evidence.ledger.rows
    life = ASKED_AFTER_DELETION if books.witnessed else ASKED_UNWITNESSED
    answered = {row.key.pod_uid for row in rows}
    asked_here = {row.key.pod_uid for row in rows if row.epoch == books.epoch}
    past = {pods[uid].key for uid in asked_here & pods.keys()}
    for stone in evidence.table.tombstones:
        pod = stone.pod
        is_recent = dt.timedelta(0) <= evidence.now - stone.deleted_at <= life
        is_answered = pod.annotations.get(BIND_PHASE) == PHASE_SUCCESS or pod.uid in answered
        if is_recent and not pod.terminal and not is_answered and pod.key not in past:
            yield pod
