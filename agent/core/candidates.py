"""Who may be asking: the pods of this node that the kubelet could be admitting right now.

An Allocate names no pod. Every pod of the node with a container that has no row yet and asks for
that many slices may be the one, annotated or not; so may a pod with a row that the kubelet lost.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from agent.core.annotations import BIND_PHASE
from agent.core.holdings import Holding, KubeletEpoch
from agent.core.ledger import ContainerKey, Ledger, Row
from agent.core.pods import ContainerView, PodTable, PodView, Role

PodKey = tuple[str, str]
"""Namespace and name: all that PodResources and the node lock know of a pod."""


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
    """

    epoch: KubeletEpoch
    recorded: frozenset[ContainerKey] | None = None
    alive: frozenset[str] = frozenset()


Known = Mapping[PodKey, Holding | None]
"""The witness's answers so far; a key that is absent was not asked."""


def is_live(row: Row, table: PodTable, known: Known, books: Books) -> bool:
    """Whether a row still counts: its pod is there, not terminal, and the kubelet knows it.

    A pod that the kubelet, asked, does not know is dead only if this kubelet was the one answered:
    a new kubelet may not have taken the pod up yet.
    """
    pod = table.pods.get(row.key.pod_uid)
    if pod is None:
        return not table.synced
    if pod.terminal:
        return False
    key = (row.namespace, row.pod)
    forgotten = key in known and known[key] is None
    return not (forgotten and row.epoch == books.epoch)


def may_be_replayed(
    container: ContainerView, row: Row, books: Books, ids: frozenset[str] = frozenset()
) -> bool:
    """Whether the kubelet may ask again for an answered container.

    It does when it lost its record: killed before its checkpoint, or the checkpoint is gone. `ids`
    is what PodResources names for the container now.
    """
    if ids or (container.running_id is not None and container.running_id in books.alive):
        return False
    if row.role is Role.INIT:
        if books.recorded is not None:
            return row.key not in books.recorded
        return row.epoch != books.epoch
    return not (row.confirmed and row.epoch == books.epoch)


def next_container(
    pod: PodView, ledger: Ledger, books: Books, resource: str, holding: Holding | None
) -> Candidate | None:
    """The container of `pod` that the kubelet would ask for next, or None: all are settled.

    `holding` is the witness's answer, None while it was not asked. The kubelet walks init
    containers first, then the others, in the order of the pod's spec.
    """
    for container in pod.gpu_containers:
        row = ledger.find(ContainerKey(pod.uid, container.name))
        ids = holding.ids_of(container.name, resource) if holding else frozenset()
        if row is None:
            if not ids:
                return Candidate(pod, container)
        elif may_be_replayed(container, row, books, frozenset(ids)):
            return Candidate(pod, container, row)
    return None


def _tombstones(table: PodTable, ledger: Ledger) -> Iterator[PodView]:
    """Deleted pods that were never answered: the kubelet may still have them in its queue."""
    for stone in table.tombstones:
        pod = stone.pod
        answered = pod.annotations.get(BIND_PHASE) == "success" or ledger.rows_of(pod.uid)
        if not pod.terminal and not answered:
            yield pod


def candidates(
    count: int, table: PodTable, ledger: Ledger, books: Books, resource: str, known: Known
) -> tuple[Candidate, ...]:
    """All who may be asking for `count` slices, present pods before tombstones, oldest first."""
    found: list[Candidate] = []
    present = sorted(table.pods.values(), key=lambda pod: (pod.created, pod.namespace, pod.name))
    for pod in (pod for pod in present if not pod.terminal):
        candidate = next_container(pod, ledger, books, resource, known.get(pod.key))
        if candidate is not None and candidate.container.count == count:
            found.append(candidate)
    for pod in _tombstones(table, ledger):
        candidate = next_container(pod, ledger, books, resource, known.get(pod.key))
        if candidate is not None and candidate.container.count == count:
            found.append(dataclasses.replace(candidate, deleted=True))
    return tuple(found)


def all_confirmed(
    table: PodTable, ledger: Ledger, books: Books, resource: str, known: Known
) -> bool:
    """Whether this kubelet has confirmed every live row, so that no replay can be under way."""
    live = (row for row in ledger.rows if is_live(row, table, known, books))
    return all(_is_confirmed(row, books, resource, known) for row in live)


def _is_confirmed(row: Row, books: Books, resource: str, known: Known) -> bool:
    holding = known.get((row.namespace, row.pod))
    if holding is not None and holding.ids_of(row.key.container, resource):
        return True
    if row.role is Role.INIT:
        return row.epoch == books.epoch or row.key in (books.recorded or frozenset())
    return row.confirmed and row.epoch == books.epoch
