"""Joins the web pages with what they show, tells how ready the agent is, and acts on GPUs."""

import asyncio
import contextlib
import os
import re
from collections.abc import Mapping
from functools import partial
from typing import Final

import msgspec
import structlog
from aiohttp import web

from agent import __version__
from agent.app.agent import NodeAgent
from agent.errors import PermissionFault, cap
from agent.hami.annotations import encode_stamp
from agent.health.watch import ALL, Recheck
from agent.kit.tasks import Allowance
from agent.kit.timing import SystemClock, Tally
from agent.kubelet.door import peer_uid
from agent.model import NO_INDEX, WITHHELD, HamiNames, Trouble
from agent.node import STANDBY, Check
from agent.report import pods_holding
from agent.settings.schema import Settings
from agent.status import API_VERSION, NodeStatus, SettingStatus, StatusFacts, gpu_labels
from agent.web import metrics, server

log = structlog.get_logger(__name__)

PORT: Final = "web"
SOCKET: Final = "web_socket"
"""The listeners of the web pages, by task name. Each serves and fails by itself."""


class WebDoors:
    """The web pages of the agent, or of a standby, which has no `agent` and opens only the port.

    `standby`: why it waits.
    """

    def __init__(
        self, settings: Settings, standby: str = "", agent: NodeAgent | None = None
    ) -> None:
        self._settings = settings
        self._standby = standby
        self._agent = agent
        self._shut = {PORT: "", SOCKET: ""}
        """Why a listener cannot be opened; empty: it can."""

        # Who observes is beside HAMi's own plugin, which has its monitor.
        hami: HamiNames = "none" if settings.observe else settings.metric_names
        services = _services_of(agent) if agent else ((), (), ())
        collector = metrics.AgentCollector(
            self.facts, services, names_pods=settings.metric_containers, hami=hami
        )
        read: dict[str, server.Page] = dict.fromkeys(server.READ, server.stands_by)
        if agent is not None:
            read = server.reading_pages(self.facts, settings.web_readers)

        self._pages: dict[str, server.Page] = {
            "/livez": server.livez,
            "/healthz": server.livez,
            "/readyz": partial(server.readyz, self.checks),
            "/metrics": metrics.metrics_page(collector),
            server.RUNBOOK: server.runbook_page,
            **read,
        }

    def checks(self) -> tuple[Check, ...]:
        """All readiness checks: first the required ones, which decide readiness."""
        agent = self._agent
        if agent is None:
            return (Check(STANDBY, ok=False, text=f"standby: {self._standby}"),)

        facts, inventory = agent.facts, agent.facts.inventory.value
        problem = agent.discovery.problem.value or ""

        # GPUs that have not answered yet; those with the same text are named together.
        waking = [one for one in agent.keeper.left_out.value if one.trouble is Trouble.SILENT]
        named = {one.text: [gpu.title for gpu in waking if gpu.text == one.text] for one in waking}
        silent = "; ".join(f"{', '.join(gpus)}: {text}" for text, gpus in named.items())

        # While no GPU has answered yet, there is no list of GPUs.
        unlisted = problem or "the driver has not been asked yet"
        if silent and not inventory.gpus:
            unlisted = problem or f"the driver answers; {silent}"
        elif inventory.generation > 0:
            unlisted = ""

        # Why a check fails, by its name. It passes if there is nothing to say.
        required = {"state": agent.state.error.value, "inventory": unlisted}
        others: dict[str, str] = {}

        if not agent.observes:
            told, streams = agent.registration.state.value, agent.server.streams.value
            required |= {
                "server": "" if agent.server.endpoint else "the plugin's socket does not serve yet",
                "registered": "" if told.registered else told.text,
                "stream": "" if streams > 0 else told.text or "the kubelet takes no lists",
            }

        if (report := agent.report) is not None:  # plain mode needs no API server
            if not agent.observes:
                table = facts.pods.value
                unread = "the API server has not listed this node's pods yet"
                since = f" since {table.lost_at:%Y-%m-%d %H:%M:%S} UTC" if table.lost_at else ""
                why = f": {table.lost_reason}" if table.lost_reason else ""
                down = f"the watch of this node's pods is down{since}{why}"
                required["api_synced"] = "" if table.synced else f"{unread}{why}"
                others["api"] = f"{down}; new pods may be refused [HA-2010]" if table.stale else ""

            others["report"] = report.unreported.value
            if agent.observes:
                pending = ", ".join(sorted(report.pending))
                others["observed"] = f"would write {pending}; the log says what" if pending else ""

        # Container runtimes do not find a GPU that is missed, though it is well.
        said: dict[bool, list[str]] = {False: [], True: []}
        for gpu in (gpu for gpu in inventory.gpus if not gpu.serving):
            is_missed = gpu.health.serving and gpu.there and gpu.wanted
            said[is_missed].append(f"{gpu.gpu.title} {gpu.unavailable_reason}")

        kept = "the last good settings apply, because these are refused"
        refused, withheld = agent.settings.fault, "; ".join(agent.withholder.reasons.value)
        others |= {
            "settings": f"{kept}: {refused}" if refused else "",
            "driver": problem,
            "gpus": "" if inventory.gpus else "there are no GPUs to share",
            "gpus_answering": silent,
            "gpu_health": "; ".join(said[False]),
            "cdi": "; ".join(said[True]),
            "offer": WITHHELD + withheld if withheld else "",
        }

        others |= self._shut
        return tuple(
            Check(name, not text, text, required=texts is required)
            for texts in (required, others)
            for name, text in texts.items()
        )

    def facts(self) -> StatusFacts:
        """What all services know now, each value as it is at this moment."""
        agent, now = self._agent, SystemClock().now()
        if agent is None:
            about = NodeStatus(name=self._settings.node, version=__version__)
            return StatusFacts(now, about, self.checks())

        settings, facts, service = agent.found.settings, agent.facts, agent.settings
        journal, sharing = agent.journal, facts.sharing.value
        about = NodeStatus(
            name=settings.node,
            version=__version__,
            started_at=journal.started,
            scheduler="hami" if settings.plain is None else "none",
            resource=facts.resource.value,
            kubelet=agent.registration.state.value.text,
            observe=settings.observe,
            profiles=service.profiles,
            split_count=sharing.split_count,
            memory_scaling=sharing.memory_scaling,
            core_scaling=sharing.core_scaling,
        )

        return StatusFacts(
            now=now,
            about=about,
            checks=self.checks(),
            node=facts.node.value,
            inventory=facts.inventory.value,
            slices=facts.slices.value,
            ledger=agent.state.ledger.value,
            newest=agent.samples.newest,
            used=agent.usage.newest,
            # Called for what people read alone: no metric tells what happened.
            changes=lambda: journal.recent(journal.changes),
            refusals=lambda: journal.recent(journal.refusals),
            journal_since=lambda: journal.since,
            settings=lambda: tuple(
                SettingStatus(key, one.value, one.origin, key in service.pending)
                for key, one in service.values.items()
            ),
            pods=facts.pods.value,
            kubelet=agent.kubelet.epoch.value,
            health=settings.health,
        )

    def open(self, door: str) -> contextlib.AbstractAsyncContextManager[object]:
        """Open one listener for a block. Only the unix socket has the actions.

        Raises PermissionFault: it cannot be bound.
        """
        if door == PORT:
            address, port = self._settings.web_address, self._settings.web_port
            return server.serve_port(self._pages, address, port, server.near(address))

        actions = None if self._agent is None else GpuActions(self._agent).answer
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


# What root may do to GPUs by the unix socket.

ACTIONS: Final = ("recheck", "release", "was-reset")
ACTION: Final = re.compile(rf"/api/v1/gpus/([^/:]{{1,64}}):({'|'.join(ACTIONS)})")
"""The path of an action: the name of a GPU (index, UUID or `all`), and what to do."""


class GpuActions:
    """Answers POST for root and the agent's own user; others are refused."""

    def __init__(self, agent: NodeAgent) -> None:
        self._agent = agent
        self._refused = Allowance(1, server.TELL_PERIOD)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Do the action, or answer why not."""
        match = ACTION.fullmatch(request.path)
        if match is None:
            paths = [f"/api/v1/gpus/GPU:{name}" for name in ACTIONS]
            return server.plain(404, f"No such action. There is: {' '.join(paths)}")

        asked = {"path": request.path, "uid": peer_uid(request.transport)}
        if asked["uid"] not in {0, os.geteuid()}:
            server.tell(self._refused, log.warning, "web.action_refused", **asked)
            return server.plain(403, "Only root may do this.")

        log.info("web.action", **asked)
        name, action = match.groups()
        if action == "release":
            return await self._release(name)

        # All at once: a probe of a GPU that hangs lasts until its deadline.
        names = gpu_labels(self._agent.facts.inventory.value) if name == ALL else [name]
        recheck = partial(self._agent.health.recheck, was_reset=action == "was-reset")
        async with asyncio.TaskGroup() as tasks:
            probes = [tasks.create_task(recheck(one)) for one in names]

        # A GPU that leaves the node meanwhile is left out.
        results = [_data(found) for probe in probes if (found := probe.result()) is not None]
        if name == ALL:
            return _json("RecheckAll", {"gpus": results})

        return _json("Recheck", results[0]) if results else self._unknown(name)

    async def _release(self, name: str) -> web.Response:
        """Release the GPU of that name, or all, and say who still has one."""
        agent, labels = self._agent, gpu_labels(self._agent.facts.inventory.value)
        if (released := await agent.health.release(name)) is not None:
            ledger, pods = agent.state.ledger.value, agent.facts.pods.value
            data = {
                "gpus": released.gpus,
                "labels": [labels.get(uuid, uuid) for uuid in released.gpus],
                "heldBy": pods_holding(ledger, released.gpus, pods),
                "released": not released.obstacle,
                "obstacle": released.obstacle,
            }
            return _json("Release", data)

        if name == ALL:
            text = "No GPU of this node is shared: stop the agent for work on one."
            return server.plain(409, text)

        whole = "`hami-agent release all` releases it too"
        return self._unknown(name, whole if labels else "stop the agent for work on it")

    def _unknown(self, name: str, way: str = "") -> web.Response:
        """Answer that no GPU is named so, or why that one is not shared and which way there is."""
        for fault in self._agent.keeper.left_out.value:
            if name in {fault.gpu, str(fault.index)}:
                why = "; ".join(filter(None, [fault.text, way]))
                return server.plain(409, f"{fault.title} is not shared: {why}.")

        known = gpu_labels(self._agent.facts.inventory.value).values()
        shared = ", ".join([*known, f"or {ALL}"]) if known else "none"
        text = f"No shared GPU is named {cap(name)}; shared GPUs: {shared}."
        return server.plain(404, text)


def _data(result: Recheck) -> Mapping[str, object]:
    health = result.after
    return {
        "gpu": None if result.gpu.index == NO_INDEX else result.gpu.index,
        "uuid": result.gpu.uuid,
        "probe": {"outcome": result.probe.outcome, "text": result.probe.text},
        "was": result.before.condition,
        "condition": health.condition,
        "since": encode_stamp(health.since),
        "serving": result.serving,
        "cause": health.cause,
        "action": health.action,
        "runbook": health.runbook,
        "text": health.text,
        "missing": result.missing,
    }


def _json(kind: str, data: Mapping[str, object]) -> web.Response:
    document = {"apiVersion": API_VERSION, "kind": kind, "data": data}
    return web.Response(body=msgspec.json.encode(document) + b"\n", content_type=server.JSON)


def _services_of(agent: NodeAgent) -> metrics.Services:
    plugin, cleared = agent.server, agent.cleared
    tallies: list[Tally] = [
        *(agent.allocation.results, agent.state.errors, agent.registration.registrations),
        *(agent.health.xid_events, agent.health.transitions, plugin.calls),
    ]
    if agent.events is not None:  # plain mode has no scheduler and no API server
        tallies += [agent.reconcile.mismatches, *agent.api_tallies]

    readings: list[metrics.Gauge] = [
        (
            "kubelet_stream_up",
            "1 while the kubelet receives the lists of slices.",
            lambda: float(plugin.streams.value > 0),
        ),
        (
            "directories_kept",
            "Directories of ended containers that the agent cannot remove.",
            lambda: cleared.value.kept,
        ),
    ]
    return tallies, (plugin.durations, agent.allocation.waits), readings
