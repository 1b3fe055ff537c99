"""A reporter and the Node's view on one fake API server."""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

from agent.cluster import REGISTER, NodeEvent, NodeView
from agent.hami.annotations import ReportProfile, ReportSettings, read_register, report_of
from agent.kit.cell import Cell
from agent.kube.objects import NodeWatch
from agent.model import Inventory
from agent.report import ReportCells, Reporter
from tests.builders import an_inventory
from tests.fakes.apiserver import FakeApi
from tests.fakes.clock import LoopClock
from tests.services.at_work import at_work

COLON = ReportSettings(ReportProfile.COLON)
SCORED = ReportSettings(topology_score=True)


class Chance(random.Random):
    """Always the same number between 0 and 1."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self._value = value

    def random(self) -> float:
        return self._value


@dataclasses.dataclass
class Reporting:
    """What a test of the reporter holds in its hands."""

    api: FakeApi
    inventory: Cell[Inventory]
    node: Cell[NodeView | None]
    settings: Cell[ReportSettings]
    reporter: Reporter
    events: list[NodeEvent]
    log: list[MutableMapping[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def unreported(self) -> str:
        """Why the API server does not hold the report, as the reporter says it."""
        return self.reporter.unreported.value

    async def settled(self) -> None:
        """The server holds what the inventory says, and the reporter knows it."""
        async with asyncio.timeout(3600):
            await self.node.until(lambda _: self.told(self.inventory.value))
            await self.reporter.unreported.until(lambda why: not why)

    def told(self, inventory: Inventory) -> bool:
        """The API server holds this inventory."""
        held = {} if self.api.node is None else self.api.node.annotations
        report = report_of(inventory, held, self.settings.value)
        if inventory.gpus:
            return report is not None and not report.changes
        known = read_register(held.get(REGISTER))
        return bool(known) and not any(gpu.healthy for gpu in known)

    def says(self, key: str) -> str | None:
        """What the Node's annotation says at the API server."""
        return None if self.api.node is None else self.api.node.annotations.get(key)

    def written(self, reason: str) -> int:
        """How many writes there were for that reason."""
        return int(dict(self.reporter.writes.items()).get((reason,), 0))


@contextlib.asynccontextmanager
async def reporting(
    api: FakeApi | None = None,
    *,
    inventory: Inventory | None = None,
    settings: ReportSettings | None = None,
    chance: float = 0.0,
    observes: bool = False,
) -> AsyncIterator[Reporting]:
    """Both services run while the block does.

    Without an API server of the test's own the Node is bare.
    """
    if api is None:
        api = FakeApi()
        api.create_node()
    found = Cell(an_inventory() if inventory is None else inventory)
    view: Cell[NodeView | None] = Cell(None)
    events: list[NodeEvent] = []
    node = NodeWatch(api, view, Chance(chance))
    chosen = Cell(ReportSettings() if settings is None else settings)
    cells = ReportCells(found, view, node.returns, chosen)
    clock, dice = LoopClock(), Chance(chance)
    reporter = Reporter(api, cells, node.on_answer, events.append, clock, dice, observes=observes)
    async with at_work(node.run, reporter.run):
        yield Reporting(api, found, view, chosen, reporter, events)


@contextlib.asynccontextmanager
async def reported(
    *, inventory: Inventory | None = None, settings: ReportSettings | None = None
) -> AsyncIterator[Reporting]:
    """A Node that holds the inventory; one write was made."""
    async with reporting(inventory=inventory, settings=settings) as room:
        await room.settled()
        yield room
