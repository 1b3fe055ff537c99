"""Pods of one name: the kubelet answers by name, so it may speak of one that is gone.

While it works on an Allocate it takes no deletion in: until that is over it says of a deleted pod
what it said before, and says nothing of the new one.
"""

import datetime as dt
from collections.abc import Iterator

from agent.core.candidates import Candidate
from agent.core.evidence import Evidence
from agent.core.holdings import Holding
from agent.core.ledger import ContainerKey, Row
from agent.core.pods import ContainerView, PodUid, Role, Tombstone

FRESH = dt.timedelta(seconds=60)
"""How long the kubelet may still speak of a deleted pod: an Allocate that is held lasts no longer.

Rows of deleted pods are kept as long.
"""


def speaks_of(holding: Holding, one: Candidate, resource: str) -> bool:
    """Whether the kubelet's answer can be about this very pod.

    It names every container of it and no other, and, where the candidate was never answered, no ids
    for one that comes later: the kubelet asks in the order of the spec.
    """
    named = {each.name for each in holding.containers}
    known = {each.name for each in one.pod.containers}
    if any(each.name not in named for each in one.pod.containers if each.role is Role.APP):
        return False
    if one.pod.node and not named <= known:  # of a pod without it only the rows are known
        return False
    names = [each.name for each in one.pod.asking(resource)]
    later = names[names.index(one.container.name) + 1 :]
    return one.row is not None or not any(holding.ids_of(name, resource) for name in later)


def may_be_another(found: Candidate, evidence: Evidence) -> bool:
    """Whether the kubelet may have meant a pod of this name that was deleted just now.

    Of that pod it says the same where the container got nothing, or its record was lost. If it does
    mean that one, somebody else is asking, whom our watch may not have shown yet. A pod that was
    deleted while nobody looked has left rows alone. Whose the ids are that the kubelet names is
    another question, of `core.reconcile`: there the deleted pods with ids are those that matter.
    """
    deleted = {
        *(stone.pod.uid for stone in _graves(found, evidence)),
        *(row.key.pod_uid for row in evidence.ledger.rows if _is_left(row, found, evidence)),
    }
    return any(not _has_ids(uid, found.container, evidence) for uid in deleted)


def _graves(found: Candidate, evidence: Evidence) -> Iterator[Tombstone]:
    """Deleted pods of this name that the kubelet may still speak of."""
    for stone in evidence.table.tombstones:
        is_fresh = not stone.pod.terminal and evidence.now - stone.deleted_at <= FRESH
        if is_fresh and stone.pod.key == found.pod.key and stone.pod.uid != found.pod.uid:
            yield stone


def _is_left(row: Row, found: Candidate, evidence: Evidence) -> bool:
    """Whether the row is of a pod of this name that we never saw."""
    uid, table = row.key.pod_uid, evidence.table
    is_namesake = (row.namespace, row.pod) == found.pod.key and uid != found.pod.uid
    return is_namesake and uid not in {*table.pods, *(stone.pod.uid for stone in table.tombstones)}


def _has_ids(uid: PodUid, container: ContainerView, evidence: Evidence) -> bool:
    """Whether the kubelet would name ids for it: it never does for ordinary init containers."""
    row = evidence.ledger.find(ContainerKey(uid, container.name))
    is_booked = row is not None and row.is_booked_by(evidence.books.epoch)
    return is_booked and container.role is not Role.INIT
