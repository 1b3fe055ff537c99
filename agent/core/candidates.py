"""Who may be asking: the pods of this node that the kubelet could be admitting right now.

An Allocate names no pod. Every pod of the node with a container that has no row yet and asks for
that many slices may be the one, annotated or not; so may a pod with a row that the kubelet lost.
"""

import dataclasses
import datetime as dt
from collections.abc import Iterator, Mapping

from agent.core.annotations import BIND_PHASE, PHASE_SUCCESS
from agent.core.holdings import Holding, KubeletEpoch
from agent.core.ledger import ContainerKey, Ledger, Row
from agent.core.pods import ContainerView, PodTable, PodView, Role

PodKey = tuple[str, str]
"""Namespace and name: all that PodResources and the node lock know of a pod."""

ASKED_AFTER_DELETION = dt.timedelta(seconds=60)
"""How long the kubelet may still ask for a deleted pod, which it has in its queue."""

ASKED_UNWITNESSED = dt.timedelta(seconds=10)
"""The same where the kubelet cannot say whom it admits: there each grave is one candidate more,
and two candidates are one too many."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A pod that may be the one being admitted, and the container that would be next in it.

    `row` is set for a replay: the container was answered before. `deleted`: the pod is a
    tombstone (the kubelet still admits pods that were deleted while they queued).
    """

    pod: PodView
    container: ContainerView
    row: Row | None = None
    deleted: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Books:
    """What is known of the kubelet beside the answers of the witness.

    `recorded`: the containers in the kubelet's checkpoint file, None while unread or unreadable
    (ordinary init containers are listed nowhere else). `alive`: runtime ids of containers that run
    for certain: after a reboot the API still says running for containers that are gone.
    `witnessed`: this kubelet serves Get; where it does not, its file stands in.
    """

    epoch: KubeletEpoch
    recorded: frozenset[ContainerKey] | None = None
    alive: frozenset[str] = frozenset()
    witnessed: bool = True


Known = Mapping[PodKey, Holding | None]
"""The witness's answers so far; a key that is absent was not asked."""


def is_live(row: Row, table: PodTable, known: Known, books: Books) -> bool:
    """Whether a row still counts: its pod is there, not terminal, and the kubelet knows it.

    A pod that the kubelet, asked, does not know is dead only if this kubelet was the one answered:
    a new kubelet may not have taken the pod up yet.
    """
    pod = table.pods.get(row.key.pod_uid)
    if pod is None or pod.terminal:
        return False
    key = (row.namespace, row.pod)
    forgotten = key in known and known[key] is None
    return not (forgotten and row.epoch == books.epoch)


def _is_alive(container: ContainerView, books: Books) -> bool:
    return container.running_id is not None and container.running_id in books.alive


def is_over(container: ContainerView, epoch: KubeletEpoch) -> bool:
    """Whether the container ended for good under this kubelet.

    A kubelet asks for one that ended before its own time: it takes the whole pod up again.
    """
    return container.ended_at is not None and container.ended_at > epoch.since


STAMP = dt.timedelta(seconds=1)
"""What a status tells of is up to so much younger than it says: its stamps are whole seconds."""


def has_changed(container: ContainerView, since: dt.datetime) -> bool:
    """Whether the container started or ended since this kubelet is there, as far as is known."""
    if container.has_run and container.running_id is None and container.stopped_at is None:
        return True
    moments = (container.started_at, container.stopped_at)
    return any(at is not None and at + STAMP > since for at in moments)


def _is_held(
    key: ContainerKey, role: Role, row: Row | None, books: Books, holding: Holding | None
) -> bool:
    """Whether the kubelet has a record of the container, as far as is known.

    Without one it may ask, for the first time or again: it loses records when it is killed before
    its checkpoint is written, or when the checkpoint is lost. PodResources answers by name and
    never lists ordinary init containers; its file has UIDs, and all of them.
    """
    if books.recorded is not None and key in books.recorded:
        return True
    if role is Role.INIT or not books.witnessed:
        return books.recorded is None and row is not None and row.epoch == books.epoch
    # Where it was asked, it named no ids; and the row may be booked for the ids of a namesake.
    is_unasked = holding is None and books.recorded is None
    return is_unasked and row is not None and row.is_booked_by(books.epoch)


def waiting(
    pod: PodView,
    rows: Mapping[ContainerKey, Row],
    books: Books,
    resource: str,
    holding: Holding | None,
) -> tuple[Candidate, ...]:
    """The containers of `pod` that the kubelet may still ask for by `resource`, in its order.

    `holding` is the witness's answer, None while it was not asked. The kubelet walks init
    containers first, then the others, in the order of the pod's spec. It never asks for one that
    runs; for an init container that has ended it does, when it starts without its records.
    """
    found: list[Candidate] = []
    for container in pod.asking(resource):
        if _is_alive(container, books) or is_over(container, books.epoch):
            continue
        if holding and holding.ids_of(container.name, resource):
            continue
        key = ContainerKey(pod.uid, container.name)
        row = rows.get(key)
        if not _is_held(key, container.role, row, books, holding):
            found.append(Candidate(pod, container, row))
    return tuple(found)


def is_taken_up(pod: PodView, books: Books) -> bool:
    """Whether the pod's admission by this kubelet is over: something of it lives or has changed.

    At its admission the kubelet asks for a pod in the order of the spec, and a pod that is refused
    there is over. Later it asks, beside its other work, for what has died: also behind one that was
    refused, and again and again.
    """
    return any(
        _is_alive(each, books) or has_changed(each, books.epoch.since) for each in pod.containers
    )


def _next(
    count: int, found: tuple[Candidate, ...], books: Books, *, is_asked: bool
) -> Candidate | None:
    """The one of a pod's waiting containers that a request for `count` slices would be for.

    While the witness was not asked for the pod, any of them may be next, for records may be
    missing here; and so it is once the pod was taken up. Else it is the first.
    """
    for one in found:
        if one.container.count == count:
            return one
        if is_asked and not is_taken_up(one.pod, books):
            return None
    return None


def recent_graves(table: PodTable, books: Books, now: dt.datetime) -> PodTable:
    """The table with those deleted pods only for which the kubelet may still ask.

    One that was deleted in the future was deleted before the clock was set back.
    """
    life = ASKED_AFTER_DELETION if books.witnessed else ASKED_UNWITNESSED
    stones = (one for one in table.tombstones if dt.timedelta(0) <= now - one.deleted_at <= life)
    return dataclasses.replace(table, tombstones=tuple(stones))


def _tombstones(table: PodTable, ledger: Ledger, epoch: KubeletEpoch) -> Iterator[PodView]:
    """Deleted pods that were never answered: the kubelet may still have them in its queue.

    One that was answered before the kubelet lost its records could be asked for as well. It ends
    at once, whatever it is given; counted here, it would cost its successor an answer. Where this
    kubelet asked for the successor already, it is past this one.
    """
    answered = {row.key.pod_uid for row in ledger.rows}
    present = {row.key.pod_uid for row in ledger.rows if row.epoch == epoch}
    past = {table.pods[uid].key for uid in present & table.pods.keys()}
    for stone in table.tombstones:
        pod = stone.pod
        is_answered = pod.annotations.get(BIND_PHASE) == PHASE_SUCCESS or pod.uid in answered
        if not pod.terminal and not is_answered and pod.key not in past:
            yield pod


def candidates(
    count: int, table: PodTable, ledger: Ledger, books: Books, resource: str, known: Known
) -> tuple[Candidate, ...]:
    """All who may be asking for `count` slices, present pods before tombstones, oldest first."""
    rows = {row.key: row for row in ledger.rows}

    def next_of(pod: PodView) -> Candidate | None:
        found = waiting(pod, rows, books, resource, known.get(pod.key))
        is_asked = pod.key in known or not books.witnessed
        return _next(count, found, books, is_asked=is_asked)

    present = sorted(table.pods.values(), key=lambda pod: (pod.created, pod.namespace, pod.name))
    standing = [next_of(pod) for pod in present if not pod.terminal]
    buried = [next_of(pod) for pod in _tombstones(table, ledger, books.epoch)]
    return (
        *(one for one in standing if one is not None),
        *(dataclasses.replace(one, deleted=True) for one in buried if one is not None),
    )
