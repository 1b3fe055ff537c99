"""From findings to the ledger: rows to take over, and one change of all that was found."""

import dataclasses
import datetime as dt
from collections.abc import Awaitable, Callable, Iterable

import structlog

from agent.core.reconcile.findings import Adoption, Findings, ReconcileFacts, Stranger
from agent.core.reconcile.reconcile import mismatch_event
from agent.core.state.ledger import Holder, Ledger, Row

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class AdoptedRows:
    """Rows of containers that the ledger did not know.

    Some only keep the ids of a container listed, because nothing says what it was answered.
    `unread`: how many of them could be taken over later, when more is known.
    """

    rows: tuple[Row, ...] = ()
    unread: int = 0

    def tell(self) -> None:
        """One line each."""
        for row in self.rows:
            named = {
                "ns": row.namespace,
                "pod": row.pod,
                "ctr": row.holder and row.holder.container,
            }
            if row.adopted:
                log.warning("ledger.kept_unread", **named)
            else:
                log.info("ledger.adopted", **named)


async def unread(_: Adoption) -> Row | None:
    """Nothing says what a container was answered."""
    return None


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
    known = {row.holder for row in ledger.rows}
    for one in findings.adopt:
        row = await adopt(one)
        if row is not None:
            rows.append(row)
            continue
        unread += 1
        holder = Holder(one.pod.namespace, one.pod.name, one.container.name)
        if one.ids and holder not in known:
            strangers.append(Stranger(holder, one.ids, one.container.resource))
    kept = (one.row(seen.now, seen.epoch) for one in strangers)
    return AdoptedRows((*rows, *kept), unread)


def applied(
    base: Ledger,
    ledger: Ledger,
    findings: Findings,
    adopted: Iterable[Row],
    now: dt.datetime,
) -> Ledger:
    """The findings about `base` on the newest ledger: rows that changed meanwhile stay."""
    for row in findings.confirmed:
        present = ledger.find(row.key)
        if present is not None and present == base.find(row.key):
            ledger = ledger.put(row)
            if row.key in findings.mismatched:
                ledger = ledger.owe(mismatch_event(row, now))
    for row in adopted:
        if ledger.find(row.key) is None:
            ledger = ledger.put(row)
    return ledger
