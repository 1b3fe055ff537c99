"""A metrics page over given facts, for tests."""

from prometheus_client.parser import text_string_to_metric_families

from agent.hami.region import MemoryUse, RegionState
from agent.ledger import Ledger
from agent.model import GpuSample, Sampled, SliceList
from agent.status import NodeStatus, StatusFacts
from agent.usage import ContainerGpuUse, ContainerUse
from agent.web.api import BuildInfo
from agent.web.metrics import AgentCollector, MetricSources, MetricsPage
from tests.builders import NODE, NOON, a_uuid, an_inventory
from tests.doors.web_client import ask

BUILD = BuildInfo(version="0.1.0", python="3.11.7", revision="abc")
OPEN = "application/openmetrics-text"


def facts(inventory=None, slices=(), rows=(), **more):
    return StatusFacts(
        NOON,
        NodeStatus(name=NODE),
        inventory=inventory or an_inventory(count=0),
        slices=SliceList(1, slices),
        ledger=Ledger(rows),
        **more,
    )


async def scrape(found=None, series=None, accept="*/*", **options):
    """The page of these facts and its content type; the options are the collector's."""
    sources = series or MetricSources()
    collector = AgentCollector(BUILD, lambda: found or facts(), lambda: sources, **options)
    page = MetricsPage(collector).page
    _, text, headers = await ask({"/metrics": page}, "/metrics", headers={"Accept": accept})
    return text, headers["Content-Type"]


async def series(found, beginning, sources=None, **options):
    """Name, label values (sorted by label) and value of all series that begin so."""
    text, _ = await scrape(found, sources, **options)
    return {
        (sample.name.removeprefix(beginning), *(v for _, v in sorted(sample.labels.items()))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(beginning)
    }


async def samples(name, found=None, sources=None, **options):
    """Label values and value of the agent's series of that name."""
    beginning = await series(found, f"hami_agent_{name}", sources, **options)
    return {key[1:]: value for key, value in beginning.items() if not key[0]}


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
