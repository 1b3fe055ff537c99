"""What people and Prometheus see: readiness from the cells, pages on the web door."""

import asyncio
import contextlib
import dataclasses
import platform
from collections.abc import AsyncIterator, Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from agent import __version__
from agent.app.parts import Parts
from agent.app.series import series_of
from agent.codec.checkpoint import VERSION
from agent.core.inventory import Inventory
from agent.core.ledger import Ledger
from agent.core.readiness import Check
from agent.core.slices import SliceList
from agent.host.kube.session import KubeSession
from agent.kit.cell import Cell
from agent.settings.schema import Settings
from agent.web.metrics import AgentCollector, Facts, MetricsPage, Series
from agent.web.probes import Probes
from agent.web.server import Listeners, Page, WebServer
from agent.web.version import Build

BEAT = 1.0
"""Seconds between the loop's signs of life."""


@dataclasses.dataclass(eq=False, slots=True)
class Watched:
    """What the web door looks at; the parts appear once this agent is the one that serves."""

    standby: str = ""
    parts: Parts | None = None
    session: KubeSession | None = None
    beat: float = 0.0

    def checks(self) -> tuple[Check, ...]:
        """What readiness is made of."""
        if self.standby:
            return (Check("instance", ok=False, text=f"standby: {self.standby}"),)
        if self.parts is None:
            return (Check("state", ok=False, text="the agent is starting"),)
        return _checks(self.parts)


def _checks(parts: Parts) -> tuple[Check, ...]:
    facts, registration = parts.facts, parts.registration.state.value
    writable = parts.state.error.value
    problem = parts.knowing.discovery.problem.value
    report = facts.report.value
    table = facts.pods.value
    gpus = facts.inventory.value.gpus
    return (
        Check("state", not writable, writable),
        Check("server", bool(parts.server.endpoint), "the plugin's socket does not serve yet"),
        Check(
            "inventory",
            facts.inventory.value.generation > 0,
            problem or "the driver has not been asked yet",
        ),
        Check("registered", registration.registered, registration.text),
        Check("stream", registration.stream, registration.text or "the kubelet takes no lists"),
        Check("api_synced", table.synced, "the API server has not listed this node's pods yet"),
        Check("api", not table.stale, "the watch of this node's pods is down", required=False),
        Check("report", report.reported, report.reason, required=False),
        Check("driver", not problem, problem or "", required=False),
        Check("gpus", bool(gpus), "there are no GPUs to share", required=False),
        Check(
            "gpu_health",
            all(gpu.serving for gpu in gpus),
            "; ".join(
                f"GPU {gpu.gpu.index} is {gpu.health.condition.value}: {gpu.health.text}"
                for gpu in gpus
                if not gpu.serving
            ),
            required=False,
        ),
    )


@contextlib.asynccontextmanager
async def open_web(
    settings: Settings, watched: Watched, *, unix: bool = True
) -> AsyncIterator[WebServer]:
    """The web door; a standby leaves the unix socket to the agent that serves.

    Raises PermissionFault: an address cannot be bound.
    """
    loop = asyncio.get_running_loop()
    watched.beat = loop.time()
    probes = Probes(
        heartbeat_age=lambda: loop.time() - watched.beat,
        ended=tuple,
        checks=watched.checks,
    )
    metrics = MetricsPage(_AgentMetrics(watched))
    pages: dict[str, Page] = {
        "/livez": probes.livez,
        "/healthz": probes.livez,
        "/readyz": probes.readyz,
        "/version": _build().page,
        "/metrics": metrics.page,
    }
    listeners = Listeners(
        settings.web.address,
        settings.web.port,
        settings.paths.run / "api.sock" if unix else None,
    )
    async with WebServer(listeners, pages) as server, asyncio.TaskGroup() as group:
        beating = group.create_task(_beat(watched))
        try:
            yield server
        finally:
            beating.cancel()


class _AgentMetrics(Collector):
    """The agent's series once its parts exist; a standby has only what it says of itself."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    @override
    def collect(self) -> Iterator[Metric]:
        """All families, each once."""
        yield from self._collector().collect()

    def _collector(self) -> AgentCollector:
        watched = self._watched
        parts, session = watched.parts, watched.session
        if parts is None or session is None:
            empty = Facts(Cell(Inventory()), Cell(SliceList()), Cell(Ledger()))
            return AgentCollector(_build(), empty, watched.checks, Series())
        facts = Facts(parts.facts.inventory, parts.facts.slices, parts.state.ledger)
        return AgentCollector(_build(), facts, watched.checks, series_of(parts, session))


def _build() -> Build:
    return Build(version=__version__, python=platform.python_version(), schema=f"state/{VERSION}")


async def _beat(watched: Watched) -> None:
    loop = asyncio.get_running_loop()
    while True:
        watched.beat = loop.time()
        await asyncio.sleep(BEAT)
