"""Checks the node for faults for which every new pod would be refused, and withholds all slices.

A check raises what an Allocate would raise at that step. A short stall of a disk is no fault: an
Allocate waits for it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Final, NoReturn

import msgspec
import structlog

from agent.core.allocation.steps import DISK_BUDGET, AllocateStep, disk_refusal
from agent.core.cluster.changes import NodeEvent
from agent.core.errors import AgentError, StateError
from agent.core.node.withholding import Withholding
from agent.kit.cell import Cell
from agent.kit.running_time import Lag
from agent.kit.ticks import until_tick

PERIOD: Final = 10.0
"""Seconds between two runs of one check while slices are on offer, unless one is wanted sooner."""

LEAST: Final = 0.5
"""Seconds between two runs at least, and while slices are withheld."""

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
        self._lag = Lag()

    async def run(self) -> None:
        """Run all checks for ever. A check that hangs does not delay the others."""
        async with asyncio.TaskGroup() as group:
            for cue in self._cues:
                group.create_task(cue(self.look))
            for check in self._checks:
                group.create_task(self._repeat(check))

    def refused(self, sentence: str) -> None:
        """Run all checks soon: a pod was refused with this sentence.

        Where it says that a disk is silent, the slices go with the refusal.
        """
        for check in self._checks:
            if sentence == _sentence(TimeoutError(), check.step):
                self._note(check, TimeoutError())
        self.look()

    def look(self) -> None:
        """Run all checks soon."""
        for wanted in self._wanted.values():
            wanted.set()

    async def _repeat(self, check: NodeCheck) -> NoReturn:
        loop, wanted = asyncio.get_running_loop(), self._wanted[check]
        while True:
            wanted.clear()
            begun = loop.time()
            fault: AgentError | None = None
            try:
                with self._lag.alarm(DISK_BUDGET, lambda _: self._note(check, TimeoutError())):
                    await check.check()
            except AgentError as error:
                fault = error
            self._note(check, fault)
            with contextlib.suppress(TimeoutError):
                holds = self.state.value.holds
                async with asyncio.timeout(LEAST if holds else until_tick(PERIOD, check.turn)):
                    await wanted.wait()
            await asyncio.sleep(max(0.0, begun + LEAST - loop.time()))

    def _note(self, check: NodeCheck, error: AgentError | TimeoutError | None) -> None:
        """Record the result of a check and decide again."""
        self._reasons[check] = _sentence(error, check.step)
        texts = (self._reasons.get(each, "") for each in self._checks)
        reasons = tuple(dict.fromkeys(filter(None, texts)))
        before, state = self.state.value, Withholding(reasons)
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
