"""Opens the web pages. Imported late: aiohttp takes longer to load than a registration takes."""

import contextlib
import platform
from collections.abc import AsyncIterator, Iterator
from functools import partial

import msgspec
from prometheus_client import Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from agent import __version__
from agent.app.series import series_of
from agent.app.status import status_facts
from agent.app.watching import WebDoor, WebSubjects
from agent.codec.checkpoint import VERSION
from agent.core.health.maintenance import GpuRelease
from agent.core.health.news import holders
from agent.core.inventory.inventory import Inventory
from agent.core.inventory.slices import SliceList
from agent.core.state.ledger import Ledger
from agent.kit.cell import Cell
from agent.settings.sections import Settings
from agent.web.api import Actions, BuildInfo, Probes, ReadApi, Readers, recheck_act, release_act
from agent.web.hami import HamiSettings
from agent.web.metrics import AgentCollector, MetricCells, MetricSources, MetricsPage
from agent.web.page import PageDoor
from agent.web.policy import HamiNames
from agent.web.server import Listeners, Page, WebServer, near
from agent.web.status import StatusFacts, labelled


class _AgentMetrics(Collector):
    """The agent's metrics. A standby has only those about itself."""

    def __init__(self, watched: WebSubjects, settings: Settings) -> None:
        self._watched = watched
        self._names_pods = settings.metrics.containers
        # Who observes is beside HAMi's own plugin, which has its monitor.
        names = HamiNames.NONE if settings.observe else settings.metrics.hami
        self._hami = HamiSettings(names, settings.node)

    @override
    def collect(self) -> Iterator[Metric]:
        """All metric families, each once."""
        yield from self._collector().collect()

    def _collector(self) -> AgentCollector:
        watched = self._watched
        parts = watched.parts
        back = parts.back.value if parts else None
        if parts is None or back is None:
            empty = MetricCells(Cell(Inventory()), Cell(SliceList()), Cell(Ledger()))
            return AgentCollector(build(), empty, watched.checks, MetricSources())
        front = parts.front
        facts = MetricCells(
            front.facts.inventory,
            front.facts.slices,
            front.state.ledger,
            front.knowing.samples.newest,
            lambda: front.knowing.keeper.gone,
            names_pods=self._names_pods,
            use=back.usage.containers.newest,
            hami=self._hami,
            pods=front.facts.pods,
        )
        return AgentCollector(build(), facts, watched.checks, series_of(front, back))


def build() -> BuildInfo:
    """The versions of the agent, of Python and of the state's schema."""
    return BuildInfo(
        version=__version__, python=platform.python_version(), schema=f"state/{VERSION}"
    )


@contextlib.asynccontextmanager
async def open_web(
    settings: Settings, watched: WebSubjects, door: WebDoor
) -> AsyncIterator[WebServer]:
    """Open one listener of the web pages. Only the unix socket has the actions.

    Raises PermissionFault: it cannot be bound.
    """
    probes = Probes(heartbeat_age=watched.heartbeat.age, checks=watched.checks)

    def facts() -> StatusFacts | None:
        return status_facts(settings, watched)

    readers = Readers(settings.web.readers)
    pages: dict[str, Page] = {
        "/": PageDoor(facts, readers).page,
        "/livez": probes.livez,
        "/healthz": probes.livez,
        "/readyz": probes.readyz,
        "/metrics": MetricsPage(_AgentMetrics(watched, settings)).page,
        "/version": build().page,
    }
    if door is WebDoor.PORT:
        address = settings.web.address
        listeners = Listeners(address, settings.web.port, near=near(address))
    else:
        listeners = Listeners(port=None, socket_path=settings.paths.run / "api.sock")
    api = ReadApi(facts, readers)
    async with WebServer(listeners, pages, _actions(watched), api) as server:
        yield server


def _actions(watched: WebSubjects) -> Actions | None:
    """The actions on GPUs. A standby has none."""
    parts = watched.parts
    if parts is None:
        return None
    front = parts.front
    health, ledger = front.knowing.health, front.state.ledger
    recheck = health.recheck

    def known() -> list[str]:
        return [label for label, _ in labelled(front.facts.inventory.value)]

    def uuids() -> list[str]:
        return [gpu.uuid for gpu in front.facts.inventory.value.gpus]

    def left_out(name: str) -> str:
        for fault in front.knowing.keeper.left_out.value:
            if name in {fault.gpu, str(fault.index)}:
                return fault.text
        return ""

    async def release(name: str) -> GpuRelease | None:
        found = await health.release(name)
        pods = front.facts.pods.value
        held_by = holders(ledger.value, found.gpus, pods) if found else ()
        return found and msgspec.structs.replace(found, held_by=held_by)

    return Actions(
        {
            "recheck": recheck_act(recheck, known, uuids, left_out),
            "release": release_act(release, known, left_out),
            "was-reset": recheck_act(partial(recheck, was_reset=True), known, uuids, left_out),
        }
    )
