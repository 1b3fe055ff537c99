"""Joins the web pages with what they show, and tells how ready the agent is."""

import asyncio
import contextlib
import platform
from collections.abc import AsyncIterator
from functools import partial
from typing import Final, NoReturn

import msgspec

from agent import __version__
from agent.app.back import AgentParts, Back
from agent.app.front import Front
from agent.errors import PermissionFault
from agent.health.watch import GpuRelease
from agent.host.process import SystemClock
from agent.kit.tasks import Heartbeat
from agent.kit.timing import Tally
from agent.model import HamiNames, Trouble
from agent.node.findings import STANDBY, Check
from agent.report import pods_holding
from agent.settings.schema import Settings
from agent.state import VERSION
from agent.status import NodeStatus, SettingStatus, StatusFacts, labelled
from agent.web.api import PREFIX, Actions, BuildInfo, Probes, ReadApi
from agent.web.metrics import AgentCollector, Gauge, MetricSources, MetricsPage
from agent.web.page import PageDoor
from agent.web.server import Page, near, serve_port, serve_socket

PORT: Final = "web"
SOCKET: Final = "web_socket"
"""The listeners of the web pages, by task name. Each serves and fails by itself."""


class WebSubjects(msgspec.Struct, eq=False):
    """What the web pages show; a standby has no parts. `shut`: why a listener cannot open.

    A standby opens only the port. The unix socket belongs to the agent that serves.
    """

    heartbeat: Heartbeat
    standby: str = ""
    parts: AgentParts | None = None
    shut: dict[str, str] = msgspec.field(default_factory=dict)

    def checks(self) -> tuple[Check, ...]:
        """All readiness checks."""
        if self.parts is None:
            return (Check(STANDBY, ok=False, text=f"standby: {self.standby}"),)
        doors = (
            Check(door, door not in self.shut, self.shut.get(door, ""), required=False)
            for door in (PORT, SOCKET)
        )
        return (*_checks(self.parts), *doors)


def _checks(parts: AgentParts) -> list[Check]:
    front = parts.front
    facts, trouble = front.facts, front.settings.trouble
    writable = front.state.error.value
    problem = front.discovery.problem.value
    inventory = facts.inventory.value

    # GPUs that have not answered yet; those with the same text are named together.
    named: dict[str, list[str]] = {}
    for fault in front.keeper.left_out.value:
        if fault.trouble is Trouble.SILENT:
            named.setdefault(fault.text, []).append(fault.gpu)
    silent = "; ".join(
        f"{'GPU' if len(gpus) == 1 else 'GPUs'} {', '.join(gpus)}: {text}"
        for text, gpus in named.items()
    )
    # While no GPU has answered yet, there is no list of GPUs.
    waking = "" if inventory.gpus else silent
    unlisted = f"the driver answers; {waking}" if waking else "the driver has not been asked yet"
    checks = [
        Check("state", not writable, writable),
        Check("inventory", inventory.generation > 0 and not waking, problem or unlisted),
    ]
    if not parts.observe:
        told = front.registration.state.value
        checks += [
            Check("server", bool(front.server.endpoint), "the plugin's socket does not serve yet"),
            Check("registered", told.registered, told.text),
            Check("stream", told.stream, told.text or "the kubelet takes no lists"),
        ]
    if (report := parts.back.report) is not None:  # plain mode needs no API server
        table, now = facts.pods.value, parts.back.reported.value
        if not parts.observe:
            unread = "the API server has not listed this node's pods yet"
            down = "the watch of this node's pods is down: new pods may be refused [HA-2010]"
            checks += [
                Check("api_synced", table.synced, unread),
                Check("api", not table.stale, down, required=False),
            ]
        checks.append(Check("report", now.reported, now.reason, required=False))
        if parts.observe:
            would = f"would write {', '.join(sorted(report.pending))}; the log says what"
            checks.append(Check("observed", not report.pending, would, required=False))

    # Container runtimes do not find a GPU that is missed, though it is well.
    unserved = [gpu for gpu in inventory.gpus if not gpu.serving]
    missed = [gpu for gpu in unserved if gpu.health.serving and gpu.there and gpu.wanted]
    ill = [gpu for gpu in unserved if gpu not in missed]
    withheld = "; ".join(front.withholder.reasons.value)
    texts = {
        "settings": trouble,
        "driver": problem or "",
        "gpus": "" if inventory.gpus else "there are no GPUs to share",
        "gpus_answering": silent,
        "gpu_health": "; ".join(f"GPU {gpu.gpu.label} {gpu.plight}" for gpu in ill),
        "cdi": "; ".join(f"GPU {gpu.gpu.label} {gpu.plight}" for gpu in missed),
        "offer": f"no slice is on offer: {withheld}" if withheld else "",
    }
    checks += [Check(name, not text, text, required=False) for name, text in texts.items()]
    return checks


@contextlib.asynccontextmanager
async def open_web(settings: Settings, watched: WebSubjects, door: str) -> AsyncIterator[None]:
    """Open one listener of the web pages. Only the unix socket has the actions.

    Raises PermissionFault: it cannot be bound.
    """
    build = BuildInfo(
        version=__version__, python=platform.python_version(), schema=f"state/{VERSION}"
    )
    probes = Probes(heartbeat_age=watched.heartbeat.age, checks=watched.checks)

    facts = partial(_status_facts, settings, watched)

    def metric_facts() -> StatusFacts:
        """A standby has only the metrics about itself."""
        about = NodeStatus(name=settings.node)
        return facts() or StatusFacts(SystemClock().now(), about, watched.checks())

    def series() -> MetricSources:
        parts = watched.parts
        return _series_of(parts.front, parts.back) if parts is not None else MetricSources()

    # Who observes is beside HAMi's own plugin, which has its monitor.
    hami = HamiNames.NONE if settings.observe else settings.metrics.hami
    names_pods = settings.metrics.containers
    collector = AgentCollector(build, metric_facts, series, names_pods=names_pods, hami=hami)
    pages: dict[str, Page] = {
        "/": PageDoor(facts, settings.web.readers).page,
        "/livez": probes.livez,
        "/healthz": probes.livez,
        "/readyz": probes.readyz,
        "/metrics": MetricsPage(collector).page,
        "/version": build.page,
        PREFIX: ReadApi(facts, settings.web.readers).answer,
    }
    server: contextlib.AbstractAsyncContextManager[object]
    if door == PORT:
        address = settings.web.address
        server = serve_port(pages, address, settings.web.port, near(address))
    else:
        actions = _actions(watched.parts.front).answer if watched.parts is not None else None
        server = serve_socket(pages, settings.paths.run / "api.sock", actions)
    async with server:
        yield


async def serve_web(settings: Settings, watched: WebSubjects, door: str) -> NoReturn:
    """Serve the web pages at one listener. Raises PermissionFault."""
    try:
        async with open_web(settings, watched, door):
            watched.shut.pop(door, None)
            while True:
                await asyncio.Event().wait()
    except PermissionFault as error:
        watched.shut[door] = str(error)
        raise


def _actions(front: Front) -> Actions:
    health = front.health

    async def release(name: str) -> GpuRelease | None:
        found = await health.release(name)
        ledger, pods = front.state.ledger.value, front.facts.pods.value
        held_by = pods_holding(ledger, found.gpus, pods) if found else ()
        return found and msgspec.structs.replace(found, held_by=held_by)

    def left_out(name: str) -> str:
        faults = front.keeper.left_out.value
        return next((one.text for one in faults if name in {one.gpu, str(one.index)}), "")

    return Actions(health.recheck, release, lambda: labelled(front.facts.inventory.value), left_out)


def _status_facts(settings: Settings, watched: WebSubjects) -> StatusFacts | None:
    """What the agent knows now; None for a standby."""
    parts = watched.parts
    if parts is None:
        return None
    front, back = parts.front, parts.back
    facts = front.facts
    sharing = facts.sharing.value
    about = NodeStatus(
        name=settings.node,
        version=__version__,
        started_at=front.journal.started,
        scheduler="hami" if settings.plain is None else "none",
        resource=facts.resource.value,
        kubelet=front.registration.state.value.text,
        observe=settings.observe,
        profiles=front.settings.values.profiles,
        split_count=sharing.split_count,
        memory_scaling=sharing.memory_scaling,
        core_scaling=sharing.core_scaling,
    )

    def in_force() -> tuple[SettingStatus, ...]:
        values, late = front.settings.accepted()
        return tuple(
            SettingStatus(
                key=one.field.key,
                value=list(one.value) if isinstance(one.value, tuple) else one.value,
                origin=one.origin,
                pending=one.field.key in late,
            )
            for one in values.values()
        )

    return StatusFacts(
        now=SystemClock().now(),
        about=about,
        checks=watched.checks(),
        node=facts.node.value,
        inventory=facts.inventory.value,
        gone=front.keeper.gone,
        slices=facts.slices.value,
        ledger=front.state.ledger.value,
        newest=front.samples.newest,
        history=front.samples.history,
        used=back.usage.newest,
        past=back.usage.history,
        changes=front.journal.changes,
        refusals=front.journal.refusals,
        journal_since=front.journal.since,
        settings=in_force,
        pods=facts.pods.value,
    )


def _series_of(front: Front, back: Back) -> MetricSources:
    """The counters and gauges of all services."""
    state, traffic = front.state, front.server.traffic
    clearing, registration, reconcile = front.clearing, front.registration, back.reconcile
    tallies: list[Tally] = [
        back.allocation.results,
        state.errors,
        registration.registrations,
        front.health.xid_events,
        front.health.transitions,
        front.notices.unposted,
        traffic.calls,
    ]
    readings = [
        Gauge(
            "checkpoint_generation", "Generation of the state on disk.", lambda: state.generation
        ),
        Gauge(
            "kubelet_stream_up",
            "1 while the kubelet receives the lists of slices.",
            lambda: float(registration.state.value.stream),
        ),
        Gauge(
            "directories_kept",
            "Directories of ended containers that the agent cannot remove.",
            lambda: clearing.state.value.kept,
        ),
        Gauge(
            "hook_available_bytes",
            "Free bytes of the file system of the containers' directories.",
            lambda: clearing.room.value.available,
        ),
        Gauge(
            "hook_available_inodes",
            "Free inodes of the same file system; infinite if it has no limit.",
            lambda: clearing.room.value.inodes,
        ),
        Gauge(
            "allocation_unconfirmed",
            "Answers that the kubelet has not confirmed after 60 s, without init containers.",
            lambda: reconcile.unconfirmed.value,
        ),
    ]
    if back.events is not None:  # plain mode has no scheduler and no API server
        tallies += [
            reconcile.mismatches,
            *back.tallies,
        ]
        readings.append(
            Gauge(
                "allocation_drifted",
                "Containers with slices of another GPU because the kubelet did not ask first, and "
                "init containers that the kubelet does not report.",
                lambda: reconcile.drifted.value,
            )
        )
    return MetricSources(
        tallies,
        (
            traffic.durations,
            back.allocation.waits,
        ),
        readings,
    )
