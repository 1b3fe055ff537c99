"""Opens the web pages."""

import asyncio
import contextlib
import platform
from collections.abc import AsyncIterator
from typing import NoReturn

import msgspec

from agent import __version__
from agent.app.front import Front
from agent.app.series import series_of
from agent.app.watching import WebDoor, WebSubjects
from agent.codec.checkpoint import VERSION
from agent.codec.status_document import NodeStatus, SettingStatus
from agent.core.errors import PermissionFault
from agent.core.health.maintenance import GpuRelease
from agent.core.health.news import holders
from agent.host.clock import SystemClock
from agent.settings.fields import Setting
from agent.settings.sections import Settings
from agent.web.api import Actions, BuildInfo, Probes, ReadApi, Readers
from agent.web.metrics import AgentCollector, MetricSources, MetricsPage
from agent.web.page import PageDoor
from agent.web.policy import HamiNames
from agent.web.server import Listeners, Page, WebServer, near
from agent.web.status import StatusFacts, labelled


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
        used=back.usage.containers.newest,
        past=back.usage.containers.history,
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
