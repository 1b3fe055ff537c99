"""Joins what answers the kubelet and what follows, and runs all standing tasks in tiers."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from agent.allocate.plain import PlainAllocation
from agent.allocate.service import Allocation, HamiAllocation
from agent.app.adapters import Adapters
from agent.app.front import Front
from agent.cluster import PodTable
from agent.errors import AgentError, DirectoryLost, SettingsError
from agent.host.node import CgroupContainers
from agent.host.process import Systemd
from agent.kit.cell import Cell, News
from agent.kit.tasks import Backoff, Task, supervise
from agent.kit.timing import Lag, Tally, until_tick
from agent.kube.api import KubeNode, KubePods
from agent.kube.client import Connection, KubeSession
from agent.kube.events import EventPoster
from agent.kube.watches import NodeWatch, PodWatch
from agent.kubelet.register import RegistrationState
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
    - `tallies`: counters of what talks to the API server.
    - `events`, `report`: None in plain mode, which has no API server.
    - `reported`: whether the API server holds the report.
    """

    allocation: Allocation
    reconcile: Reconcile
    usage: ContainerUsage
    runs: Mapping[str, Run]
    reported: Cell[ReportState]
    tallies: tuple[Tally, ...] = ()
    events: EventPoster | None = None
    report: Reporter | None = None


@contextlib.asynccontextmanager
async def open_back(
    settings: Settings, connection: Connection, adapters: Adapters, front: Front
) -> AsyncIterator[Back]:
    """Open the clients of the kubelet, and of the API server if there is a scheduler.

    Joins the services that need them; closes all at the end.
    """
    facts, state, paths = front.facts, front.state, settings.paths
    clock, chance, hooks = adapters.clock, adapters.random, adapters.hooks
    name, observes, say = settings.node, settings.observe, front.notices.say
    usage = ContainerUsage(
        HostRegions(settings.hook_path, adapters.regions, ContainerProcesses(paths.cgroup)),
        state.ledger,
        facts.pods,
        facts.inventory,
        clock,
        say,
        switches=settings.feedback and not observes,
        observes=observes,
    )
    records = KubeletRecordsFile(paths.plugins, adapters.worker)
    runs: dict[str, Run] = {"usage": usage.run}
    reported = Cell(ReportState())
    tallies: tuple[Tally, ...] = ()
    events = report = post_event = None
    async with contextlib.AsyncExitStack() as stack:
        witness = PodResourcesWitness(paths.pod_resources_socket)
        stack.callback(witness.close)
        if settings.plain is not None:
            table, adopt = Cell(PodTable(synced=True)), None
            allocation: Allocation = PlainAllocation(
                commit=state.commit,
                say=say,
                noted=front.refused,
                inventory=facts.inventory,
                ledger=state.ledger,
                edits=facts.edits,
                epoch=front.kubelet.now,
                hooks=hooks,
                clock=clock,
                chance=chance,
                settings=settings.plain,
            )
        else:
            session = KubeSession(connection, chance, observes=observes)
            stack.push_async_callback(session.close)
            # Before the first answer: its LIST has no time to load the client. The watches report a
            # bad connection and try again.
            with contextlib.suppress(SettingsError, TimeoutError):
                async with Lag().within(OPEN_DEADLINE):
                    await session.open()
            events = EventPoster(session, name, clock)
            pod_api = KubePods(session, name, settings.sharing.resource)
            node_api = KubeNode(session, name)
            node = NodeWatch(node_api, facts.node, chance)
            pods = PodWatch(pod_api, facts.pods, clock, chance, facts.resource)
            allocation = beside = HamiAllocation(
                commit=state.commit,
                say=say,
                noted=front.refused,
                pods=facts.pods,
                node=facts.node,
                inventory=facts.inventory,
                ledger=state.ledger,
                outlived=facts.outlived,
                match=facts.match,
                edits=facts.edits,
                registered=front.recent.greatest,
                witness=witness,
                records=records,
                containers=CgroupContainers(paths.cgroup, adapters.worker),
                hooks=hooks,
                refresh=pods.refresh,
                look_at_pod=pods.look,
                look_at_node=node.refresh,
                epoch=front.kubelet.now,
                streams=front.server.traffic.streams,
                clock=clock,
                look=node.look,
            )
            table, adopt = facts.pods, beside.adopt
            report = Reporter(
                node_api,
                ReportCells(facts.inventory, facts.node, node.returns, facts.report, reported),
                node.saw,
                say,
                clock,
                chance,
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
                random=chance,
            )

            async def report_labelled() -> None:
                # The Node's labels come before the first report: profiles may depend on them.
                await front.settings.labelled.wait()
                await report.run()

            post_event = None if observes else events.post
            runs |= {
                "node": node.run,
                "pods": pods.run,
                "kubelet_start": beside.run,
                "settlement": settlement.run,
                "pod_announcer": partial(pod_events.post_all, post_event),
                "report": report_labelled,
            }
            if settings.node_condition:
                write = node_api.set_condition
                runs["condition"] = partial(
                    keep_condition, write, facts.inventory, facts.node, clock
                )
            tallies = (
                node.restarts,
                pods.restarts,
                report.writes,
                report.failures,
                settlement.results,
                events.posted,
                session.requests,
                session.received,
            )
        reconcile = Reconcile(
            pods=table,
            ledger=state.ledger,
            epoch=front.kubelet.epoch,
            taken=allocation.taken,
            rivals=front.rivals.gone,
            calls=front.server.traffic.admissions,
            witness=witness,
            records=records,
            hooks=hooks,
            clock=clock,
            resource=lambda: facts.resource.value,
            adopt=adopt,
            commit=state.commit,
        )
        yield Back(
            allocation=allocation,
            reconcile=reconcile,
            usage=usage,
            runs={
                **runs,
                "reconcile": reconcile.run,
                "announcer": partial(front.notices.post_all, post_event),
            },
            reported=reported,
            tallies=tallies,
            events=events,
            report=report,
        )


# Standing tasks in tiers. The doors stop first, then what observes the host, then the state.

EXPECTED: tuple[type[Exception], ...] = (AgentError, TimeoutError, OSError)
"""Failures of the outside world, logged in one line. Any other exception is a defect."""

_LOCAL = (0.1, 0.5, 1.0, 5.0), 0.0
_DRIVER = (0.5, 1.0, 5.0, 30.0), 0.0
_WEB = (0.5, 1.0, 10.0, 30.0), 0.0
_API = (1.0, 2.0, 5.0, 15.0, 60.0), 0.3

_DELAYS: Mapping[str, tuple[tuple[float, ...], float]] = {
    "discovery": _DRIVER,
    "health": _DRIVER,
    "samples": _DRIVER,
    "node": _API,
    "pods": _API,
    "report": _API,
    "settlement": _API,
    "announcer": _API,
    "pod_announcer": _API,
    "condition": _API,
    "reconcile": ((1.0, 5.0, 15.0, 60.0), 0.0),
    "plugin": ((0.1, 0.5, 1.0, 10.0), 0.0),
    "registration": ((0.05, 0.1, 0.5, 1.0, 10.0), 0.2),
    "rival": ((0.1, 0.5, 1.0, 10.0), 0.0),
    "web": _WEB,
    "web_socket": _WEB,
}
"""Seconds before each restart of a task, the last of them repeatedly, and their jitter; _LOCAL for
all others."""

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
    front = parts.front
    runs = dict(parts.back.runs)

    async def discover() -> None:
        # The Node's labels come before the first scan: the first list may depend on them.
        await front.settings.await_labels()
        await front.discovery.run()

    facts: dict[str, Run] = {
        "settings": front.settings.run,
        "inventory": front.keeper.run,
        "left_out": front.left_out,
        "gpu_events": front.gpu_events,
        "cordons": front.cordons,
        "held": front.follow_held,
        "discovery": discover,
        "health": front.health.run,
        "samples": front.samples.run,
        "kubelet": front.kubelet.run,
        "recent": front.recent.run,
    }
    doors = {name: own[name] for name in ("notify", "web", "web_socket")}
    if "report" in runs:
        doors = {"report": runs.pop("report"), **doors}
    unsupervised: list[Task] = []
    if parts.observe:
        facts |= {name: run for name, run in runs.items() if name in OBSERVING}
    else:
        facts |= {
            "withholder": front.withholder.run,
            "clearing": front.clearing.run,
            "room": front.clearing.follow_room,
            **runs,
        }
        doors |= {
            "plugin": front.server.run,
            "registration": front.register,
            "rival": front.rivals.run,
        }
        unsupervised = [Task("mounts", own["mounts"])]

    def supervised(services: Mapping[str, Run]) -> list[Task]:
        return [
            Task(
                name,
                partial(
                    supervise, name, run, Backoff(*_DELAYS.get(name, _LOCAL), chance), EXPECTED
                ),
            )
            for name, run in services.items()
        ]

    return (
        supervised({"heartbeat": own["heartbeat"], "state": front.state.run}),
        supervised(facts),
        unsupervised + supervised(doors),
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


async def tell_systemd(notifier: Systemd, parts: AgentParts) -> None:
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
async def alive(notifier: Systemd) -> AsyncIterator[None]:
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
