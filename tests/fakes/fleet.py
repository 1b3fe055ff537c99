"""Many nodes at one API server, each with the agent's services that talk to it while nothing runs.

Every request is counted by its second. The server is in memory, so it never slows a client down.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import NoReturn

from agent.cluster import NodeView, PodTable
from agent.hami.annotations import ReportSettings
from agent.kit.cell import Cell
from agent.kube.client import LONGEST, SHORTEST
from agent.kube.objects import NodeWatch, PodWatch
from agent.model import Inventory
from agent.report import ReportCells, Reporter
from tests.builders import RESOURCE, an_inventory
from tests.fakes.apiserver import FakeApi
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock


class CountingApi(FakeApi):
    """One Node's part of the API server. `seconds` counts the requests of all by second."""

    def __init__(self, seconds: Counter[int]) -> None:
        super().__init__()
        self._seconds = seconds

    async def _enter(self, call: str) -> None:
        self._seconds[int(asyncio.get_running_loop().time())] += 1
        await super()._enter(call)


class Fleet:
    """All nodes; made by `open_fleet`."""

    def __init__(self, apis: Sequence[CountingApi], inventories: Sequence[Cell[Inventory]]) -> None:
        self.apis = apis
        self._inventories = inventories

    def end_watches(self) -> None:
        """The server ends all watches, as when it stops, and serves on."""
        for api in self.apis:
            api.end_watches()

    def change_gpus(self) -> None:
        """Each node has something new to report."""
        for inventory in self._inventories:
            inventory.set(an_inventory(count=1))

    async def outage(self, seconds: float, *, forgets: bool = False) -> None:
        """Nobody is answered for so long; `forgets`: afterwards no watch can be continued."""
        for api in self.apis:
            api.begin_outage()
        await asyncio.sleep(seconds)
        for api in self.apis:
            if forgets:
                api.forget_history()
            api.end_outage()


@contextlib.asynccontextmanager
async def open_fleet(nodes: int, seconds: Counter[int]) -> AsyncIterator[Fleet]:
    """So many nodes, which run while the block does. Node `n` has the chance of seed `n`."""
    apis = [CountingApi(seconds) for _ in range(nodes)]
    inventories = [Cell(an_inventory()) for _ in range(nodes)]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(service)
            for number, (api, inventory) in enumerate(zip(apis, inventories, strict=True))
            for service in _services(api, inventory, Seeded(number))
        ]
        yield Fleet(apis, inventories)
        for task in tasks:
            task.cancel()


async def _end_in_turn(api: CountingApi, chance: random.Random) -> NoReturn:
    """The server ends each watch when its time is over; here both of a node together."""
    while True:
        await asyncio.sleep(chance.uniform(SHORTEST, LONGEST))
        api.end_watches()


def _services(
    api: CountingApi, inventory: Cell[Inventory], chance: random.Random
) -> Iterator[Coroutine[None, None, None]]:
    api.create_node()
    view: Cell[NodeView | None] = Cell(None)
    node = NodeWatch(api, view, chance)
    cells = ReportCells(inventory, view, node.returns, Cell(ReportSettings()))
    yield _end_in_turn(api, chance)
    yield node.run()
    yield PodWatch(api, Cell(PodTable()), LoopClock(), chance, Cell(RESOURCE)).run()
    yield Reporter(api, cells, node.on_answer, lambda _: None, LoopClock(), chance).run()
