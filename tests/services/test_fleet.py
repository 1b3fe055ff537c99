"""5,000 nodes come back to one API server without a storm; BENCHMARKS.md says what the limits are.

Up to 500 nodes run the services that talk to it while nothing runs. For 5,000 the delays alone are
drawn.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import NoReturn

import pytest

from agent import report
from agent.cluster import NodeView, PodTable
from agent.hami.annotations import ReportSettings
from agent.kit.cell import Cell
from agent.kit.tasks import Backoff
from agent.kube.client import LONGEST, SHORTEST
from agent.kube.objects import DELAYS, JITTER, SPREAD, NodeWatch, PodWatch
from agent.model import Inventory
from tests.builders import RESOURCE, an_inventory
from tests.fakes.apiserver import FakeApi
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.services.at_work import at_work

AWAY = 600.0
RETURN = 0.2
"""Requests a second and node at most, after minutes without an API server: 1,000 of 5,000 nodes."""
JOLT = 1.1
"""The same after a moment in which all watches are lost: 5,500 of 5,000 nodes."""


class CountingApi(FakeApi):
    """One node's part of the API server. `seconds` counts the requests of all by second."""

    seconds: Counter[int]

    async def _enter(self, call: str) -> None:
        self.seconds[int(asyncio.get_running_loop().time())] += 1
        await super()._enter(call)


def services(
    api: CountingApi, inventory: Cell[Inventory], chance: random.Random
) -> Iterator[Callable[[], Coroutine[object, object, None]]]:
    """Of one node, and the server, which ends each watch when its time is over."""

    async def end_in_turn() -> NoReturn:
        while True:
            await asyncio.sleep(chance.uniform(SHORTEST, LONGEST))
            api.end_watches()

    api.create_node()
    view: Cell[NodeView | None] = Cell(None)
    node = NodeWatch(api, view, chance)
    cells = report.ReportCells(inventory, view, node.returns, Cell(ReportSettings()))
    yield end_in_turn
    yield node.run
    yield PodWatch(api, Cell(PodTable()), LoopClock(), chance, Cell(RESOURCE)).run
    yield report.Reporter(api, cells, node.on_answer, lambda _: None, LoopClock(), chance).run


SLOW = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("seconds", "forgets", "news", "nodes", "most", "requests"),
    [
        pytest.param(None, False, False, 100, JOLT, 2, id="a stop"),
        pytest.param(0.01, False, False, 100, JOLT, 2, id="a cut"),
        pytest.param(0.01, True, False, 100, JOLT, 4, id="a restart"),
        pytest.param(5.0, False, True, 100, JOLT, 3, id="a restart with news"),
        pytest.param(AWAY, False, False, 500, RETURN, 3, id="an outage", marks=SLOW),
        pytest.param(AWAY, True, True, 500, RETURN, 4, id="one with news", marks=SLOW),
    ],
)
async def test_what_ends_all_watches_brings_the_nodes_back_one_after_the_other(
    seconds, forgets, news, nodes, most, requests
):
    """`most`: requests of a node in the busiest second; `requests`: in the minute after it.

    A server that is away for so long, and maybe forgets; None: it stops and hands over.
    """
    apis = [CountingApi() for _ in range(nodes)]
    inventories = [Cell(an_inventory()) for _ in apis]
    counted = CountingApi.seconds = Counter()
    pairs = zip(apis, inventories, strict=True)
    runs = (run for n, pair in enumerate(pairs) for run in services(*pair, Seeded(n)))
    async with at_work(*runs):
        await asyncio.sleep(1800)
        for inventory in inventories if news else ():
            inventory.set(an_inventory(count=1))
        for api in apis:
            api.end_watches() if seconds is None else api.begin_outage()
        await asyncio.sleep(seconds or 0)
        for api in apis:
            if forgets:
                api.forget_history()
            api.end_outage()
        counted.clear()
        await asyncio.sleep(60)

    assert max(counted.values()) <= most * nodes
    # Each minute some watches end by themselves.
    assert requests == pytest.approx(counted.total() / nodes, abs=0.5)


def test_5000_nodes_with_a_report_that_failed_come_back_below_1000_requests_a_second():
    seconds: Counter[int] = Counter()
    for number in range(5000):
        chance = Seeded(number)
        seen, listed = back_at(chance), back_at(chance)
        seconds[int(seen)] += 1
        seconds[int(listed)] += 2  # a LIST, and the watch
        seconds[int(seen + chance.uniform(0.0, report.SPREAD))] += 1

    assert 20_000 == seconds.total()
    assert max(seconds.values()) <= RETURN * 5000


def back_at(chance):
    """When a stream that broke is opened again by a server that was away, in seconds."""
    delays = Backoff(DELAYS, JITTER, chance)
    at = chance.uniform(0.0, SPREAD)
    while at < AWAY:
        at += delays.next() + chance.uniform(0.0, SPREAD)
    return at
