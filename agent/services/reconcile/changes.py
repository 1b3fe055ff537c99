"""Turns the findings of a reconcile into one change of the ledger."""

import datetime as dt
from collections.abc import Awaitable, Callable, Iterable

import msgspec
import structlog

from agent.core.reconcile.findings import Adoption, Findings, ReconcileFacts, Stranger
from agent.core.reconcile.mismatch import mismatch_event
from agent.core.reconcile.reconcile import explained_by
from agent.core.state.ledger import Holder, Ledger, Row

log = structlog.get_logger(__name__)


class AdoptedRows(msgspec.Struct, frozen=True):
    """New rows for containers that the ledger did not know.

    If a container's answer cannot be read, its row only keeps its ids in use. `unread`: how many
    answers could not be read; a later reconcile tries again.
    """

    rows: tuple[Row, ...] = ()
    unread: int = 0

    def tell(self) -> None:
        """Log each row."""
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
    """None: plain mode has no source for another plugin's answer."""
    return None


async def take_over(
    findings: Findings,
    seen: ReconcileFacts,
    ledger: Ledger,
    adopt: Callable[[Adoption], Awaitable[Row | None]],
) -> AdoptedRows:
    """Make the new rows. `adopt` makes the row of one container; None: its answer is unreadable."""
    rows: list[Row] = []
    strangers = list(findings.strangers)
    unread = 0
    explains = explained_by(ledger)
    for adoption in findings.adopt:
        row = await adopt(adoption)
        if row is not None:
            rows.append(row)
            continue
        unread += 1
        pod, container = adoption.pod, adoption.container
        holder = Holder(pod.namespace, pod.name, container.name)
        if adoption.ids and not explains(holder, adoption.ids):
            strangers.append(Stranger(holder, adoption.ids, container.resource))
    kept = (stranger.row(seen.now, seen.epoch) for stranger in strangers)
    return AdoptedRows((*rows, *kept), unread)


def applied(
    base: Ledger,
    ledger: Ledger,
    findings: Findings,
    adopted: Iterable[Row],
    now: dt.datetime,
) -> Ledger:
    """`ledger` with the findings about `base`. Rows that changed since `base` stay as they are."""
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
