"""A mismatch: the kubelet booked other GPUs for a container than those that were answered."""

import datetime as dt
from collections.abc import Iterable

from agent.core.errors import Refusal, RefusalReason
from agent.core.inventory.slices import SliceId, split_slice_id
from agent.core.state.ledger import Decider, Effect, EffectKind, Ledger, Row

MISMATCH_EVENT = "SliceMismatch"


def mismatch(row: Row) -> Refusal:
    """The sentence about a mismatched row for the pod's owner, also as the fence's refusal."""
    booked = {pair[0] if (pair := split_slice_id(text)) else text for text in row.slice_ids}
    return Refusal(
        RefusalReason.OTHER_GPU_BOOKED,
        f"Container {row.key.container} was given GPU "
        f"{', '.join(share.uuid for share in row.shares)}, but the kubelet booked slices of "
        f"{', '.join(sorted(booked))} for it; create the pod again.",
    )


def mismatch_event(row: Row, now: dt.datetime) -> Effect:
    """The effect that posts the Event about a mismatched row on its pod."""
    return Effect(
        kind=EffectKind.POST_EVENT,
        pod_uid=row.key.pod_uid,
        namespace=row.namespace,
        pod=row.pod,
        due=now,
        value=str(mismatch(row)),
        reason=MISMATCH_EVENT,
    )


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
