"""A metrics page over given facts, for tests."""

from agent.core.inventory.slices import SliceList
from agent.core.state.ledger import Ledger
from agent.kit.cell import Cell
from agent.web.metrics import AgentCollector, MetricCells, MetricSources, MetricsPage
from agent.web.version import BuildInfo
from tests.builders import an_inventory
from tests.doors.web_client import ask

BUILD = BuildInfo(version="0.1.0", python="3.11.7", revision="abc")
OPEN = "application/openmetrics-text"


def facts(inventory=None, slices=(), rows=(), **more):
    return MetricCells(
        Cell(inventory or an_inventory(count=0)),
        Cell(SliceList(1, slices)),
        Cell(Ledger(rows)),
        **more,
    )


async def scrape(cells=None, checks=(), series=None, accept="*/*"):
    collector = AgentCollector(BUILD, cells or facts(), lambda: checks, series or MetricSources())
    page = MetricsPage(collector).page
    _, text, headers = await ask({"/metrics": page}, "/metrics", headers={"Accept": accept})
    return text, headers["Content-Type"]
