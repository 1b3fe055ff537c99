"""Joins the web pages with what they show, and tells how ready the agent is."""

import asyncio
import contextlib
import enum
import platform
from collections.abc import AsyncIterator, Sequence
from typing import NoReturn

import msgspec

from agent import __version__
from agent.app.back import AgentParts
from agent.app.front import Front
from agent.app.series import series_of
from agent.errors import PermissionFault
from agent.health.news import holders
from agent.health.watch import GpuRelease
from agent.host.process import SystemClock
from agent.kit.tasks import Heartbeat
from agent.model import GpuFault, Inventory, Trouble
from agent.node.findings import STANDBY, Check
from agent.settings.schema import Setting, Settings
from agent.state import VERSION
from agent.status import NodeStatus, SettingStatus
from agent.web.api import Actions, BuildInfo, Probes, ReadApi, Readers
from agent.web.metrics import AgentCollector, MetricSources, MetricsPage
from agent.web.page import PageDoor
from agent.web.policy import HamiNames
from agent.web.server import Listeners, Page, WebServer, near
from agent.web.status import StatusFacts, labelled

# Computes the readiness checks of the agent from its cells.


class WebDoor(enum.StrEnum):
    """The listeners of the web pages, by task name. Each serves and fails by itself."""

    PORT = "web"
    SOCKET = "web_socket"


class WebSubjects(msgspec.Struct, eq=False):
    """What the web pages show; a standby has no parts. `shut`: why a listener cannot open.

    A standby opens only the port. The unix socket belongs to the agent that serves.
    """

    heartbeat: Heartbeat
    standby: str = ""
    parts: AgentParts | None = None
    shut: dict[WebDoor, str] = msgspec.field(default_factory=dict)

    def checks(self) -> tuple[Check, ...]:
        """All readiness checks."""
        if self.parts is None:
            return (Check(STANDBY, ok=False, text=f"standby: {self.standby}"),)
        return (*_checks(self.parts), *map(self._open, WebDoor))

    def _open(self, door: WebDoor) -> Check:
        text = self.shut.get(door, "")
        return Check(door.value, not text, text, required=False)


def _checks(parts: AgentParts) -> tuple[Check, ...]:
    front = parts.front
    facts, trouble = front.facts, front.settings.trouble
    writable = front.state.error.value
    problem = front.knowing.discovery.problem.value
    inventory = facts.inventory.value
    left_out = front.knowing.keeper.left_out.value
    return (
        Check("state", not writable, writable),
        _described(inventory, left_out, problem),
        *(() if parts.observe else _kubelet(front)),
        *_api(parts),
        Check("settings", not trouble, trouble, required=False),
        Check("driver", not problem, problem or "", required=False),
        Check("gpus", bool(inventory.gpus), "there are no GPUs to share", required=False),
        _answering(left_out),
        *_gpu_health(front),
        _offer(front),
    )


def _kubelet(front: Front) -> tuple[Check, ...]:
    registration = front.registration.state.value
    return (
        Check("server", bool(front.server.endpoint), "the plugin's socket does not serve yet"),
        Check("registered", registration.registered, registration.text),
        Check("stream", registration.stream, registration.text or "the kubelet takes no lists"),
    )


def _api(parts: AgentParts) -> tuple[Check, ...]:
    """The checks that need the API server; plain mode has none."""
    if parts.back.events is None:
        return ()
    table, reporting = parts.front.facts.pods.value, parts.back.checks()
    if parts.observe:
        return reporting
    return (
        Check("api_synced", table.synced, "the API server has not listed this node's pods yet"),
        Check("api", not table.stale, "the watch of this node's pods is down", required=False),
        *reporting,
    )


def _described(inventory: Inventory, left_out: Sequence[GpuFault], problem: str | None) -> Check:
    """Whether there is a list of GPUs. While no GPU has answered yet, there is none."""
    waking = "" if inventory.gpus else _waking(left_out)
    text = f"the driver answers; {waking}" if waking else "the driver has not been asked yet"
    return Check("inventory", inventory.generation > 0 and not waking, problem or text)


def _waking(left_out: Sequence[GpuFault]) -> str:
    """The GPUs that have not answered yet. GPUs with the same text are named together."""
    named: dict[str, list[str]] = {}
    for fault in left_out:
        if fault.trouble is Trouble.SILENT:
            named.setdefault(fault.text, []).append(fault.gpu)
    return "; ".join(
        f"{'GPU' if len(gpus) == 1 else 'GPUs'} {', '.join(gpus)}: {text}"
        for text, gpus in named.items()
    )


def _answering(left_out: Sequence[GpuFault]) -> Check:
    """Whether all GPUs answer. One that still initialises is not missing and not left out."""
    text = _waking(left_out)
    return Check("gpus_answering", not text, text, required=False)


def _gpu_health(front: Front) -> tuple[Check, ...]:
    """Whether all GPUs are served, and whether container runtimes find those that are well."""
    unserved = [gpu for gpu in front.facts.inventory.value.gpus if not gpu.serving]
    missed = [gpu for gpu in unserved if gpu.health.serving and gpu.there and gpu.wanted]
    ill = [gpu for gpu in unserved if gpu not in missed]
    texts = [
        "; ".join(f"GPU {gpu.gpu.label} {gpu.plight}" for gpu in gpus) for gpus in (ill, missed)
    ]
    return tuple(
        Check(name, not text, text, required=False)
        for name, text in zip(("gpu_health", "cdi"), texts, strict=True)
    )


def _offer(front: Front) -> Check:
    reasons = front.knowing.withholder.reasons.value
    text = f"no slice is on offer: {'; '.join(reasons)}"
    return Check("offer", not reasons, text, required=False)


# Opens the web pages.


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

    def metric_facts() -> StatusFacts:
        """A standby has only the metrics about itself."""
        about = NodeStatus(name=settings.node)
        return facts() or StatusFacts(SystemClock().now(), about, watched.checks())

    def series() -> MetricSources:
        parts = watched.parts
        return series_of(parts.front, parts.back) if parts is not None else MetricSources()

    # Who observes is beside HAMi's own plugin, which has its monitor.
    hami = HamiNames.NONE if settings.observe else settings.metrics.hami
    names_pods = settings.metrics.containers
    collector = AgentCollector(build(), metric_facts, series, names_pods=names_pods, hami=hami)
    readers = Readers(settings.web.readers)
    pages: dict[str, Page] = {
        "/": PageDoor(facts, readers).page,
        "/livez": probes.livez,
        "/healthz": probes.livez,
        "/readyz": probes.readyz,
        "/metrics": MetricsPage(collector).page,
        "/version": build().page,
    }
    if door is WebDoor.PORT:
        address = settings.web.address
        listeners = Listeners(address, settings.web.port, near=near(address))
    else:
        listeners = Listeners(port=None, socket_path=settings.paths.run / "api.sock")
    api = ReadApi(facts, readers)
    actions = _actions(watched)
    async with WebServer(listeners, pages, actions.answer if actions else None, api) as server:
        yield server


async def serve_web(settings: Settings, watched: WebSubjects, door: WebDoor) -> NoReturn:
    """Serve the web pages at one listener. Raises PermissionFault."""
    try:
        async with open_web(settings, watched, door):
            watched.shut.pop(door, None)
            while True:
                await asyncio.Event().wait()
    except PermissionFault as error:
        watched.shut[door] = str(error)
        raise


def _actions(watched: WebSubjects) -> Actions | None:
    """The actions on GPUs. A standby has none."""
    parts = watched.parts
    if parts is None:
        return None
    front = parts.front
    health = front.knowing.health

    async def release(name: str) -> GpuRelease | None:
        found = await health.release(name)
        ledger, pods = front.state.ledger.value, front.facts.pods.value
        held_by = holders(ledger, found.gpus, pods) if found else ()
        return found and msgspec.structs.replace(found, held_by=held_by)

    def left_out(name: str) -> str:
        faults = front.knowing.keeper.left_out.value
        return next((one.text for one in faults if name in {one.gpu, str(one.index)}), "")

    return Actions(health.recheck, release, lambda: labelled(front.facts.inventory.value), left_out)


def status_facts(settings: Settings, watched: WebSubjects) -> StatusFacts | None:
    """What the agent knows now; None for a standby."""
    parts = watched.parts
    if parts is None:
        return None
    front, back = parts.front, parts.back
    facts, knowing = front.facts, front.knowing
    return StatusFacts(
        now=SystemClock().now(),
        about=_about(settings, front),
        checks=watched.checks(),
        node=facts.node.value,
        inventory=facts.inventory.value,
        gone=knowing.keeper.gone,
        slices=facts.slices.value,
        ledger=front.state.ledger.value,
        newest=knowing.samples.newest,
        history=knowing.samples.history,
        used=back.usage.newest,
        past=back.usage.history,
        changes=front.journal.changes,
        refusals=front.journal.refusals,
        journal_since=front.journal.since,
        settings=lambda: _settings(front),
        pods=facts.pods.value,
    )


def _about(settings: Settings, front: Front) -> NodeStatus:
    sharing = front.facts.sharing.value
    values, _ = front.settings.accepted()
    return NodeStatus(
        name=settings.node,
        version=__version__,
        started_at=front.journal.started,
        scheduler="hami" if settings.plain is None else "none",
        resource=front.facts.resource.value,
        kubelet=front.registration.state.value.text,
        observe=settings.observe,
        profiles=values.profiles,
        split_count=sharing.split_count,
        memory_scaling=sharing.memory_scaling,
        core_scaling=sharing.core_scaling,
    )


def _settings(front: Front) -> tuple[SettingStatus, ...]:
    values, late = front.settings.accepted()
    return tuple(_setting(one, pending=one.field.key in late) for one in values.values())


def _setting(setting: Setting, *, pending: bool) -> SettingStatus:
    value = setting.value
    return SettingStatus(
        key=setting.field.key,
        value=list(value) if isinstance(value, tuple) else value,
        origin=setting.origin,
        pending=pending,
    )
