"""Compares plain mode's rows with the kubelet: which container holds a row, and when a row is over.

Only the kubelet reports pods here. While it starts it knows no pod; after a lost checkpoint it does
not know which ids a running container holds. So a row is over only when no container can use it:
its holder's pod is gone, or it never had a holder and no container has its ids. If the kubelet
instance that named the holder no longer lists it, it is gone. In all other cases the kubelet's
checkpoint file must agree: it forgets a pod only when the kubelet knows that the pod ended.
"""

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from agent.core.ages import has_passed
from agent.core.inventory.slices import SliceId, split_slice_id
from agent.core.reconcile.findings import Findings, ReconcileFacts, Stranger
from agent.core.reconcile.pace import UNCONFIRMED_AFTER
from agent.core.state.ledger import ContainerKey, Decider, Holder, Ledger, Row

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
    before = ledger.rows
    books = _read(before, seen, resource)
    rows = tuple(_learnt(row, books) for row in before)
    idle: dict[ContainerKey, dt.datetime] = {}
    ends: dict[ContainerKey, dt.datetime] = {}
    for row in rows:
        if not _lives(row, books):
            idle[row.key] = _since(seen.idle.get(row.key), row, seen.now)
            if (grace := _grace(row, books)) is not None:
                ends[row.key] = idle[row.key] + grace
    over = {key for key, end in ends.items() if end <= seen.now}
    return Findings(
        confirmed=tuple(new for new, old in zip(rows, before, strict=True) if new != old),
        over=tuple(row for row in rows if row.key in over),
        strangers=tuple(_strangers(ledger, books)),
        idle=idle,
        due=min((end for key, end in ends.items() if key not in over), default=None),
        unconfirmed=sum(
            not row.confirmed
            and row.key not in over
            and has_passed(UNCONFIRMED_AFTER, row.answered_at, seen.now)
            for row in rows
        ),
    )


class _Books(msgspec.Struct, frozen=True):
    """The kubelet's answers at one moment.

    - `recorded`: the id sets in the kubelet's checkpoint file, each with its number of pods.
    - `rows`: the rows that each holder may use; `owners`: the holder of each row.
    - `held`: the ids of all holders. `left`: the recorded ids that no holder explains.
    """

    seen: ReconcileFacts
    resource: str
    holders: Mapping[Holder, Held]
    pods: frozenset[tuple[str, str]]
    recorded: Mapping[Held, int]
    rows: Mapping[Holder, frozenset[ContainerKey]]
    owners: Mapping[ContainerKey, Holder]
    held: Held
    left: Held

    def lists(self, holder: Holder) -> bool:
        """Whether the kubelet still knows the holder's pod."""
        return (holder.namespace, holder.pod) in self.pods


def _read(before: Sequence[Row], seen: ReconcileFacts, resource: str) -> _Books:
    holders = {
        Holder(holding.namespace, holding.pod, container.name): ids
        for holding in seen.holdings
        for container in holding.containers
        if (ids := container.ids.get(resource))
    }
    by_pod = {(key.pod_uid, ids) for key, ids in (seen.recorded or {}).items()}
    recorded = Counter(ids for _, ids in by_pod)
    left = recorded - Counter(holders.values())
    rows = dict(_matched(before, holders, recorded))
    return _Books(
        seen=seen,
        resource=resource,
        holders=holders,
        pods=frozenset((holding.namespace, holding.pod) for holding in seen.holdings),
        recorded=recorded,
        rows=rows,
        owners={key: holder for holder, keys in rows.items() for key in keys},
        held=frozenset().union(*holders.values()),
        left=frozenset().union(*left),
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


def _learnt(row: Row, books: _Books) -> Row:
    """The row with its holder, if the kubelet names one."""
    holder = books.owners.get(row.key)
    if holder is None and (row.holder or frozenset(row.slice_ids) not in books.recorded):
        return row
    return msgspec.structs.replace(row, holder=holder, confirmed=True, epoch=books.seen.epoch)


def _lives(row: Row, books: _Books) -> bool:
    """Whether a container may still use the row."""
    if row.holder is None:
        # Any holder of these ids may use this row.
        return not books.held.isdisjoint(row.slice_ids)
    by = books.rows.get(row.holder)
    if by is None:
        # A container that is listed with other ids was answered anew, for one of hami mode's rows.
        return books.lists(row.holder) and row.holder not in books.holders
    return row.key in by


def _grace(row: Row, books: _Books) -> dt.timedelta | None:
    """How long the row stays while no container is seen with it; None: not known yet."""
    is_new = row.epoch != books.seen.epoch
    if row.holder is None and row.confirmed and is_new:  # only the file named it: init container
        return LOST_GRACE
    if row.holder is not None and row.confirmed and not is_new:
        return GONE_GRACE
    if is_new and not books.pods:
        return None  # a kubelet that knows no pod has just started
    if books.seen.recorded is None:
        return UNREAD_GRACE
    return UNSEEN_GRACE if books.left.isdisjoint(row.slice_ids) else None


def _since(before: dt.datetime | None, row: Row, now: dt.datetime) -> dt.datetime:
    """Since when no container is seen with the row. Times before its last answer do not count.

    After the clock was set back, times can lie in the future: `before` then counts as now, and an
    answer counts as old.
    """
    if before is None or before < row.answered_at <= now:
        return now
    return min(before, now)


def _strangers(ledger: Ledger, books: _Books) -> Iterable[Stranger]:
    """Holders of slices that no row explains."""
    unheld = {frozenset(row.slice_ids) for row in ledger.rows if row.holder is None}
    scheduled = {row.holder for row in ledger.rows_by(Decider.SCHEDULER)}
    for holder, ids in sorted(books.holders.items()):
        if holder in books.rows or holder in scheduled or ids in unheld:
            continue
        if any(map(split_slice_id, ids)):
            yield Stranger(holder, tuple(sorted(ids)), books.resource)
