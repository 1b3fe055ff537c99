"""Compares hami mode's ledger with the kubelet and the API server, and returns findings."""

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from agent.core.ages import has_passed
from agent.core.cluster.pods import ContainerView, Phase, PodKey, PodUid, PodView, Role
from agent.core.containers.edits import container_directory
from agent.core.inventory.slices import SliceId, split_slice_id
from agent.core.reconcile.by_kubelet import judge_by_kubelet
from agent.core.reconcile.findings import EVER, Adoption, Findings, ReconcileFacts, Stranger
from agent.core.reconcile.pace import SETTLING, UNCONFIRMED_AFTER
from agent.core.state.holdings import Holding
from agent.core.state.ledger import (
    ContainerKey,
    Decider,
    Holder,
    Ledger,
    Row,
)

VANISHED_GRACE = dt.timedelta(seconds=60)
"""How long a row stays after its pod is gone from the watch and the kubelet."""

LEAKED_AFTER = dt.timedelta(minutes=10)
"""How long a leaked container directory stays after its last change."""


def judge_by_scheduler(ledger: Ledger, seen: ReconcileFacts, resource: str) -> Findings:
    """Compare all rows with the kubelet's answers, and all answers with the rows.

    A pod that has ended holds nothing: kubelets before 1.34 list it until its object is deleted.
    """
    ended = {pod.key for pod in seen.table.pods.values() if _has_ended(pod, seen)}
    holdings = [each for each in seen.holdings if (each.namespace, each.pod) not in ended]
    seen = msgspec.structs.replace(seen, holdings=holdings)
    by_key: dict[PodKey, Holding] = {(each.namespace, each.pod): each for each in seen.holdings}
    rows = ledger.rows_by(Decider.SCHEDULER)
    updates = [(row, _confirm(row, by_key, seen)) for row in rows]
    unseen = [row for row, update in updates if update is None]
    over = [row for row in unseen if _vanished(row, by_key, seen)]
    gone = {row.key for row in over}
    overdue = [row for row in unseen if row.key not in gone and _overdue(row, seen.now)]
    strangers = Ledger(ledger.rows_by(Decider.KUBELET))
    kept = judge_by_kubelet(strangers, seen, resource)
    ends = (*_ends(rows, seen), *([kept.due] if kept.due else []))
    return Findings(
        confirmed=(*(new for old, new in updates if new and new != old), *kept.confirmed),
        mismatched=tuple(row.key for row, update in updates if update and update.told != row.told),
        over=(*over, *kept.over),
        adopt=tuple(_adoptions(ledger, seen, by_key)),
        strangers=tuple(_strangers(ledger, seen, resource)),
        idle=kept.idle,
        due=min((end for end in ends if end > seen.now), default=None),
        drifted=sum(update is not None and _drifts(update) for _, update in updates)
        + sum(row.role is Role.INIT for row in overdue),
        unconfirmed=sum(row.role is not Role.INIT for row in overdue) + kept.unconfirmed,
    )


def _overdue(row: Row, now: dt.datetime) -> bool:
    return not row.confirmed and has_passed(UNCONFIRMED_AFTER, row.answered_at, now)


def _drifts(row: Row) -> bool:
    """Whether the row has drift: the agent could not offer the right ids before the answer.

    The kubelet used the ids of an init container again, or another plugin answered.
    """
    return row.astray and not row.offered


def _confirm(row: Row, by_key: Mapping[PodKey, Holding], seen: ReconcileFacts) -> Row | None:
    """The row as the kubelet confirms it; None: it does not confirm it.

    An init container is only in the kubelet's checkpoint file, which can be older than the kubelet
    instance. So the kubelet must also know the pod: otherwise the row would count as answered by
    this instance, and its unknown pod as dead.
    """
    pod = seen.table.pods.get(row.key.pod_uid)
    holding = by_key.get((row.namespace, row.pod))
    if pod is None or pod.terminal or holding is None:
        return None
    ids = frozenset(row.slice_ids)
    if row.role is not Role.INIT:
        ids = holding.ids_of(row.key.container, row.resource)
    elif seen.recorded is None or row.key not in seen.recorded:
        return None
    if not ids:
        return None
    new = msgspec.structs.replace(
        row, confirmed=True, epoch=seen.epoch, slice_ids=tuple(sorted(ids))
    )
    return msgspec.structs.replace(new, told=new.told or new.mismatched)


def leaked(
    ages: Mapping[str, dt.timedelta], ledger: Ledger, seen: ReconcileFacts
) -> tuple[str, ...]:
    """The names of leaked container directories. `ages`: the time since each one's last change.

    Returns none while the view is incomplete, or while the kubelet has a pod that the API server
    does not: any directory could be that pod's. Plain mode's directories are never returned: their
    names have no pod.
    """
    table = seen.table
    if not (seen.complete and table.synced) or table.stale:
        return ()
    pods = [*table.pods.values(), *(tombstone.pod for tombstone in table.tombstones)]
    names = {pod.key for pod in pods}
    if any((holding.namespace, holding.pod) not in names for holding in seen.holdings):
        return ()
    owners = {
        *(pod.uid for pod in pods if not _has_ended(pod, seen)),
        *(row.key.pod_uid for row in ledger.rows),
    }
    return tuple(
        name
        for name, age in sorted(ages.items())
        if age >= LEAKED_AFTER
        and PodUid(name.partition("_")[0]) not in owners
        and "_" in name  # the agent did not make a directory of another form
        and "-" in name.partition("_")[0]  # plain mode's names have no UID of a pod
    )


def _vanished(row: Row, by_key: Mapping[PodKey, Holding], seen: ReconcileFacts) -> bool:
    """Whether the row's pod has been gone for long enough.

    A kubelet that has just started knows no pod, and deleted pods may still run.
    """
    if not (seen.complete and seen.table.synced) or seen.table.stale:
        return False
    pod = seen.table.pods.get(row.key.pod_uid)
    if pod is not None:
        return _has_ended(pod, seen)
    if not has_passed(dt.timedelta(seconds=SETTLING), seen.epoch.since, seen.now):
        return False
    successor = seen.table.named(row.namespace, row.pod)
    if (row.namespace, row.pod) in by_key and successor is None:
        return False
    return has_passed(VANISHED_GRACE, _gone_since(row, seen), seen.now)


def _has_ended(pod: PodView, seen: ReconcileFacts) -> bool:
    """Whether the pod is terminal and no container of it runs any more.

    A pod that the kubelet rejects at its start is failed while its containers still run.
    """
    if pod.phase is Phase.FAILED:
        return has_passed(VANISHED_GRACE, seen.failed.get(pod.uid, seen.now), seen.now)
    return pod.phase is Phase.SUCCEEDED


def _ends(rows: Iterable[Row], seen: ReconcileFacts) -> Iterator[dt.datetime]:
    """When the rows of deleted pods may be over.

    VANISHED_GRACE is not shorter than PERIOD, so a pod cannot be deleted and due between two Lists.
    """
    for row in rows if seen.complete else ():
        if row.key.pod_uid not in seen.table.pods:
            yield _gone_since(row, seen) + VANISHED_GRACE


def _gone_since(row: Row, seen: ReconcileFacts) -> dt.datetime:
    """When the pod was deleted. If that was while the agent was down, the agent's start counts."""
    for tombstone in seen.table.tombstones:
        if tombstone.pod.uid == row.key.pod_uid:
            return tombstone.deleted_at
    return max((at for at in (row.answered_at, seen.since) if at <= seen.now), default=EVER)


def _adoptions(
    ledger: Ledger, seen: ReconcileFacts, by_key: Mapping[PodKey, Holding]
) -> Iterator[Adoption]:
    """Containers with groups in the annotation that were answered and have no row.

    The kubelet names ids for them. If it lost its checkpoint, their directory shows it: only an
    answer makes one. A Get gives no adoptions: it is about a pod that is being answered, and the
    kubelet may be about to ask for its other containers.
    """
    for pod in seen.table.pods.values() if seen.complete else ():
        if pod.terminal or not pod.groups:
            continue
        holding = None if _may_hold_for_another(pod, ledger, seen) else by_key.get(pod.key)
        for container in pod.gpu_containers:
            resource = container.resource
            ids = holding.ids_of(container.name, resource) if holding else frozenset()
            if _is_anothers(pod, container, seen):
                ids = frozenset()
            is_made = bool(seen.directories) and (
                container_directory(pod.uid, container.name) in seen.directories
            )
            is_known = ledger.find(ContainerKey(pod.uid, container.name)) is not None
            if (ids or is_made) and not is_known:
                yield Adoption(pod, container, tuple(sorted(ids)))


def _strangers(ledger: Ledger, seen: ReconcileFacts, resource: str) -> Iterator[Stranger]:
    """Holders of slices without a row and without groups in an annotation."""
    explains = explained_by(ledger)
    for holding in seen.holdings if seen.complete and seen.table.synced else ():
        pod = seen.table.named(holding.namespace, holding.pod)
        if pod is not None and (pod.groups or _may_hold_for_another(pod, ledger, seen)):
            continue
        for container in holding.containers:
            holder = Holder(holding.namespace, holding.pod, container.name)
            ids = container.ids.get(resource, frozenset())
            if any(map(split_slice_id, ids)) and not explains(holder, ids):
                yield Stranger(holder, tuple(sorted(ids)), resource)


def explained_by(ledger: Ledger) -> Callable[[Holder, Iterable[SliceId]], bool]:
    """The test whether a row explains the ids of a holder.

    The row of a stranger explains only its own ids: after a lost checkpoint the kubelet asks again,
    and names other ids.
    """
    answered = {row.holder for row in ledger.rows_by(Decider.SCHEDULER)}
    kept = {(row.holder, frozenset(row.slice_ids)) for row in ledger.rows_by(Decider.KUBELET)}
    return lambda holder, ids: holder in answered or (holder, frozenset(ids)) in kept


def _is_anothers(pod: PodView, container: ContainerView, seen: ReconcileFacts) -> bool:
    """Whether the ids under the pod's name are another pod's: the kubelet's file lacks its UID.

    The other pod may have been created and deleted between two frames of the agent's watch.
    """
    if pod.phase is not Phase.PENDING or not pod.reusable_name or seen.recorded is None:
        return False
    return ContainerKey(pod.uid, container.name) not in seen.recorded


def _may_hold_for_another(pod: PodView, ledger: Ledger, seen: ReconcileFacts) -> bool:
    """Whether the kubelet may hold the ids for a deleted pod of the same name.

    Either the table has the deleted pod, or it was deleted while the agent was down and its row is
    still there. The time of the deletion does not matter.
    """
    if pod.phase is not Phase.PENDING:
        return False
    return any(tombstone.pod.key == pod.key for tombstone in seen.table.tombstones) or any(
        (row.namespace, row.pod) == pod.key and row.key.pod_uid != pod.uid
        for row in ledger.rows_by(Decider.SCHEDULER)
    )
