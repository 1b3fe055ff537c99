"""How each Allocate ended: counted, logged, and said where no pod can be told."""

from collections.abc import Callable

import structlog

from agent.core.changes import NodeEvent
from agent.core.errors import Gate, Refusal
from agent.core.ledger import Row
from agent.core.settlement import REFUSED_EVENT
from agent.kit.tally import Tally
from agent.services.allocation.calls import Call

log = structlog.get_logger(__name__)

_OF_NO_POD = frozenset({Gate.NO_POD_ADMITTED, Gate.STATIC_POD})
"""Refusals of pods that the API server does not know, or not yet: their Event is the Node's."""


class Outcomes:
    """Tells of each answer and refusal, once. `say` posts an Event about the Node."""

    def __init__(self, say: Callable[[NodeEvent], None]) -> None:
        self._say = say
        self.results = Tally(
            "allocations", "Answers to Allocate by result and reason.", ("result", "reason")
        )

    def answered(self, row: Row, call: Call) -> None:
        """The kubelet gets this row's answer."""
        result = "replay" if call.is_replay else "ok"
        self.results.add(result, "")
        log.info(
            "alloc.answered",
            result=result,
            ns=row.namespace,
            pod=row.pod,
            ctr=row.key.container,
            gpus=[share.uuid for share in row.shares],
        )

    def refused(self, refusal: Refusal, call: Call, count: int) -> None:
        """The kubelet gets this refusal of `count` slices."""
        self.results.add("refused", refusal.gate.name.lower())
        row = call.row
        pod = {} if row is None else {"ns": row.namespace, "pod": row.pod, "ctr": row.key.container}
        log.warning(
            "alloc.refused",
            gate=refusal.gate.value,
            step=call.step.value,
            count=count,
            reason=refusal.sentence,
            **pod,
        )
        if refusal.gate in _OF_NO_POD:
            self._say(NodeEvent(REFUSED_EVENT, str(refusal), warning=True))
