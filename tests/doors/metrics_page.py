"""A metrics page over given facts, for tests."""

import msgspec
import yaml
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from agent.kit.timing import Tally
from agent.ledger import Ledger, Row
from agent.model import GpuSample, SharedGpu, SliceGroup, SliceList
from agent.node import Check
from agent.status import NodeStatus, StatusFacts
from agent.usage import ContainerUse
from agent.web.metrics import AgentCollector, metrics_page
from tests.builders import NODE, NOON, a_uuid, an_inventory
from tests.doors.web_client import ask
from tests.recorded import FOLDER

LEFT_OUT = ("#", "process_", "python_")


def facts(inventory=None, slices=(), rows=(), **more):
    return StatusFacts(
        NOON,
        NodeStatus(name=NODE, version="0.2.0"),
        inventory=inventory or an_inventory(count=0),
        slices=SliceList(1, slices),
        ledger=Ledger(rows),
        **more,
    )


async def scrape(found=None, series=None, accept="*/*", **options):
    """The page of these facts and its content type; the options are the collector's."""
    collector = AgentCollector(lambda: found or facts(), series or ((), (), ()), **options)
    page = metrics_page(collector)
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


class MetricsContainer(msgspec.Struct):
    """One container of the node."""

    row: Row
    use: ContainerUse | None = None


class MetricsNode(msgspec.Struct):
    """A node on which there is one of each thing that a series can say. Its page is golden."""

    driver_version: str
    gpus: tuple[SharedGpu, ...]
    newest: dict[str, GpuSample]
    slices: tuple[SliceGroup, ...]
    containers: tuple[MetricsContainer, ...]
    checks: tuple[Check, ...]


TOLD = msgspec.convert(yaml.safe_load((FOLDER / "metrics.yaml").read_bytes()), MetricsNode)


def a_node() -> StatusFacts:
    """Its facts."""
    return facts(
        msgspec.structs.replace(an_inventory(gpus=TOLD.gpus), driver_version=TOLD.driver_version),
        TOLD.slices,
        tuple(one.row for one in TOLD.containers),
        newest=TOLD.newest.get,
        used={one.row.key: one.use for one in TOLD.containers}.get,
        checks=TOLD.checks,
    )


def counts():
    """What the services of that node have counted."""
    xids = Tally("xid_events_total", "XIDs.", ("gpu", "xid"))
    for uuid in (a_uuid(0), a_uuid(9), a_uuid(9), a_uuid(11), "unknown"):
        xids.add(uuid, "31")
    started = Tally("registrations_total", "Register calls.", ("trigger",), expected=[("new",)])
    for trigger in ("start", "start", 'quote " and\nline'):
        started.add(trigger)
    named: dict = {"namespace": "hami_agent", "buckets": (0.5,), "registry": None}
    waits = Histogram("rpc_duration_seconds", "Calls.", ("code",), **named)
    for seconds, code in ((0.25, "OK"), (4.0, "OK"), (1.0, "UNKNOWN")):
        waits.labels(code).observe(seconds)
    gauge = ("directories_kept", "Kept.", lambda: float("inf"))
    errors = Tally("checkpoint_errors", "Failed writes.")
    return (xids, started, errors), (waits,), (gauge,)


async def lines_of_a_node(hami="both"):
    """What a_node() shows, without the series about the process."""
    text, _ = await scrape(a_node(), counts(), hami=hami)
    return [line for line in text.splitlines() if not line.startswith(LEFT_OUT)]
