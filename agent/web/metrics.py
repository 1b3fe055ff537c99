"""The metrics page, which renders values in memory on request."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Metric,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from typing_extensions import override

from agent.core.allocation.room import takes_room
from agent.core.cluster.pods import PodTable
from agent.core.inventory.gpu import GpuUuid, Sampled
from agent.core.inventory.inventory import Inventory, SharedGpu
from agent.core.inventory.slices import SliceList
from agent.core.node.readiness import Check
from agent.core.state.ledger import Ledger, Row
from agent.kit.cell import Cell
from agent.kit.tally import Durations, Tally
from agent.web import aiohttp_server as web
from agent.web.containers import (
    NewestUse,
    container_families,
    limits_family,
    promised_rows,
    region_family,
    used_containers,
    used_families,
)
from agent.web.counts import counted_gpus, counters, histograms
from agent.web.gpus import gpu_families, gpu_labels, info_family, use_families
from agent.web.hami import HamiSettings, hami_families
from agent.web.version import BuildInfo

PREFIX = "hami_agent_"
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text"


class Gauge(msgspec.Struct, frozen=True):
    """A number that `read` returns. `name` is without the agent's prefix."""

    name: str
    help: str
    read: Callable[[], float]


class MetricCells(msgspec.Struct, frozen=True):
    """The values that the page reads.

    `newest` returns a GPU's last sample; `gone` the GPUs that left the inventory, the last first.
    `names_pods`: what each container was promised and uses has series. `use` returns the last
    sample of a container. `pods` tells which containers have ended: they have no series.
    """

    inventory: Cell[Inventory]
    slices: Cell[SliceList]
    ledger: Cell[Ledger]
    newest: Callable[[GpuUuid], Sampled | None] = lambda _: None
    gone: Callable[[], Sequence[SharedGpu]] = tuple
    names_pods: bool = True
    use: NewestUse = lambda _: None
    hami: HamiSettings = msgspec.field(default_factory=HamiSettings)
    pods: Cell[PodTable] = msgspec.field(default_factory=lambda: Cell(PodTable()))


class MetricSources(msgspec.Struct, frozen=True):
    """The counts and numbers of services; tallies and durations of equal name are added up."""

    tallies: Sequence[Tally] = ()
    durations: Sequence[Durations] = ()
    readings: Sequence[Gauge] = ()


class AgentCollector(Collector):
    """The agent's own series, made for every scrape."""

    def __init__(
        self,
        build: BuildInfo,
        facts: MetricCells,
        checks: Callable[[], tuple[Check, ...]],
        series: MetricSources,
    ) -> None:
        self._build = build
        self._facts = facts
        self._checks = checks
        self._series = series

    @override
    def collect(self) -> Iterator[Metric]:
        """Yield all families, each once."""
        yield self._build_info()
        yield _driver_info(self._facts.inventory.value)
        yield from _readiness(self._checks())
        facts, inventory, gone = self._facts, self._facts.inventory.value, self._facts.gone()
        ledger, pods = facts.ledger.value, facts.pods.value
        labels = gpu_labels(inventory, gone)
        running = tuple(row for row in ledger.rows if takes_room(row, pods))
        rows = running if facts.names_pods else ()
        yield info_family(PREFIX, inventory, gone, self._named(rows))
        yield from gpu_families(PREFIX, inventory, facts.slices.value, ledger, pods)
        yield from use_families(PREFIX, inventory, facts.newest)
        used = tuple(used_containers(rows, facts.use))
        if facts.names_pods:
            yield from container_families(PREFIX, inventory, rows, labels)
            yield limits_family(PREFIX, rows, pods)
            yield from used_families(PREFIX, used, labels)
        yield region_family(PREFIX, running, facts.use)
        yield from hami_families(facts.hami, self._build, (inventory, facts.newest), used)
        for reading in self._series.readings:
            yield GaugeMetricFamily(PREFIX + reading.name, reading.help, value=reading.read())
        yield from counters(PREFIX, self._series.tallies, dict(labels.items()))
        yield from histograms(PREFIX, self._series.durations)

    def _named(self, rows: Iterable[Row]) -> frozenset[str]:
        """The UUIDs of the GPUs that other series name, in the inventory or not."""
        held = (uuid for _, row in promised_rows(rows) for uuid in row.gpus)
        return counted_gpus(self._series.tallies).union(held)

    def _build_info(self) -> Metric:
        labels = ("version", "revision", "python", "profile")
        family = GaugeMetricFamily(
            PREFIX + "build_info",
            "Version and build of this agent; the value is 1.",
            labels=labels,
        )
        family.add_metric([getattr(self._build, label) for label in labels], 1)
        return family


def _driver_info(inventory: Inventory) -> Metric:
    family = GaugeMetricFamily(
        PREFIX + "driver_info", "Version of the NVIDIA driver; the value is 1.", labels=("version",)
    )
    if inventory.driver_version:
        family.add_metric([inventory.driver_version], 1)
    return family


def _readiness(checks: Iterable[Check]) -> Iterator[Metric]:
    ready = GaugeMetricFamily(
        PREFIX + "ready", "1 for each condition of readiness that holds.", labels=("condition",)
    )
    degraded = GaugeMetricFamily(
        PREFIX + "degraded", "1 for each failing check that pods do not notice.", labels=("reason",)
    )
    for check in checks:
        if check.required:
            ready.add_metric([check.name], int(check.ok))
        else:
            degraded.add_metric([check.name], int(not check.ok))
    yield ready
    yield degraded


KEPT = 0.25
"""Seconds for which a rendered page is reused. Rendering takes the loop 14 ms with 8 GPUs and
80 containers, so many requests at once would delay the kubelet."""


class MetricsPage:
    """`/metrics`: text 0.0.4, or OpenMetrics for a client that accepts it."""

    def __init__(self, collector: Collector) -> None:
        self._rendered: dict[str, tuple[float, bytes]] = {}
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def page(self, request: web.BaseRequest) -> web.Response:
        """Render the page, or reuse one of at most 0.25 s."""
        is_open = _accepts_openmetrics(request.headers.get("Accept", ""))
        form = openmetrics.CONTENT_TYPE_LATEST if is_open else TEXT
        now = asyncio.get_running_loop().time()
        until, body = self._rendered.get(form, (now, b""))
        if until <= now:
            body = self._render(is_open=is_open)
            self._rendered[form] = now + KEPT, body
        return web.Response(body=body, headers={"Content-Type": form})

    def _render(self, *, is_open: bool) -> bytes:
        if is_open:
            return openmetrics.generate_latest(self._registry)  # type: ignore[no-any-return, no-untyped-call]
        return generate_latest(self._registry)


def _accepts_openmetrics(accept: str) -> bool:
    for item in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in item.split(";"))
        if kind == OPENMETRICS:
            return not any(p.replace(" ", "") in {"q=0", "q=0.0"} for p in parameters)
    return False
