"""Looks for what would have every new pod refused; while there is such a thing, nothing is offered.

It judges nothing: what a look raises is what an Allocate would raise there, and when slices are
withheld and offered again is decided in agent.core.node.withholding.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NoReturn

import structlog

from agent.core.allocation.steps import AllocateStep, disk_refusal
from agent.core.cluster.changes import NodeEvent
from agent.core.errors import AgentError, StateError
from agent.core.node.withholding import Withholding, withheld
from agent.kit.cell import Cell

PERIOD: Final = 0.5
"""Seconds between two looks at one thing."""

PATIENCE: Final = 15.0
"""Seconds after which a look that is still going on is a reason. A disk that stalls for a moment
costs the pods that ask meanwhile; withheld, the kubelet would reject all that are on their way."""

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class NodeCheck:
    """`check` raises AgentError where every new pod would be refused in that `step`."""

    step: AllocateStep
    check: Callable[[], Awaitable[None]]


class Withholder:
    """Sole writer of `state`. `withhold` is told when slices are withheld, and when no more.

    `say` posts an Event about the Node.
    """

    def __init__(
        self,
        looks: Sequence[NodeCheck],
        withhold: Callable[[Withholding], None],
        say: Callable[[NodeEvent], None],
    ) -> None:
        self.state: Cell[Withholding] = Cell(Withholding())
        self._looks = looks
        self._found: dict[NodeCheck, str] = {}
        self._withhold = withhold
        self._say = say

    async def run(self) -> None:
        """Look for ever. A look that hangs holds up no other one."""
        async with asyncio.TaskGroup() as group:
            for look in self._looks:
                group.create_task(self._keep_looking(look))

    async def _keep_looking(self, look: NodeCheck) -> NoReturn:
        loop = asyncio.get_running_loop()
        while True:
            late = loop.call_later(PATIENCE, self._note, look, TimeoutError())
            try:
                await look.check()
            except AgentError as error:
                self._note(look, error)
            else:
                self._note(look, None)
            finally:
                late.cancel()
            await asyncio.sleep(PERIOD)

    def _note(self, look: NodeCheck, error: AgentError | TimeoutError | None) -> None:
        """That look found this; decide anew, also because time has passed."""
        self._found[look] = _sentence(error, look.step)
        texts = (self._found.get(one, "") for one in self._looks)
        reasons = tuple(dict.fromkeys(filter(None, texts)))
        before, now = self.state.value, asyncio.get_running_loop().time()
        state = withheld(before, reasons, now)
        self.state.set(state)
        if state.holds != before.holds:
            self._withhold(state)
            self._tell(state)

    def _tell(self, state: Withholding) -> None:
        if state.holds:
            why = "; ".join(state.reasons)
            log.error("slices.withheld", err=why)
            text = f"Every new pod would be refused, so no slice is on offer: {why}"
            self._say(NodeEvent("NothingOffered", text, warning=True))
        else:
            log.info("slices.offered_again")


def _sentence(error: AgentError | TimeoutError | None, step: AllocateStep) -> str:
    """What a new pod would be told; empty: nothing is wrong."""
    if error is None:
        return ""
    if isinstance(error, TimeoutError | StateError):
        return str(disk_refusal(error, step))
    return str(error)
