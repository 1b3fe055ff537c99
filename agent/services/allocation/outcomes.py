"""How each Allocate ended: counted and logged."""

import structlog

from agent.core.errors import Refusal
from agent.core.ledger import Row
from agent.core.steps import Step
from agent.kit.tally import Tally

log = structlog.get_logger(__name__)


class Outcomes:
    """Tells of each answer and refusal, once."""

    def __init__(self) -> None:
        self.results = Tally(
            "allocations", "Answers to Allocate by result and reason.", ("result", "reason")
        )

    def answered(self, *, is_replay: bool, **told: object) -> None:
        """The kubelet gets an answer; `told` is whose and what, for the log."""
        result = "replay" if is_replay else "ok"
        self.results.add(result, "")
        log.info("alloc.answered", result=result, **told)

    def refused(self, refusal: Refusal, step: Step, count: int, row: Row | None = None) -> None:
        """The kubelet gets this refusal of `count` slices; `row` is what was to be answered."""
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
    """The container of a row, as the log names it."""
    return {"ns": row.namespace, "pod": row.pod, "ctr": row.key.container}
