"""What the ledger is once a container was answered: its row, and what is owed after it."""

import dataclasses
import datetime as dt

from agent.core.allocation.candidates import is_over
from agent.core.cluster.annotations import PHASE_SUCCESS
from agent.core.cluster.pods import PodView
from agent.core.state.ledger import Effect, EffectKind, Ledger, Row

QUIET = dt.timedelta(seconds=1)
"""After so long without another request, what was consumed so far is written to the pod."""


def answered(ledger: Ledger, pod: PodView, row: Row) -> Ledger:
    """With the row of a first answer. The pod is owed its settlement, and its lock the removal."""
    ledger = ledger.put(row)
    rows = ledger.rows_of(pod.uid)
    complete = {one.key.container for one in rows} >= {
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
        groups=tuple(sorted(one.group for one in rows)),
    )
    locks = sorted({one.lock for one in rows if one.lock}) if complete else []
    if locks and pod.reusable_name:
        # Another pod of its name may have taken over the lock as it is: the patch of the pod, which
        # names its UID, shows whether it has.
        settle = dataclasses.replace(settle, value=locks.pop())
    ledger = ledger.without_settlements(pod.uid).owe(settle)
    for lock in locks:
        release = dataclasses.replace(
            settle, kind=EffectKind.RELEASE_LOCK, phase="", groups=(), value=lock
        )
        ledger = ledger.owe(release)
    return ledger
