"""Checks the node for faults for which every new pod would be refused, and withholds all slices.

A check raises what an Allocate would raise at that step. agent.core.node.withholding decides when
slices are withheld and offered again.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Final, NoReturn

import msgspec
import structlog

from agent.core.allocation.steps import AllocateStep, disk_refusal
from agent.core.cluster.changes import NodeEvent
from agent.core.errors import AgentError, StateError
from agent.core.node.withholding import Withholding, withheld
from agent.kit.cell import Cell
from agent.kit.ticks import until_tick

PERIOD: Final = 10.0
"""Seconds between two runs of one check while slices are on offer, unless one is wanted sooner."""

LEAST: Final = 0.5
"""Seconds between two runs at least, and while slices are withheld."""

PATIENCE: Final = 15.0
"""Seconds after which a check that has not ended is a fault. A short stall of the disk fails only
the pods admitted meanwhile; while slices are withheld, the kubelet rejects all bound pods."""

log = structlog.get_logger(__name__)


class NodeCheck(msgspec.Struct, frozen=True):
    """A check of the node. `check` raises AgentError if `step` would fail for every new pod.

    `turn`: see agent.kit.ticks.
    """

    step: AllocateStep
    check: Callable[[], Awaitable[None]]
    turn: int = 0


Cue = Callable[[Callable[[], None]], Coroutine[None, None, None]]
"""Runs for ever and calls its argument when checks may have another result."""


class Withholder:
    """Sole writer of `state`. `withhold` is called when slices are withheld or offered again.

    `cues` make it run the checks at once. `say` posts an Event about the Node.
    """

    def __init__(
        self,
        checks: Sequence[NodeCheck],
        withhold: Callable[[Withholding], None],
        say: Callable[[NodeEvent], None],
        cues: Sequence[Cue] = (),
    ) -> None:
        self.state: Cell[Withholding] = Cell(Withholding())
        self._checks = checks
        self._reasons: dict[NodeCheck, str] = {}
        self._wanted = {check: asyncio.Event() for check in checks}
        self._withhold = withhold
        self._cues = cues
        self._say = say

    async def run(self) -> None:
        """Run all checks for ever. A check that hangs does not delay the others."""
        async with asyncio.TaskGroup() as group:
            for cue in self._cues:
                group.create_task(cue(self.look))
            for check in self._checks:
                group.create_task(self._repeat(check))

    def look(self) -> None:
        """Run all checks soon, as when a pod was refused."""
        for wanted in self._wanted.values():
            wanted.set()

    async def _repeat(self, check: NodeCheck) -> NoReturn:
        loop, wanted = asyncio.get_running_loop(), self._wanted[check]
        while True:
            wanted.clear()
            begun = loop.time()
            late = loop.call_later(PATIENCE, self._note, check, TimeoutError())
            try:
                await check.check()
            except AgentError as error:
                self._note(check, error)
            else:
                self._note(check, None)
            finally:
                late.cancel()
            with contextlib.suppress(TimeoutError):
                holds = self.state.value.holds
                async with asyncio.timeout(LEAST if holds else until_tick(PERIOD, check.turn)):
                    await wanted.wait()
            await asyncio.sleep(max(0.0, begun + LEAST - loop.time()))

    def _note(self, check: NodeCheck, error: AgentError | TimeoutError | None) -> None:
        """Record the result of a check and decide again; the decision also depends on time."""
        self._reasons[check] = _sentence(error, check.step)
        texts = (self._reasons.get(each, "") for each in self._checks)
        reasons = tuple(dict.fromkeys(filter(None, texts)))
        before, now = self.state.value, asyncio.get_running_loop().time()
        state = withheld(before, reasons, now)
        self.state.set(state)
        if state.holds != before.holds:
            self._withhold(state)
            self._tell(state)
            self.look()  # the others may wait for longer than is right now

    def _tell(self, state: Withholding) -> None:
        if state.holds:
            why = "; ".join(state.reasons)
            log.error("slices.withheld", err=why)
            text = f"Every new pod would be refused, so no slice is on offer: {why}"
            self._say(NodeEvent("NothingOffered", text, warning=True))
        else:
            log.info("slices.offered_again")


def _sentence(error: AgentError | TimeoutError | None, step: AllocateStep) -> str:
    """The refusal that a new pod would get. Empty: the check passed."""
    if error is None:
        return ""
    if isinstance(error, TimeoutError | StateError):
        return str(disk_refusal(error, step))
    return str(error)
