"""Counts and logs how each Allocate ended."""

import structlog

from agent.core.allocation.room import Shortage
from agent.core.allocation.steps import AllocateStep
from agent.core.cluster.changes import NodeEvent
from agent.core.errors import Refusal, RefusalReason
from agent.core.state.ledger import Row
from agent.kit.tally import Tally

log = structlog.get_logger(__name__)


OVERSOLD_EVENT = "GpuOversold"


def oversold(short: Shortage) -> NodeEvent:
    """The Event that the scheduler has given out more of a GPU than it has."""
    what, total, limit = short.amounts
    text = (
        f"HAMi's scheduler has given out {total} of {what} of {short.gpu.gpu.title}, which has "
        f"{limit}: for a pod with sidecars or init containers it counts less than runs at one "
        "time. Delete one of the pods on this GPU, or let them ask for less."
    )
    return NodeEvent(OVERSOLD_EVENT, text, warning=True)


class Outcomes:
    """Counts and logs each answer and refusal once."""

    def __init__(self) -> None:
        self.results = Tally(
            "allocations_total",
            "Answers to Allocate by result and reason.",
            ("result", "reason"),
            expected=[("refused", gate.name.lower()) for gate in RefusalReason],
        )

    def answered(self, row: Row, *, is_replay: bool) -> None:
        """Report an answer."""
        result = "replay" if is_replay else "ok"
        self.results.add(result, "")
        gpus, count = list(dict.fromkeys(row.gpus)), len(row.slice_ids)
        log.info("alloc.answered", result=result, **whose(row), count=count, gpus=gpus)

    def refused(
        self, refusal: Refusal, step: AllocateStep, count: int, row: Row | None = None
    ) -> None:
        """Report a refusal of `count` slices. `row`: what would have been answered, if known."""
        self.results.add("refused", refusal.gate.name.lower())
        log.warning(
            "alloc.refused",
            gate=refusal.gate.value,
            step=step.value,
            count=count,
            reason=refusal.sentence,
            **({} if row is None else whose(row)),
        )


def whose(row: Row) -> dict[str, str]:
    """The log fields that name a row's container; its drawn UID while no holder is known."""
    if row.holder is None:
        return {"uid": row.key.pod_uid}
    return {"ns": row.namespace, "pod": row.pod, "ctr": row.holder.container}
