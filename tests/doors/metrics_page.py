"""A metrics page over given facts, for tests."""

from prometheus_client.parser import text_string_to_metric_families

from agent.core.inventory.gpu import GpuSample, Sampled
from agent.core.inventory.slices import SliceList
from agent.core.state.ledger import Ledger
from agent.core.usage.region import MemoryUse, RegionState
from agent.core.usage.use import ContainerGpuUse, ContainerUse
from agent.kit.cell import Cell
from agent.web.api import BuildInfo
from agent.web.metrics import AgentCollector, MetricCells, MetricSources, MetricsPage
from tests.builders import NOON, a_uuid, an_inventory
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


async def series(cells, beginning):
    """Name, label values (sorted by label) and value of all series that begin so."""
    text, _ = await scrape(cells)
    return {
        (sample.name.removeprefix(beginning), *(v for _, v in sorted(sample.labels.items()))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(beginning)
    }


def sampled(**values):
    """The newest samples: only the first GPU has one."""
    found = Sampled(NOON, GpuSample(a_uuid(0), **values))
    return lambda uuid: found if uuid == a_uuid(0) else None


def a_gpu_use(index=0, *, uuid=None, total=0, memory_limit=0, sm_percent=0, core_limit=0):
    """What a container uses of one GPU."""
    name = a_uuid(index) if uuid is None else uuid
    return ContainerGpuUse(
        index, name, memory_limit, core_limit, MemoryUse(total=total), sm_percent
    )


def a_use(*gpus, **more):
    """A container's region at noon."""
    return ContainerUse(NOON, RegionState.READABLE, gpus, **more)


def uses(use):
    """Every container uses that."""
    return lambda _: use
