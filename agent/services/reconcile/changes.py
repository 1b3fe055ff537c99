"""From findings to the ledger: rows to take over, and one change of all that was found."""

import dataclasses
import datetime as dt
from collections.abc import Awaitable, Callable, Iterator

import structlog

from agent.core.cluster.pods import PodTable
from agent.core.reconcile.reconcile import (
    VANISHED_GRACE,
    Adoption,
    Findings,
    ReconcileFacts,
    mismatch_event,
)
from agent.core.state.ledger import Ledger, Row
from agent.core.state.plain_row import Holder, PlainRow, Stranger, adopted_uid

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class AdoptedRows:
    """Rows of containers that the ledger did not know.

    `kept` only keep the ids of a container listed, because nothing says what it was answered.
    `unread`: how many of them could be taken over later, when more is known.
    """

    rows: tuple[Row, ...] = ()
    kept: tuple[PlainRow, ...] = ()
    unread: int = 0

    def tell(self) -> None:
        """One line each."""
        for row in self.rows:
            log.info("ledger.adopted", ns=row.namespace, pod=row.pod, ctr=row.key.container)
        for one in self.kept:
            if holder := one.holder:
                log.warning(
                    "ledger.kept_unread", ns=holder.namespace, pod=holder.pod, ctr=holder.container
                )


async def take_over(
    findings: Findings,
    seen: ReconcileFacts,
    ledger: Ledger,
    adopt: Callable[[Adoption], Awaitable[Row | None]],
) -> AdoptedRows:
    """Make the rows. `adopt` makes one of an answer that can be read, None: it cannot be."""
    rows: list[Row] = []
    strangers = list(findings.strangers)
    unread = 0
    for one in findings.adopt:
        row = await adopt(one)
        if row is not None:
            rows.append(row)
            continue
        unread += 1
        if one.ids:
            holder = Holder(one.pod.namespace, one.pod.name, one.container.name)
            strangers.append(Stranger(holder, one.ids, one.container.resource))
    known = {row.holder for row in ledger.plain}
    # Plain mode's reconcile closes these rows.
    kept = tuple(
        one.row(adopted_uid(one.holder), seen.now, seen.epoch)
        for one in strangers
        if one.holder not in known
    )
    return AdoptedRows(tuple(rows), kept, unread)


def applied(
    base: Ledger, ledger: Ledger, findings: Findings, taken: AdoptedRows, now: dt.datetime
) -> Ledger:
    """The findings about `base` on the newest ledger: rows that changed meanwhile stay."""
    for row in findings.confirmed:
        present = ledger.find(row.key)
        if present is not None and present == base.find(row.key):
            ledger = ledger.put(row)
            if row.key in findings.mismatched:
                ledger = ledger.owe(mismatch_event(row, now))
    for row in taken.rows:
        if ledger.find(row.key) is None:
            ledger = ledger.put(row)
    for kept in taken.kept:
        ledger = ledger.put_plain(kept)
    return ledger.drop(key for key in findings.vanished if ledger.find(key) == base.find(key))


def graces(ledger: Ledger, table: PodTable, since: dt.datetime) -> Iterator[dt.datetime]:
    """When the rows of deleted pods may be closed. `since` is as in Seen."""
    deleted = {stone.pod.uid: stone.deleted_at for stone in table.tombstones}
    for row in ledger.rows:
        if row.key.pod_uid not in table.pods:
            yield deleted.get(row.key.pod_uid, max(row.answered_at, since)) + VANISHED_GRACE
