"""Joins the web pages with what they show, and tells how ready the agent is."""

import asyncio
import contextlib
import platform
from functools import partial
from typing import Final

import msgspec

from agent import __version__
from agent.app.agent import NodeAgent
from agent.errors import PermissionFault
from agent.health.watch import GpuRelease
from agent.kit.timing import SystemClock, Tally
from agent.model import HamiNames, Trouble
from agent.node.findings import STANDBY, Check
from agent.reconcile import gaps
from agent.report import pods_holding
from agent.settings.schema import Settings
from agent.state import VERSION
from agent.status import NodeStatus, SettingStatus, StatusFacts, labelled
from agent.web import api, metrics, page, server

PORT: Final = "web"
SOCKET: Final = "web_socket"
"""The listeners of the web pages, by task name. Each serves and fails by itself."""


class WebDoors:
    """The web pages of the agent, or of a standby, which has no `agent`, at two listeners.

    A standby opens only the port: the unix socket belongs to the agent that serves. `standby`: why
    it waits.
    """

    def __init__(
        self, settings: Settings, standby: str = "", agent: NodeAgent | None = None
    ) -> None:
        self._settings = settings
        self._standby = standby
        self._agent = agent
        self._shut = {PORT: "", SOCKET: ""}
        """Why a listener cannot be opened; empty: it can."""

        build = api.BuildInfo(
            version=__version__, python=platform.python_version(), schema=f"state/{VERSION}"
        )
        # Who observes is beside HAMi's own plugin, which has its monitor.
        hami = HamiNames.NONE if settings.observe else settings.metric_names
        collector = metrics.AgentCollector(
            build,
            self._metric_facts,
            metrics.MetricSources if agent is None else partial(_series_of, agent),
            names_pods=settings.metric_containers,
            hami=hami,
        )
        self._pages: dict[str, server.Page] = {
            "/": page.PageDoor(self.facts, settings.web_readers).page,
            "/livez": api.livez,
            "/healthz": api.livez,
            "/readyz": partial(api.readyz, self.checks),
            "/metrics": metrics.MetricsPage(collector).page,
            "/version": build.page,
            server.PREFIX: api.ReadApi(self.facts, settings.web_readers).answer,
        }

    def checks(self) -> tuple[Check, ...]:
        """All readiness checks: first the required ones, which decide readiness."""
        agent = self._agent
        if agent is None:
            return (Check(STANDBY, ok=False, text=f"standby: {self._standby}"),)

        facts, inventory = agent.facts, agent.facts.inventory.value
        problem = agent.discovery.problem.value or ""

        # GPUs that have not answered yet; those with the same text are named together.
        named: dict[str, list[str]] = {}
        for fault in agent.keeper.left_out.value:
            if fault.trouble is Trouble.SILENT:
                named.setdefault(fault.text, []).append(fault.gpu)
        silent = "; ".join(
            f"{'GPU' if len(gpus) == 1 else 'GPUs'} {', '.join(gpus)}: {text}"
            for text, gpus in named.items()
        )

        # While no GPU has answered yet, there is no list of GPUs.
        waking = "" if inventory.gpus else silent
        is_listed = inventory.generation > 0 and not waking
        unlisted = (
            f"the driver answers; {waking}" if waking else "the driver has not been asked yet"
        )

        # Why a check fails, by its name. It passes if there is nothing to say.
        required = {
            "state": agent.state.error.value,
            "inventory": "" if is_listed else problem or unlisted,
        }
        others: dict[str, str] = {}

        if not agent.observes:
            told = agent.registration.state.value
            required |= {
                "server": "" if agent.server.endpoint else "the plugin's socket does not serve yet",
                "registered": "" if told.registered else told.text,
                "stream": "" if told.stream else told.text or "the kubelet takes no lists",
            }

        if (report := agent.report) is not None:  # plain mode needs no API server
            table, now = facts.pods.value, agent.reported.value
            if not agent.observes:
                unread = "the API server has not listed this node's pods yet"
                since = f" since {table.lost_at:%Y-%m-%d %H:%M:%S} UTC" if table.lost_at else ""
                why = f": {table.lost_reason}" if table.lost_reason else ""
                down = f"the watch of this node's pods is down{since}{why}"
                required["api_synced"] = "" if table.synced else f"{unread}{why}"
                others["api"] = f"{down}; new pods may be refused [HA-2010]" if table.stale else ""

            others["report"] = "" if now.reported else now.reason
            if agent.observes:
                pending = ", ".join(sorted(report.pending))
                others["observed"] = f"would write {pending}; the log says what" if pending else ""

        # Container runtimes do not find a GPU that is missed, though it is well.
        unserved = [gpu for gpu in inventory.gpus if not gpu.serving]
        missed = [gpu for gpu in unserved if gpu.health.serving and gpu.there and gpu.wanted]
        ill = [gpu for gpu in unserved if gpu not in missed]

        refused = "; ".join(map(str, agent.settings.faults.values()))
        withheld = "; ".join(agent.withholder.reasons.value)
        others |= {
            "settings": refused
            and f"the last good settings apply, because these are refused: {refused}",
            "driver": problem,
            "gpus": "" if inventory.gpus else "there are no GPUs to share",
            "gpus_answering": silent,
            "gpu_health": "; ".join(f"GPU {gpu.gpu.label} {gpu.unavailable_reason}" for gpu in ill),
            "cdi": "; ".join(f"GPU {gpu.gpu.label} {gpu.unavailable_reason}" for gpu in missed),
            "offer": f"no slice is on offer: {withheld}" if withheld else "",
        }

        others |= self._shut
        return tuple(
            Check(name, not text, text, required=texts is required)
            for texts in (required, others)
            for name, text in texts.items()
        )

    def facts(self) -> StatusFacts | None:
        """What all services know now, each value as it is at this moment; None for a standby."""
        agent = self._agent
        if agent is None:
            return None

        settings, facts, service = agent.found.settings, agent.facts, agent.settings
        sharing = facts.sharing.value

        about = NodeStatus(
            name=settings.node,
            version=__version__,
            started_at=agent.journal.started,
            scheduler="hami" if settings.plain is None else "none",
            resource=facts.resource.value,
            kubelet=agent.registration.state.value.text,
            observe=settings.observe,
            profiles=tuple(one.name for one in service.plan.applied(service.facts) if one.name),
            split_count=sharing.split_count,
            memory_scaling=sharing.memory_scaling,
            core_scaling=sharing.core_scaling,
        )

        def in_force() -> tuple[SettingStatus, ...]:
            values, pending = service.values, service.pending
            return tuple(
                SettingStatus(
                    key=one.field.key,
                    value=list(one.value) if isinstance(one.value, tuple) else one.value,
                    origin=one.origin,
                    pending=one.field.key in pending,
                )
                for one in values.values()
            )

        return StatusFacts(
            now=SystemClock().now(),
            about=about,
            checks=self.checks(),
            node=facts.node.value,
            inventory=facts.inventory.value,
            gone=agent.keeper.gone,
            slices=facts.slices.value,
            ledger=agent.state.ledger.value,
            newest=agent.samples.newest,
            history=agent.samples.history,
            used=agent.usage.newest,
            changes=agent.journal.changes,
            refusals=agent.journal.refusals,
            journal_since=agent.journal.since,
            settings=in_force,
            pods=facts.pods.value,
            kubelet=agent.kubelet.epoch.value,
            driver_hang=settings.health.driver_hang,
        )

    def _metric_facts(self) -> StatusFacts:
        """A standby has only the metrics about itself."""
        about = NodeStatus(name=self._settings.node)
        return self.facts() or StatusFacts(SystemClock().now(), about, self.checks())

    def open(self, door: str) -> contextlib.AbstractAsyncContextManager[object]:
        """Open one listener for a block. Only the unix socket has the actions.

        Raises PermissionFault: it cannot be bound.
        """
        if door == PORT:
            address, port = self._settings.web_address, self._settings.web_port
            return server.serve_port(self._pages, address, port, server.near(address))

        actions = None if self._agent is None else _actions(self._agent).answer
        return server.serve_socket(self._pages, self._settings.paths.run / "api.sock", actions)

    async def serve(self, door: str) -> None:
        """Serve one listener until it is cancelled. Raises PermissionFault."""
        try:
            async with self.open(door):
                self._shut[door] = ""
                await asyncio.Event().wait()
        except PermissionFault as error:
            self._shut[door] = str(error)
            raise


def _actions(agent: NodeAgent) -> api.Actions:
    health = agent.health

    async def release(name: str) -> GpuRelease | None:
        found = await health.release(name)
        ledger, pods = agent.state.ledger.value, agent.facts.pods.value
        held_by = pods_holding(ledger, found.gpus, pods) if found else ()

        return found and msgspec.structs.replace(found, held_by=held_by)

    def left_out(name: str) -> str:
        faults = agent.keeper.left_out.value
        return next((one.text for one in faults if name in {one.gpu, str(one.index)}), "")

    return api.Actions(
        health.recheck, release, lambda: labelled(agent.facts.inventory.value), left_out
    )


def _series_of(agent: NodeAgent) -> metrics.MetricSources:
    state, traffic = agent.state, agent.server.traffic
    cleared, registration, reconcile = agent.cleared, agent.registration, agent.reconcile
    clock = agent.adapters.clock
    tallies: list[Tally] = [
        agent.allocation.results,
        state.errors,
        registration.registrations,
        agent.health.xid_events,
        agent.health.transitions,
        agent.notices.unposted,
        traffic.calls,
    ]

    readings: list[metrics.Gauge] = [
        ("checkpoint_generation", "Generation of the state on disk.", lambda: state.generation),
        (
            "kubelet_stream_up",
            "1 while the kubelet receives the lists of slices.",
            lambda: float(registration.state.value.stream),
        ),
        (
            "directories_kept",
            "Directories of ended containers that the agent cannot remove.",
            lambda: cleared.value.kept,
        ),
        (
            "hook_available_bytes",
            "Free bytes of the file system of the containers' directories.",
            lambda: cleared.value.available,
        ),
        (
            "hook_available_inodes",
            "Free inodes of the same file system; infinite if it has no limit.",
            lambda: cleared.value.inodes,
        ),
        (
            "allocation_unconfirmed",
            "Answers that the kubelet has not confirmed after 60 s, without init containers.",
            lambda: gaps(state.ledger.value, clock.now())[1],
        ),
    ]

    if agent.events is not None:  # plain mode has no scheduler and no API server
        tallies += [reconcile.mismatches, *agent.api_tallies]
        readings.append(
            (
                "allocation_drifted",
                (
                    "Containers with slices of another GPU because the kubelet did not ask first, "
                    "and init containers that the kubelet does not report."
                ),
                lambda: gaps(state.ledger.value, clock.now())[0],
            )
        )
    return metrics.MetricSources(tallies, (traffic.durations, agent.allocation.waits), readings)
