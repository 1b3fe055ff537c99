"""Rows of the kubelet's ids against its books: who holds what, and when a row is over.

Nothing but the kubelet tells of pods here, and it knows none while it starts, nor, after a lost
checkpoint, which ids a running container holds. So a row is over only when nobody can live by it:
its holder's pod is gone, or, where no holder was ever seen, nobody has its ids. Somebody who is
gone under the same kubelet that named him is gone; any other silence must agree with the kubelet's
checkpoint file, which forgets a pod only when the kubelet knows that it ended.
"""

import dataclasses
import datetime as dt
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from agent.core.ages import has_passed
from agent.core.inventory.slices import SliceId, split_slice_id
from agent.core.reconcile.findings import Findings, ReconcileFacts, Stranger
from agent.core.reconcile.pace import UNCONFIRMED_AFTER
from agent.core.state.ledger import ContainerKey, Decider, Holder, Ledger, Row

GONE_GRACE = dt.timedelta(seconds=10)
"""How long a row outlives a holder that went away under the kubelet that had named it."""

UNSEEN_GRACE = dt.timedelta(seconds=60)
"""How long a row stays that nobody holds, and that the kubelet's checkpoint file does not name."""

UNREAD_GRACE = dt.timedelta(minutes=10)
"""The same where that file cannot be read."""

LOST_GRACE = dt.timedelta(days=1)
"""The same where the file named the ids under an earlier kubelet: with a lost checkpoint nothing
tells of an init container that runs on."""

Held = frozenset[SliceId]


def judge_by_kubelet(ledger: Ledger, seen: ReconcileFacts, resource: str) -> Findings:
    """Hold every row that the kubelet decided against its books; nothing is told by a part of them.

    Where the scheduler decides, it is told by this when a row of a stranger is over.
    """
    if not seen.complete:
        return Findings()
    before = ledger.rows_by(Decider.KUBELET)
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Books:
    """One look.

    `recorded`: the ids in the kubelet's checkpoint file, equal ones once for each pod. `rows`: the
    rows that a holder may live by; `owners`: the same, by row. `held`: every id that somebody
    holds. `left`: what is recorded for others than these holders.
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
        Holder(one.namespace, one.pod, container.name): ids
        for one in seen.holdings
        for container in one.containers
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
        pods=frozenset((one.namespace, one.pod) for one in seen.holdings),
        recorded=recorded,
        rows=rows,
        owners={key: holder for holder, keys in rows.items() for key in keys},
        held=frozenset().union(*holders.values()),
        left=frozenset().union(*left),
    )


def _matched(
    rows: Sequence[Row], holders: Mapping[Holder, Held], recorded: Mapping[Held, int]
) -> Iterator[tuple[Holder, frozenset[ContainerKey]]]:
    """The rows that each holder may live by; a holder that no row explains is left out.

    Its own; and where it alone has the ids, or alone of those who have them has no row of its own,
    all rows of these ids that are nobody's. Of several such holders, or beside an init container
    with the same ids on record, it cannot be told who lives by which row: those stay nobody's, and
    live as long as anybody has the ids.
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
        found = own.get(holder, set())
        alone = sharers[ids] == 1 or (not found and new[ids] == 1)
        if alone and recorded.get(ids, 0) <= sharers[ids]:
            found = found | free.get(ids, set())
        if found:
            yield holder, frozenset(found)


def _learnt(row: Row, books: _Books) -> Row:
    """The row with its holder, as far as the kubelet names one."""
    holder = books.owners.get(row.key)
    if holder is None and (row.holder or frozenset(row.slice_ids) not in books.recorded):
        return row
    return dataclasses.replace(row, holder=holder, confirmed=True, epoch=books.seen.epoch)


def _lives(row: Row, books: _Books) -> bool:
    """Whether a container can live by the row."""
    if row.holder is None:
        # It may be this row that a holder of the ids lives by, or an init container's.
        return not books.held.isdisjoint(row.slice_ids)
    by = books.rows.get(row.holder)
    return books.lists(row.holder) if by is None else row.key in by


def _grace(row: Row, books: _Books) -> dt.timedelta | None:
    """How long nobody has to be seen with the row until it is over; None: that cannot be told yet.

    Who was only ever seen in the kubelet's file is an init container's.
    """
    is_new = row.epoch != books.seen.epoch
    if row.holder is None and row.confirmed and is_new:
        return LOST_GRACE
    if row.holder is not None and not is_new:
        return GONE_GRACE
    if is_new and not books.pods:
        return None  # a kubelet without any pod has not heard of its pods yet
    if books.seen.recorded is None:
        return UNREAD_GRACE
    return UNSEEN_GRACE if books.left.isdisjoint(row.slice_ids) else None


def _since(before: dt.datetime | None, row: Row, now: dt.datetime) -> dt.datetime:
    """Since when nobody is seen with the row; what was seen before its last answer is void.

    A moment of the future is from before the clock was set back: what was seen then counts from
    now, and an answer of then is an old one.
    """
    if before is None or before < row.answered_at <= now:
        return now
    return min(before, now)


def _strangers(ledger: Ledger, books: _Books) -> Iterable[Stranger]:
    """Holders of slices that no row explains."""
    nobodys = {frozenset(row.slice_ids) for row in ledger.rows if row.holder is None}
    for holder, ids in sorted(books.holders.items()):
        if holder not in books.rows and ids not in nobodys and any(map(split_slice_id, ids)):
            yield Stranger(holder, tuple(sorted(ids)), books.resource)
