"""A reporter and the Node's view on one fake API server."""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator

from agent.codec.register import encode_register, registered, same_meaning
from agent.core.annotations import REGISTER
from agent.core.changes import NodeEvent
from agent.core.inventory import Inventory
from agent.core.pods import NodeView
from agent.kit.cell import Cell
from agent.services.node import Node
from agent.services.report import ReportCells, Reporter, ReportState
from tests.builders import an_inventory
from tests.fakes.apiserver import FakeApi


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
    state: Cell[ReportState]
    reporter: Reporter
    events: list[NodeEvent]

    async def settled(self) -> None:
        """The server holds what the inventory says, and the reporter knows it."""
        async with asyncio.timeout(3600):
            await self.node.until(lambda _: self.told(self.inventory.value))
            await self.state.until(lambda state: state.reported)

    def told(self, inventory: Inventory) -> bool:
        """The API server holds this inventory."""
        held = None if self.api.node is None else self.api.node.annotations.get(REGISTER)
        gpus = registered(inventory)
        if gpus:
            return same_meaning(encode_register(gpus), held)
        return held is not None and '"health"' not in held


@contextlib.asynccontextmanager
async def reporting(
    api: FakeApi, *, inventory: Inventory | None = None, chance: float = 0.0
) -> AsyncIterator[Reporting]:
    """Both services run while the block does."""
    found = Cell(an_inventory() if inventory is None else inventory)
    view: Cell[NodeView | None] = Cell(None)
    state = Cell(ReportState())
    events: list[NodeEvent] = []
    node = Node(api, view, Chance(chance))
    cells = ReportCells(found, view, state)
    reporter = Reporter(api, cells, node.saw, events.append, Chance(chance))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(node.run()), group.create_task(reporter.run())]
        yield Reporting(api, found, view, state, reporter, events)
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def reported() -> AsyncIterator[Reporting]:
    """A Node that holds the inventory; one write was made."""
    api = FakeApi()
    api.create_node()
    async with reporting(api) as room:
        await room.settled()
        yield room
