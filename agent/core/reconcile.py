"""The ledger against what the kubelet holds and what the API shows: findings, not deeds."""

import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping, Sequence

from agent.core.candidates import PodKey
from agent.core.holdings import Holding, KubeletEpoch
from agent.core.ledger import ContainerKey, Ledger, Row
from agent.core.pods import ContainerView, Phase, PodTable, PodView, Role
from agent.core.slices import SliceId

VANISHED_GRACE = dt.timedelta(seconds=60)
"""How long a row outlives its pod in the watch and at the kubelet."""

UNCONFIRMED_AFTER = dt.timedelta(seconds=60)
"""A row that the kubelet has not confirmed for so long is counted and shown."""


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What reconcile looks at.

    `holdings` are the kubelet's answers; `complete`: they are all pods it knows (a List).
    `recorded`: containers in the kubelet's checkpoint file, None where it cannot be read.
    """

    table: PodTable
    holdings: Sequence[Holding]
    epoch: KubeletEpoch
    now: dt.datetime
    complete: bool
    recorded: frozenset[ContainerKey] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Adoption:
    """A container that the kubelet holds ids for and the ledger does not know."""

    pod: PodView
    container: ContainerView
    ids: tuple[SliceId, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """What differs.

    `confirmed`: rows with the kubelet's ids and epoch. `vanished`: rows whose pod is gone from the
    API and the kubelet. `adopt`: holders to take over. `drifted`: rows whose ids differ by name.
    """

    confirmed: tuple[Row, ...] = ()
    vanished: tuple[ContainerKey, ...] = ()
    adopt: tuple[Adoption, ...] = ()
    drifted: int = 0
    unconfirmed: int = 0


def compare(ledger: Ledger, seen: Seen, resource: str) -> Findings:
    """Hold every row against the kubelet's answers, and every answer against the rows."""
    by_key: dict[PodKey, Holding] = {(one.namespace, one.pod): one for one in seen.holdings}
    confirmed: list[Row] = []
    vanished: list[ContainerKey] = []
    drifted = unconfirmed = 0
    for row in ledger.rows:
        update = _confirm(row, by_key, seen, resource)
        if update is None:
            if _vanished(row, by_key, seen):
                vanished.append(row.key)
            elif not row.confirmed and seen.now - row.answered_at > UNCONFIRMED_AFTER:
                unconfirmed += 1
        elif update != row:
            confirmed.append(update)
            drifted += update.slice_ids != row.slice_ids
    adopt = tuple(_adoptions(ledger, seen, resource))
    return Findings(tuple(confirmed), tuple(vanished), adopt, drifted, unconfirmed)


def _confirm(row: Row, by_key: Mapping[PodKey, Holding], seen: Seen, resource: str) -> Row | None:
    """The row as the kubelet confirms it, or None: it does not."""
    pod = seen.table.pods.get(row.key.pod_uid)
    if pod is None or pod.terminal:
        return None
    if row.role is Role.INIT:
        recorded = seen.recorded is not None and row.key in seen.recorded
        return dataclasses.replace(row, confirmed=True, epoch=seen.epoch) if recorded else None
    holding = by_key.get((row.namespace, row.pod))
    ids = holding.ids_of(row.key.container, resource) if holding else frozenset()
    if not ids:
        return None
    return dataclasses.replace(row, confirmed=True, epoch=seen.epoch, slice_ids=tuple(sorted(ids)))


def _vanished(row: Row, by_key: Mapping[PodKey, Holding], seen: Seen) -> bool:
    """Whether nobody knows the row's pod any more, for long enough."""
    if not (seen.complete and seen.table.synced) or seen.table.stale:
        return False
    pod = seen.table.pods.get(row.key.pod_uid)
    if pod is not None:
        return pod.terminal and (row.namespace, row.pod) not in by_key
    successor = seen.table.named(row.namespace, row.pod)
    if (row.namespace, row.pod) in by_key and successor is None:
        return False
    return seen.now - _gone_since(row, seen) >= VANISHED_GRACE


def _gone_since(row: Row, seen: Seen) -> dt.datetime:
    """When the pod was deleted; the time of the answer where that was long before our view."""
    for stone in seen.table.tombstones:
        if stone.pod.uid == row.key.pod_uid:
            return stone.deleted_at
    return row.answered_at


def _adoptions(ledger: Ledger, seen: Seen, resource: str) -> Iterable[Adoption]:
    """Containers with ids at the kubelet, groups in the annotation, and no row."""
    for holding in seen.holdings:
        pod = seen.table.named(holding.namespace, holding.pod)
        if pod is None or pod.terminal or not pod.groups or _may_be_another(pod, seen):
            continue
        for container in pod.gpu_containers:
            ids = holding.ids_of(container.name, resource)
            if ids and ledger.find(ContainerKey(pod.uid, container.name)) is None:
                yield Adoption(pod, container, tuple(sorted(ids)))


def _may_be_another(pod: PodView, seen: Seen) -> bool:
    """Whether the kubelet may mean a deleted pod of that name, which it has not let go of yet."""
    buried = any(stone.pod.key == pod.key for stone in seen.table.tombstones)
    return buried and pod.phase is Phase.PENDING
