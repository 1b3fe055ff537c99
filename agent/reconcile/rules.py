"""What differs between ledger, kubelet and API server, and what follows."""

import datetime as dt
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from agent.cluster import ContainerView, Phase, PodKey, PodTable, PodUid, PodView, Role
from agent.ledger import (
    PLAIN,
    ContainerEdits,
    ContainerKey,
    Decider,
    Holder,
    Holding,
    KubeletEpoch,
    Ledger,
    Row,
    container_directory,
    mismatch,
)
from agent.model import SliceId, has_passed, split_slice_id


def check_start(ledger: Ledger, ids: Iterable[SliceId]) -> None:
    """Refuse the start of the container that the kubelet holds `ids` for, if its row mismatches.

    Several rows can have the same ids, for example an init container's and that of a deleted pod.
    The last answer counts. A container without a row may start.

    Raises:
        Refusal: the kubelet booked other GPUs than those that were offered and answered.
    """
    wanted = frozenset(ids)
    answered = ledger.rows_by(Decider.SCHEDULER)
    rows = [row for row in answered if frozenset(row.slice_ids) == wanted]
    row = max(rows, key=lambda row: row.answered_at, default=None)
    if row is not None and row.mismatched:
        raise mismatch(row)


# How often the ledger is compared with the kubelet, in both modes. All numbers are seconds.

PERIOD = 60.0
"""Between Lists when nothing happens."""

QUIET = 0.5
"""Without an Allocate before a List. A List can un-mark ids that an Allocate is giving out."""

PAUSE = 1.0
"""Between Gets for an answer that the kubelet has not booked yet."""

SETTLING = 30.0
"""For a new kubelet to learn its pods. It knows none at first."""

SETTLING_PAUSE = 3.0
"""Between Lists in this time, until the kubelet has named the holders of all rows."""

RETRIES = (1.0, 2.0, 5.0, 15.0)
"""Until the next List after the first, second, … failure in a row."""

THROTTLED_PAUSE = 0.02
"""Until PodResources is asked again after it throttled a call: it serves 100 calls a second."""

DEADLINE = 2.0
"""For one call to the kubelet, or for one directory."""

UNCONFIRMED_AFTER = dt.timedelta(seconds=60)
"""After this time a row that the kubelet has not confirmed counts as unconfirmed."""


# The facts that the ledger is compared with, and the findings, in both modes.

EVER = dt.datetime.min.replace(tzinfo=dt.UTC)


class ReconcileFacts(msgspec.Struct, frozen=True):
    """The facts that a reconcile compares with the ledger.

    - `holdings`: the kubelet's answers; `complete`: they are from a List, so they have all pods.
    - `recorded`: the ids in the kubelet's checkpoint file by container; None: not read.
    - `directories`: the names of the container directories; empty: not searched.
    - `since`: when this process began to see all pods.
    - `failed`: since when pods are seen as failed.
    - `idle`: since when rows are seen without a holder.
    """

    table: PodTable
    holdings: Sequence[Holding]
    epoch: KubeletEpoch
    now: dt.datetime
    complete: bool
    recorded: Mapping[ContainerKey, frozenset[SliceId]] | None = None
    directories: frozenset[str] = frozenset()
    since: dt.datetime = EVER
    failed: Mapping[PodUid, dt.datetime] = msgspec.field(default_factory=dict)
    idle: Mapping[ContainerKey, dt.datetime] = msgspec.field(default_factory=dict)


class Adoption(msgspec.Struct, frozen=True):
    """A container that was answered and that the ledger does not know.

    `ids`: the kubelet's; empty: the kubelet lost its checkpoint too.
    """

    pod: PodView
    container: ContainerView
    ids: tuple[SliceId, ...]


class Stranger(msgspec.Struct, frozen=True):
    """A container that holds ids of `resource` and whose answer is not known."""

    holder: Holder
    ids: tuple[SliceId, ...]
    resource: str

    def row(self, now: dt.datetime, epoch: KubeletEpoch) -> Row:
        """A row that only keeps the ids in use. Equal holders and ids get equal keys."""
        name = "/".join((*msgspec.structs.astuple(self.holder), *self.ids))
        return Row(
            key=ContainerKey(PodUid(uuid.uuid5(uuid.NAMESPACE_OID, name).hex), PLAIN),
            holder=self.holder,
            shares=(),
            slice_ids=self.ids,
            edits=ContainerEdits(),
            answered_at=now,
            epoch=epoch,
            decided_by=Decider.KUBELET,
            confirmed=True,
            adopted=True,
            resource=self.resource,
        )


class Findings(msgspec.Struct, frozen=True):
    """What differs between the ledger and the facts.

    - `confirmed`: rows that the kubelet confirms, with their new values.
    - `mismatched`: those of them with a mismatch that is new.
    - `over`: rows that no container can use any more.
    - `adopt`: containers to adopt. `strangers`: holders whose ids are only kept in use.
    - `idle`: for the next reconcile. `due`: when the next row may be over if nothing changes.
    - `drifted`: how many rows have drift or cannot be compared.
    - `unconfirmed`: how many rows the kubelet should have confirmed by now.
    """

    confirmed: tuple[Row, ...] = ()
    mismatched: tuple[ContainerKey, ...] = ()
    over: tuple[Row, ...] = ()
    adopt: tuple[Adoption, ...] = ()
    strangers: tuple[Stranger, ...] = ()
    idle: Mapping[ContainerKey, dt.datetime] = msgspec.field(default_factory=dict)
    due: dt.datetime | None = None
    drifted: int = 0
    unconfirmed: int = 0


# Compares plain mode's rows with the kubelet: which container holds a row, and when a row is over.
#
# Only the kubelet reports pods here. While it starts it knows no pod; after a lost checkpoint it
# does not know which ids a running container holds. So a row is over only when no container can use
# it: its holder's pod is gone, or it never had a holder and no container has its ids. If the
# kubelet instance that named the holder no longer lists it, it is gone. In all other cases the
# kubelet's checkpoint file must agree: it forgets a pod only when the kubelet knows that the pod
# ended.

GONE_GRACE = dt.timedelta(seconds=10)
"""How long a row stays when the kubelet instance that named its holder no longer lists it."""

UNSEEN_GRACE = dt.timedelta(seconds=60)
"""How long a row without a holder stays if the kubelet's checkpoint file does not name its ids."""

UNREAD_GRACE = dt.timedelta(minutes=10)
"""The same if that file cannot be read."""

LOST_GRACE = dt.timedelta(days=1)
"""The same if the file named the ids under an earlier kubelet. After a lost checkpoint nothing
shows an init container that still runs."""

Held = frozenset[SliceId]


def judge_by_kubelet(ledger: Ledger, seen: ReconcileFacts, resource: str) -> Findings:
    """Compare the rows with a complete List; a Get gives no findings.

    In plain mode that is all rows: a state file of an earlier version may have rows of hami mode.
    In hami mode it is the strangers' rows.
    """
    if not seen.complete:
        return Findings()
    holders = {
        Holder(holding.namespace, holding.pod, container.name): ids
        for holding in seen.holdings
        for container in holding.containers
        if (ids := container.ids.get(resource))
    }
    listed = {(holding.namespace, holding.pod) for holding in seen.holdings}
    held = frozenset[SliceId]().union(*holders.values())
    # The id sets in the kubelet's checkpoint file, each with its number of pods; and the recorded
    # ids that no holder explains.
    by_pod = {(key.pod_uid, ids) for key, ids in (seen.recorded or {}).items()}
    recorded = Counter(ids for _, ids in by_pod)
    left = frozenset[SliceId]().union(*(recorded - Counter(holders.values())))
    used = dict(_matched(ledger.rows, holders, recorded))
    owners = {key: holder for holder, keys in used.items() for key in keys}
    rows: list[Row] = []
    idle: dict[ContainerKey, dt.datetime] = {}
    ends: dict[ContainerKey, dt.datetime] = {}
    for old in ledger.rows:
        row, holder, ids = old, owners.get(old.key), frozenset(old.slice_ids)
        if holder is not None or (old.holder is None and ids in recorded):
            row = msgspec.structs.replace(old, holder=holder, confirmed=True, epoch=seen.epoch)
        rows.append(row)
        if row.holder is None:
            is_used = not held.isdisjoint(ids)  # any holder of these ids may use this row
        elif row.holder in used:
            is_used = row.key in used[row.holder]
        else:
            # A container that is listed with other ids was answered anew, for a row of hami mode.
            is_listed = (row.holder.namespace, row.holder.pod) in listed
            is_used = is_listed and row.holder not in holders
        if is_used:
            continue
        # Times before its last answer do not count. After the clock was set back, times can lie in
        # the future: one of these then counts as now, and such an answer counts as old.
        since = seen.idle.get(row.key)
        is_unseen = since is None or since < row.answered_at <= seen.now
        idle[row.key] = seen.now if since is None or is_unseen else min(since, seen.now)
        grace = _grace(row, seen, left)
        if grace is not None:
            ends[row.key] = idle[row.key] + grace
    over = {key for key, end in ends.items() if end <= seen.now}
    # Holders of slices that no row explains.
    unheld = {frozenset(row.slice_ids) for row in ledger.rows if row.holder is None}
    scheduled = {row.holder for row in ledger.rows_by(Decider.SCHEDULER)}
    strangers = (
        Stranger(holder, tuple(sorted(ids)), resource)
        for holder, ids in sorted(holders.items())
        if not (holder in used or holder in scheduled or ids in unheld)
        and any(map(split_slice_id, ids))
    )
    return Findings(
        confirmed=tuple(new for new, old in zip(rows, ledger.rows, strict=True) if new != old),
        over=tuple(row for row in rows if row.key in over),
        strangers=tuple(strangers),
        idle=idle,
        due=min((end for key, end in ends.items() if key not in over), default=None),
        unconfirmed=sum(row.key not in over and _overdue(row, seen.now) for row in rows),
    )


def _matched(
    rows: Sequence[Row], holders: Mapping[Holder, Held], recorded: Mapping[Held, int]
) -> Iterator[tuple[Holder, frozenset[ContainerKey]]]:
    """The rows that each holder may use. A holder that no row explains is left out.

    A holder has its own rows. It also gets all rows with its ids that have no holder, if it is the
    only holder of these ids, or the only one without a row. If there are several such holders, or
    an init container with the same ids on record, their rows cannot be told apart: these rows keep
    no holder, and stay as long as any container has the ids.
    """
    own: dict[Holder, set[ContainerKey]] = {}
    free: dict[Held, set[ContainerKey]] = {}
    for row in rows:
        ids = frozenset(row.slice_ids)
        if row.holder is None:
            free.setdefault(ids, set()).add(row.key)
        elif holders.get(row.holder) == ids:
            own.setdefault(row.holder, set()).add(row.key)
    sharers = Counter(holders.values())
    new = Counter(ids for holder, ids in holders.items() if holder not in own)
    for holder, ids in holders.items():
        keys = own.get(holder, set())
        is_alone = sharers[ids] == 1 or (not keys and new[ids] == 1)
        if is_alone and recorded.get(ids, 0) <= sharers[ids]:
            keys = keys | free.get(ids, set())
        if keys:
            yield holder, frozenset(keys)


def _grace(row: Row, seen: ReconcileFacts, left: Held) -> dt.timedelta | None:
    """How long the row stays while no container is seen with it; None: not known yet.

    `left`: the recorded ids that no holder explains.
    """
    is_new = row.epoch != seen.epoch
    if row.holder is None and row.confirmed and is_new:  # only the file named it: init container
        return LOST_GRACE
    if row.holder is not None and row.confirmed and not is_new:
        return GONE_GRACE
    if is_new and not seen.holdings:
        return None  # a kubelet that knows no pod has just started
    if seen.recorded is None:
        return UNREAD_GRACE
    return UNSEEN_GRACE if left.isdisjoint(row.slice_ids) else None


# Compares hami mode's ledger with the kubelet and the API server, and returns findings.

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
    kept = judge_by_kubelet(Ledger(ledger.rows_by(Decider.KUBELET)), seen, resource)
    # When the rows of deleted pods may be over. VANISHED_GRACE is not shorter than PERIOD, so a pod
    # cannot be deleted and due between two Lists.
    ends = [kept.due] if kept.due else []
    if seen.complete:
        deleted = (row for row in rows if row.key.pod_uid not in seen.table.pods)
        ends += (_gone_since(row, seen) + VANISHED_GRACE for row in deleted)
    return Findings(
        confirmed=(*(new for old, new in updates if new and new != old), *kept.confirmed),
        mismatched=tuple(
            new.key
            for old, new in updates
            if new and new.mismatched and not (old.mismatched and old.confirmed)
        ),
        over=(*over, *kept.over),
        adopt=tuple(_adoptions(ledger, seen, by_key)),
        strangers=tuple(_strangers(ledger, seen, resource)),
        idle=kept.idle,
        due=min((end for end in ends if end > seen.now), default=None),
        # Drift: the agent could not offer the right ids before the answer. The kubelet used the ids
        # of an init container again, or another plugin answered.
        drifted=sum(bool(new and new.astray and not new.offered) for _, new in updates)
        + sum(row.role is Role.INIT for row in overdue),
        unconfirmed=sum(row.role is not Role.INIT for row in overdue) + kept.unconfirmed,
    )


def _overdue(row: Row, now: dt.datetime) -> bool:
    return not row.confirmed and has_passed(UNCONFIRMED_AFTER, row.answered_at, now)


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
    return msgspec.structs.replace(
        row, confirmed=True, epoch=seen.epoch, slice_ids=tuple(sorted(ids))
    )


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
            key = ContainerKey(pod.uid, container.name)
            is_new = pod.phase is Phase.PENDING and pod.reusable_name
            if is_new and seen.recorded is not None and key not in seen.recorded:
                # They are another pod's of that name, which may have been created and deleted
                # between two frames of the agent's watch: the kubelet's file lacks this UID.
                ids = frozenset()
            is_made = bool(seen.directories) and (
                container_directory(pod.uid, container.name) in seen.directories
            )
            if (ids or is_made) and ledger.find(key) is None:
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
