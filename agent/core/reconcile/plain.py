"""Plain mode's rows against the kubelet's books: who holds what, and when a row is over.

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
from agent.core.cluster.pods import PodUid
from agent.core.inventory.slices import SliceId, split_slice_id
from agent.core.reconcile.pace import UNCONFIRMED_AFTER
from agent.core.state.holdings import Holding, KubeletEpoch
from agent.core.state.ledger import ContainerKey, Ledger, Row
from agent.core.state.plain_row import Holder, PlainRow, Stranger

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


@dataclasses.dataclass(frozen=True, slots=True)
class PlainSeen:
    """What is held against the rows.

    `holdings`: a complete List of the kubelet `epoch`. `recorded`: the ids in its checkpoint file,
    equal ones once for each pod, None where that cannot be read. `idle`: since when each row was
    seen without a holder.
    """

    holdings: Sequence[Holding]
    recorded: Sequence[Held] | None
    epoch: KubeletEpoch
    now: dt.datetime
    idle: Mapping[PodUid | ContainerKey, dt.datetime] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class PlainFindings:
    """What is to be changed.

    `confirmed`, `scheduled`: rows of plain and of hami mode with what was learnt of them; `closed`,
    `closed_scheduled`: those that are over. `strangers`: holders to adopt. `idle`: for the next
    look. `due`: when the next row will be over if nothing changes.
    """

    confirmed: tuple[PlainRow, ...]
    scheduled: tuple[Row, ...]
    closed: tuple[PlainRow, ...]
    closed_scheduled: tuple[Row, ...]
    strangers: tuple[Stranger, ...]
    idle: Mapping[PodUid | ContainerKey, dt.datetime]
    due: dt.datetime | None
    unconfirmed: int


def observe(ledger: Ledger, seen: PlainSeen, names: Sequence[str], *, alone: bool) -> PlainFindings:
    """Hold every row against the kubelet's books.

    `names` are those of our resource, former ones as well; no two containers hold the same id by
    different ones. `alone`: this node is in plain mode. Else its own reconcile keeps the rows of
    hami mode and adopts holders, and only what plain mode left is looked after here.
    """
    books = _read(ledger, seen, names)
    rows = tuple(_learnt(row, books) for row in ledger.plain)
    scheduled = tuple(_learnt_scheduled(row, books) for row in ledger.rows) if alone else ()
    grace: dict[PodUid | ContainerKey, dt.timedelta | None] = {}
    idle: dict[PodUid | ContainerKey, dt.datetime] = {}
    for row in rows:
        if not _lives(row, books):
            grace[row.uid] = _plain_grace(row, books)
            idle[row.uid] = _since(seen.idle.get(row.uid), row, seen.now)
    for kept in scheduled:
        if not _lives_scheduled(kept, books):
            grace[kept.key] = _grace(kept, kept.confirmed, books)
            idle[kept.key] = _since(seen.idle.get(kept.key), kept, seen.now)
    ends = {key: idle[key] + left for key, left in grace.items() if left is not None}
    over = {key for key, end in ends.items() if end <= seen.now}
    unconfirmed = (row for row in rows if not row.confirmed and row.uid not in over)
    return PlainFindings(
        confirmed=tuple(new for new, old in zip(rows, ledger.plain, strict=True) if new != old),
        scheduled=tuple(
            new for new, old in zip(scheduled, ledger.rows, strict=False) if new != old
        ),
        closed=tuple(row for row in rows if row.uid in over),
        closed_scheduled=tuple(row for row in scheduled if row.key in over),
        strangers=tuple(_strangers(ledger, books)) if alone else (),
        idle=idle,
        due=min((end for key, end in ends.items() if key not in over), default=None),
        unconfirmed=sum(
            has_passed(UNCONFIRMED_AFTER, row.answered_at, seen.now) for row in unconfirmed
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Books:
    """One look.

    `asked_by`: the name that each holder asked by. `rows`: the rows that a holder may live by;
    `owners`: the same, by row. `held`: every id that somebody holds. `left`: what is recorded for
    others than these holders.
    """

    seen: PlainSeen
    holders: Mapping[Holder, Held]
    asked_by: Mapping[Holder, str]
    pods: frozenset[tuple[str, str]]
    rows: Mapping[Holder, frozenset[PodUid]]
    owners: Mapping[PodUid, Holder]
    held: Held
    left: Held

    def lists(self, holder: Holder) -> bool:
        """Whether the kubelet still knows the holder's pod."""
        return (holder.namespace, holder.pod) in self.pods


def _read(ledger: Ledger, seen: PlainSeen, names: Sequence[str]) -> _Books:
    found = {
        Holder(one.namespace, one.pod, container.name): (ids, name)
        for one in seen.holdings
        for container in one.containers
        for name in reversed(names)
        if (ids := container.ids.get(name))
    }
    asked_by = {holder: name for holder, (_, name) in found.items()}
    holders = {holder: ids for holder, (ids, _) in found.items()}
    left = Counter(seen.recorded or ()) - Counter(holders.values())
    rows = dict(_matched(ledger.plain, holders, Counter(seen.recorded or ())))
    return _Books(
        seen=seen,
        holders=holders,
        asked_by=asked_by,
        pods=frozenset((one.namespace, one.pod) for one in seen.holdings),
        rows=rows,
        owners={uid: holder for holder, uids in rows.items() for uid in uids},
        held=frozenset().union(*holders.values()),
        left=frozenset().union(*left),
    )


def _matched(
    rows: Sequence[PlainRow], holders: Mapping[Holder, Held], recorded: Mapping[Held, int]
) -> Iterator[tuple[Holder, frozenset[PodUid]]]:
    """The rows that each holder may live by; a holder that no row explains is left out.

    Its own; and where it alone has the ids, or alone of those who have them has no row of its own,
    all rows of these ids that are nobody's. Of several such holders, or beside an init container
    with the same ids on record, it cannot be told who lives by which row: those stay nobody's, and
    live as long as anybody has the ids.
    """
    own: dict[Holder, set[PodUid]] = {}
    free: dict[Held, set[PodUid]] = {}
    for row in rows:
        ids = frozenset(row.slice_ids)
        if row.holder is None:
            free.setdefault(ids, set()).add(row.uid)
        elif holders.get(row.holder) == ids:
            own.setdefault(row.holder, set()).add(row.uid)
    sharers = Counter(holders.values())
    new = Counter(ids for holder, ids in holders.items() if holder not in own)
    for holder, ids in holders.items():
        found = own.get(holder, set())
        alone = sharers[ids] == 1 or (not found and new[ids] == 1)
        if alone and recorded.get(ids, 0) <= sharers[ids]:
            found = found | free.get(ids, set())
        if found:
            yield holder, frozenset(found)


def _learnt(row: PlainRow, books: _Books) -> PlainRow:
    """The row with its holder, as far as the kubelet names one."""
    holder = books.owners.get(row.uid)
    if holder is not None:
        return dataclasses.replace(row, holder=holder, epoch=books.seen.epoch)
    if row.holder is None and frozenset(row.slice_ids) in (books.seen.recorded or ()):
        return dataclasses.replace(row, recorded=True, epoch=books.seen.epoch)
    return row


def _learnt_scheduled(row: Row, books: _Books) -> Row:
    """The row of hami mode, confirmed where the kubelet names its ids for its container."""
    if books.holders.get(_holder(row)) != frozenset(row.slice_ids):
        return row
    return dataclasses.replace(row, confirmed=True, epoch=books.seen.epoch)


def _holder(row: Row) -> Holder:
    return Holder(row.namespace, row.pod, row.key.container)


def _lives(row: PlainRow, books: _Books) -> bool:
    """Whether a container can live by the row."""
    if row.holder is None:
        # It may be this row that a holder of the ids lives by, or an init container's.
        return not books.held.isdisjoint(row.slice_ids)
    by = books.rows.get(row.holder)
    return books.lists(row.holder) if by is None else row.uid in by


def _lives_scheduled(row: Row, books: _Books) -> bool:
    """The same for a row of hami mode: its pod is there, and no plain row explains it better."""
    return books.lists(_holder(row)) and _holder(row) not in books.rows


def _plain_grace(row: PlainRow, books: _Books) -> dt.timedelta | None:
    if row.holder is None and row.recorded and row.epoch != books.seen.epoch:
        return LOST_GRACE
    return _grace(row, row.holder is not None, books)


def _grace(row: PlainRow | Row, named: bool, books: _Books) -> dt.timedelta | None:  # noqa: FBT001 -- of the row
    """How long nobody has to be seen with the row until it is over; None: that cannot be told yet.

    `named`: somebody once was seen with it.
    """
    is_new = row.epoch != books.seen.epoch
    if named and not is_new:
        return GONE_GRACE
    if is_new and not books.pods:
        return None  # a kubelet without any pod has not heard of its pods yet
    if books.seen.recorded is None:
        return UNREAD_GRACE
    return UNSEEN_GRACE if books.left.isdisjoint(row.slice_ids) else None


def _since(before: dt.datetime | None, row: PlainRow | Row, now: dt.datetime) -> dt.datetime:
    """Since when nobody is seen with the row; what was seen before its last answer is void.

    A moment of the future is from before the clock was set back: what was seen then counts from
    now, and an answer of then is an old one.
    """
    if before is None or before < row.answered_at <= now:
        return now
    return min(before, now)


def _strangers(ledger: Ledger, books: _Books) -> Iterable[Stranger]:
    """Holders of slices that no row explains, not even one of hami mode."""
    scheduled = frozenset(map(_holder, ledger.rows))
    nobodys = {frozenset(row.slice_ids) for row in ledger.plain if row.holder is None}
    for holder, ids in sorted(books.holders.items()):
        if holder in books.rows or holder in scheduled or ids in nobodys:
            continue
        if any(split_slice_id(text) for text in ids):
            yield Stranger(holder, tuple(sorted(ids)), books.asked_by[holder])
