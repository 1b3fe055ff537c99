"""Adds an answered container to the ledger: its row, and the effects that follow."""

import datetime as dt

import msgspec

from agent.core.allocation.candidates import is_over
from agent.core.cluster.annotations import PHASE_SUCCESS
from agent.core.cluster.pods import PodView
from agent.core.state.ledger import Effect, EffectKind, Ledger, Row

QUIET = dt.timedelta(seconds=1)
"""After this time without another answer, the groups consumed so far are written to the pod."""


def answered(ledger: Ledger, pod: PodView, row: Row) -> Ledger:
    """The ledger with the row of a first answer, the pod's settlement and its lock's release."""
    rows = [row, *(other for other in ledger.rows_of(pod.uid) if other.key != row.key)]
    ledger = ledger.put(row)
    complete = {each.key.container for each in rows} >= {
        container.name
        for container in pod.asking(row.resource)
        if not is_over(container, row.epoch)
    }
    settle = Effect(
        kind=EffectKind.SETTLE_POD,
        pod_uid=pod.uid,
        namespace=pod.namespace,
        pod=pod.name,
        due=row.answered_at if complete else row.answered_at + QUIET,
        phase=PHASE_SUCCESS if complete else "",
        groups=tuple(sorted(each.group for each in rows)),
    )
    locks = sorted({each.lock for each in rows if each.lock}) if complete else []
    if locks and pod.reusable_name:
        # Another pod of this name may have taken over the lock. The patch of the pod has the UID,
        # so it fails in that case, and the lock stays.
        settle = msgspec.structs.replace(settle, value=locks.pop())
    ledger = ledger.without_settlements(pod.uid).owe(settle)
    for lock in locks:
        release = msgspec.structs.replace(
            settle, kind=EffectKind.RELEASE_LOCK, phase="", groups=(), value=lock
        )
        ledger = ledger.owe(release)
    return ledger
