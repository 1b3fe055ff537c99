"""Joins what answers the kubelet and what follows, and runs all standing tasks in tiers."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from agent.allocate.plain import PlainAllocation, PlainSettings
from agent.allocate.service import Allocation, HamiAllocation
from agent.app.adapters import Adapters
from agent.app.front import DELAYS, EXPECTED, Front
from agent.cluster import PodTable
from agent.errors import DirectoryLost, SettingsError
from agent.host.node import CgroupContainers
from agent.kit.cell import Cell, News
from agent.kit.tasks import Backoff, Task, supervise
from agent.kit.timing import Lag, Tally, until_tick
from agent.kube.api import KubeNode, KubePods
from agent.kube.client import Connection, KubeSession
from agent.kube.events import EventPoster
from agent.kube.watches import NodeWatch, PodWatch
from agent.kubelet.register import RegistrationState
from agent.node.findings import Check
from agent.ports import ServiceNotifier
from agent.reconcile import Reconcile
from agent.regions import ContainerProcesses, HostRegions
from agent.report import NodeEventQueue, ReportCells, Reporter, ReportState, keep_condition
from agent.settings.schema import Settings
from agent.settle import Settlement
from agent.usage import ContainerUsage
from agent.witness import KubeletRecordsFile, PodResourcesWitness

OPEN_DEADLINE = 2.0
"""Seconds that a start waits for the API client's import and its credentials."""

Run = Callable[[], Awaitable[None]]


class Back(msgspec.Struct, frozen=True):
    """What answers the kubelet, and what follows from the answers.

    - `runs`: its standing activities by task name.
    - `checks`, `tallies`: readiness and counters of what talks to the API server.
    - `events`: None in plain mode, which has no API server.
    """

    allocation: Allocation
    reconcile: Reconcile
    usage: ContainerUsage
    runs: Mapping[str, Run]
    checks: Callable[[], tuple[Check, ...]] = tuple
    tallies: tuple[Tally, ...] = ()
    events: EventPoster | None = None


@contextlib.asynccontextmanager
async def open_back(
    settings: Settings, connection: Connection, adapters: Adapters, front: Front
) -> AsyncIterator[Back]:
    """Open the clients of API server and kubelet, join the services; close all at the end."""
    facts, state, clock, paths = front.facts, front.state, adapters.clock, settings.paths
    async with contextlib.AsyncExitStack() as stack:
        session = KubeSession(connection, adapters.random, observes=settings.observe)
        stack.push_async_callback(session.close)
        events = EventPoster(session, settings.node, clock)
        witness = PodResourcesWitness(paths.pod_resources_socket)
        stack.callback(witness.close)
        records = KubeletRecordsFile(paths.plugins, adapters.worker)
        resource, observes = settings.sharing.resource, settings.observe
        pod_api = KubePods(session, settings.node, resource)
        node_api = KubeNode(session, settings.node)
        # Before the first answer: its LIST has no time to load the client. The watches report a bad
        # connection and try again.
        with contextlib.suppress(SettingsError, TimeoutError):
            async with Lag().within(OPEN_DEADLINE):
                await session.open()
        node = NodeWatch(node_api, facts.node, adapters.random)
        pods = PodWatch(pod_api, facts.pods, clock, adapters.random, facts.resource)
        allocation = HamiAllocation(
            commit=state.commit,
            say=front.notices.say,
            noted=front.refused,
            pods=facts.pods,
            node=facts.node,
            inventory=facts.inventory,
            ledger=state.ledger,
            outlived=facts.outlived,
            match=facts.match,
            edits=facts.edits,
            registered=front.knowing.recent.greatest,
            witness=witness,
            records=records,
            containers=CgroupContainers(paths.cgroup, adapters.worker),
            hooks=adapters.hooks,
            refresh=pods.refresh,
            look_at_pod=pods.look,
            look_at_node=node.refresh,
            epoch=front.knowing.kubelet.now,
            streams=front.server.traffic.streams,
            clock=clock,
            look=node.look,
        )
        reconcile = Reconcile(
            pods=facts.pods,
            ledger=state.ledger,
            epoch=front.knowing.kubelet.epoch,
            taken=allocation.taken,
            rivals=front.rivals.gone,
            calls=front.server.traffic.admissions,
            witness=witness,
            records=records,
            hooks=adapters.hooks,
            clock=clock,
            resource=lambda: facts.resource.value,
            adopt=allocation.adopt,
            commit=state.commit,
        )
        reported = Cell(ReportState())
        report = Reporter(
            node_api,
            ReportCells(facts.inventory, facts.node, node.returns, facts.report, reported),
            node.saw,
            front.notices.say,
            clock,
            adapters.random,
            observes=observes,
        )
        # Beside those about the Node: Events that tenants can cause must not hide a bad GPU.
        pod_events = NodeEventQueue()
        pod_events.unposted = front.notices.unposted
        settlement = Settlement(
            pods=facts.pods,
            node=facts.node,
            ledger=state.ledger,
            outlived=facts.outlived,
            node_api=node_api,
            pod_api=pod_api,
            say=pod_events.say,
            clock=clock,
            random=adapters.random,
        )
        runs: dict[str, Run] = {}
        if settings.node_condition:
            write = node_api.set_condition
            runs["condition"] = partial(keep_condition, write, facts.inventory, facts.node, clock)
        post_event = None if observes else events.post
        usage = _join_usage(settings, adapters, front)

        async def report_labelled() -> None:
            # The Node's labels come before the first report: profiles may depend on them.
            await front.settings.labelled.wait()
            await report.run()

        def checks() -> tuple[Check, ...]:
            now = reported.value
            check = Check("report", now.reported, now.reason, required=False)
            if not observes:
                return (check,)
            text = f"would write {', '.join(sorted(report.pending))}; the log says what"
            return check, Check("observed", not report.pending, text, required=False)

        yield Back(
            allocation=allocation,
            reconcile=reconcile,
            usage=usage,
            runs=runs
            | {
                "node": node.run,
                "pods": pods.run,
                "kubelet_start": allocation.run,
                "reconcile": reconcile.run,
                "settlement": settlement.run,
                "announcer": partial(front.notices.post_all, post_event),
                "pod_announcer": partial(pod_events.post_all, post_event),
                "report": report_labelled,
                "usage": usage.run,
            },
            checks=checks,
            tallies=(
                node.restarts,
                pods.restarts,
                reconcile.mismatches,
                report.writes,
                report.failures,
                settlement.results,
                events.posted,
                session.requests,
                session.received,
            ),
            events=events,
        )


@contextlib.asynccontextmanager
async def open_plain(
    settings: Settings, plain: PlainSettings, adapters: Adapters, front: Front
) -> AsyncIterator[Back]:
    """Open the adapters of plain mode and join its services; close them at the end."""
    facts, state = front.facts, front.state
    witness = PodResourcesWitness(settings.paths.pod_resources_socket)
    records = KubeletRecordsFile(settings.paths.plugins, adapters.worker)
    allocation = PlainAllocation(
        commit=state.commit,
        say=front.notices.say,
        noted=front.refused,
        inventory=facts.inventory,
        ledger=state.ledger,
        edits=facts.edits,
        epoch=front.knowing.kubelet.now,
        hooks=adapters.hooks,
        clock=adapters.clock,
        chance=adapters.random,
        settings=plain,
    )
    reconcile = Reconcile(
        pods=Cell(PodTable(synced=True)),
        ledger=state.ledger,
        epoch=front.knowing.kubelet.epoch,
        taken=allocation.taken,
        rivals=front.rivals.gone,
        calls=front.server.traffic.admissions,
        witness=witness,
        records=records,
        hooks=adapters.hooks,
        clock=adapters.clock,
        resource=lambda: facts.resource.value,
        adopt=None,
        commit=state.commit,
    )
    usage = _join_usage(settings, adapters, front)
    with contextlib.closing(witness):
        yield Back(
            allocation=allocation,
            reconcile=reconcile,
            usage=usage,
            runs={
                "reconcile": reconcile.run,
                "announcer": partial(front.notices.post_all, None),
                "usage": usage.run,
            },
        )


def _join_usage(settings: Settings, adapters: Adapters, front: Front) -> ContainerUsage:
    facts, paths = front.facts, settings.paths
    return ContainerUsage(
        HostRegions(settings.hook_path, adapters.regions, ContainerProcesses(paths.cgroup)),
        front.state.ledger,
        facts.pods,
        facts.inventory,
        adapters.clock,
        front.notices.say,
        switches=settings.feedback and not settings.observe,
        observes=settings.observe,
    )


# Standing tasks in tiers. The doors stop first, then what observes the host, then the state.

OBSERVING = frozenset({"node", "announcer", "usage"})
"""Tasks of Back that run with `observe`: none acts on pods, locks, rows or directories."""

STATUS_PERIOD = 10.0
"""Seconds after which the status line is computed again without news."""

MEETING = 5.0
"""Seconds that READY waits for the kubelet. A silent kubelet or driver is no failed start."""


class AgentParts(msgspec.Struct, frozen=True):
    """The agent's services. `observe`: they neither register nor write."""

    front: Front
    back: Back
    observe: bool = False


def tiers(
    parts: AgentParts, own: Mapping[str, Run], chance: random.Random
) -> Sequence[Sequence[Task]]:
    """All standing tasks, the outermost tier first.

    `own`: those of the process itself. "mounts" ends the process when it fails, because this
    process never sees the new mounts; the others start again.
    """
    front, knowing = parts.front, parts.front.knowing
    runs = dict(parts.back.runs)

    async def discover() -> None:
        # The Node's labels come before the first scan: the first list may depend on them.
        await front.settings.await_labels()
        await knowing.discovery.run()

    facts: dict[str, Run] = {
        "settings": front.settings.run,
        "inventory": knowing.keeper.run,
        "left_out": knowing.left_out,
        "gpu_events": knowing.gpu_events,
        "cordons": knowing.cordons,
        "held": front.follow_held,
        "discovery": discover,
        "health": knowing.health.run,
        "samples": knowing.samples.run,
        "kubelet": knowing.kubelet.run,
        "recent": knowing.recent.run,
    }
    doors = {name: own[name] for name in ("notify", "web", "web_socket")}
    if "report" in runs:
        doors = {"report": runs.pop("report"), **doors}
    served: list[Task] = []
    if parts.observe:
        facts |= {name: run for name, run in runs.items() if name in OBSERVING}
    else:
        facts |= {
            "withholder": knowing.withholder.run,
            "clearing": knowing.clearing.run,
            "room": knowing.clearing.follow_room,
            **runs,
        }
        served = [Task("endpoint", front.serve), Task("mounts", own["mounts"])]

    def supervised(services: Mapping[str, Run]) -> list[Task]:
        return [
            Task(name, partial(supervise, name, run, Backoff(*DELAYS[name], chance), EXPECTED))
            for name, run in services.items()
        ]

    return (
        supervised({"heartbeat": own["heartbeat"], "state": front.state.run}),
        supervised(facts),
        served + supervised(doors),
    )


async def met(state: Cell[RegistrationState]) -> None:
    """Wait for the first result at the kubelet, MEETING seconds at most.

    Then the kubelet registered or refused the plugin's socket, or there is no kubelet.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MEETING):
            await state.until(lambda now: now != RegistrationState())


async def lost(
    state: Cell[RegistrationState], directory: Path, is_lost: Callable[[], bool]
) -> None:
    """Watch the kubelet's directory. Raises DirectoryLost: this process cannot write there."""
    while not is_lost():
        await News(state).wait(until_tick(STATUS_PERIOD))
    raise DirectoryLost(
        f"{directory} was created again, and this process cannot write there: restart the agent"
    )


async def tell_systemd(notifier: ServiceNotifier, parts: AgentParts) -> None:
    """Send READY after the first result at the kubelet, then each new status line."""
    front = parts.front
    if not parts.observe:
        await met(front.registration.state)
    notifier.ready()
    text = ""
    while True:
        state, listed = front.registration.state.value, front.facts.slices.value
        slices = sum(len(group.ids) for group in listed.groups if group.healthy)
        now = f"{slices} slices on offer; {state.text}"
        if parts.observe:
            now = f"observing, nothing is registered; {slices} slices would be on offer"
        if now != text:
            text = now
            notifier.status(text)
        changed = News(front.registration.state, front.facts.slices)
        await changed.wait(until_tick(STATUS_PERIOD))


@contextlib.asynccontextmanager
async def alive(notifier: ServiceNotifier) -> AsyncIterator[None]:
    """Ping systemd's watchdog while the block runs, also while a standby waits."""
    if notifier.watchdog is None:
        yield
        return
    period = notifier.watchdog.total_seconds() / 3

    async def beat() -> None:
        while True:
            notifier.alive()
            await asyncio.sleep(until_tick(period))

    async with asyncio.TaskGroup() as group:
        beating = group.create_task(beat())
        yield
        beating.cancel()
