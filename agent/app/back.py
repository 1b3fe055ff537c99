"""Joins what answers the kubelet and what follows: with the API server, or in plain mode."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import msgspec

from agent.allocate.inquiry import AllocationPeers, AllocationViews, SchedulerShares
from agent.allocate.plain import KubeletPeers, KubeletShares, KubeletViews, PlainSettings
from agent.allocate.service import Allocation
from agent.app.adapters import Adapters
from agent.app.front import Front
from agent.cluster import PodTable
from agent.errors import SettingsError
from agent.host.node import CgroupContainers
from agent.kit.cell import Cell
from agent.kit.running_time import Lag
from agent.kube.api import KubeNode, KubeNodeStatus, KubePods, ObservedNode, ObservedPods
from agent.kube.client import Connection, KubeSession
from agent.kube.events import EventPoster
from agent.kube.watches import NodeWatch, PodWatch
from agent.ledger import Effect
from agent.node.findings import Check
from agent.ports import NodeApi, PodApi, Witness
from agent.reconcile.rules import judge_by_kubelet, judge_by_scheduler
from agent.reconcile.service import Reconcile, ReconcilePeers, ReconcileRule, ReconcileViews, unread
from agent.regions import ContainerProcesses, HostRegions
from agent.report import Announcer, GpuCondition, NoticeLog, ReportCells, Reporter, ReportState
from agent.settings.sections import Settings
from agent.settle import Outbox, OutboxViews, Settlement
from agent.usage import ContainerUsage, MemoryPressure
from agent.witness import KubeletRecordsFile, PodResourcesWitness

OPEN_DEADLINE = 2.0
"""Seconds that a start waits for the API client's import and its credentials."""

Run = Callable[[], Awaitable[None]]


class UsageServices(msgspec.Struct, frozen=True):
    """The services that read and write HAMi-core's regions."""

    containers: ContainerUsage
    pressure: MemoryPressure

    @property
    def runs(self) -> Mapping[str, Run]:
        """Their standing activities by task name."""
        return {"usage": self.containers.run, "pressure": self.pressure.run}


class ApiServer(msgspec.Struct, frozen=True):
    """Clients of the API server and of the kubelet."""

    session: KubeSession
    events: EventPoster
    node: NodeApi
    pods: PodApi
    witness: Witness
    records: KubeletRecordsFile


class Back(msgspec.Struct, frozen=True):
    """Watches of the API server, answers, and the services that reconcile."""

    api: ApiServer
    node: NodeWatch
    pods: PodWatch
    allocation: Allocation
    report: Reporter
    report_state: Cell[ReportState]
    outbox: Outbox
    settlement: Settlement
    source: SchedulerShares
    reconcile: Reconcile
    announcer: Announcer
    condition: GpuCondition
    usage: UsageServices

    @property
    def runs(self) -> Mapping[str, Run]:
        """Its standing activities by task name."""
        return {
            "node": self.node.run,
            "pods": self.pods.run,
            "kubelet_start": self.source.run,
            "reconcile": self.reconcile.run,
            "settlement": self.settlement.run,
            "outbox": self.outbox.run,
            "announcer": self.announcer.run,
            "condition": self.condition.run,
            "report": self.report.run,
            **self.usage.runs,
        }

    def checks(self) -> tuple[Check, ...]:
        """The readiness checks of the report."""
        state, node = self.report_state.value, self.api.node
        report = Check("report", state.reported, state.reason, required=False)
        if not isinstance(node, ObservedNode):
            return (report,)
        text = f"would write {', '.join(sorted(node.pending))}; the log says what"
        return report, Check("observed", not node.pending, text, required=False)


class PlainBack(msgspec.Struct, frozen=True):
    """The services of plain mode: answers, and the reconcile with the kubelet."""

    allocation: Allocation
    reconcile: Reconcile
    announcer: NoticeLog
    usage: UsageServices

    @property
    def runs(self) -> Mapping[str, Run]:
        """Its standing activities by task name."""
        return {
            "reconcile": self.reconcile.run,
            "announcer": self.announcer.run,
            **self.usage.runs,
        }


@contextlib.asynccontextmanager
async def open_back(
    settings: Settings, connection: Connection, adapters: Adapters, front: Front
) -> AsyncIterator[Back]:
    """Open its adapters and join its services; close all at the end."""
    paths = settings.paths
    async with contextlib.AsyncExitStack() as stack:
        session = KubeSession(connection, adapters.random)
        stack.push_async_callback(session.close)
        events = EventPoster(session, settings.node, adapters.clock)
        witness = PodResourcesWitness(paths.pod_resources_socket)
        stack.callback(witness.close)
        api = ApiServer(
            session=session,
            events=events,
            node=KubeNode(session, settings.node),
            pods=KubePods(session, settings.node, settings.sharing.resource, events),
            witness=witness,
            records=KubeletRecordsFile(paths.plugins, adapters.worker),
        )
        if settings.observe:
            api = msgspec.structs.replace(
                api, node=ObservedNode(api.node), pods=ObservedPods(api.pods)
            )
        # Before the first answer: its LIST has no time to load the client. The watches report a bad
        # connection and try again.
        with contextlib.suppress(SettingsError, TimeoutError):
            async with Lag().within(OPEN_DEADLINE):
                await session.open()
        yield _join(settings, adapters, front, api)


def _join(settings: Settings, adapters: Adapters, front: Front, api: ApiServer) -> Back:
    facts, state, clock = front.facts, front.state, adapters.clock
    node = NodeWatch(api.node, facts.node, adapters.random)
    pods = PodWatch(api.pods, facts.pods, clock, adapters.random, facts.resource)
    source = _source(settings, adapters, front, api, pods, node)
    report_state = Cell(ReportState())
    owed: Cell[tuple[Effect, ...]] = Cell(())
    return Back(
        api=api,
        node=node,
        pods=pods,
        allocation=Allocation(
            source, state.commit, adapters.hooks, front.notices.say, front.refused
        ),
        report=Reporter(
            api.node,
            ReportCells(facts.inventory, facts.node, node.returns, facts.report, report_state),
            node.saw,
            front.notices.say,
            clock,
            adapters.random,
        ),
        report_state=report_state,
        outbox=Outbox(
            views=OutboxViews(state.ledger, facts.pods, owed, facts.outlived),
            nodes=api.node,
            pods=api.pods,
            commit=state.commit,
            clock=clock,
            random=adapters.random,
        ),
        settlement=Settlement(
            pods=facts.pods,
            node=facts.node,
            ledger=state.ledger,
            owed=owed,
            clock=clock,
        ),
        source=source,
        reconcile=_reconcile(adapters, front, api, source),
        announcer=Announcer(api.pods, front.notices),
        condition=GpuCondition(
            KubeNodeStatus(api.session, settings.node) if settings.node_condition else None,
            facts.inventory,
            clock,
        ),
        usage=_join_usage(settings, adapters, front),
    )


def _source(
    settings: Settings,
    adapters: Adapters,
    front: Front,
    api: ApiServer,
    pods: PodWatch,
    node: NodeWatch,
) -> SchedulerShares:
    facts, knowing = front.facts, front.knowing
    return SchedulerShares(
        AllocationViews(
            facts.pods,
            facts.node,
            facts.inventory,
            front.state.ledger,
            facts.outlived,
            facts.match,
            facts.edits,
            knowing.recent.greatest,
        ),
        AllocationPeers(
            witness=api.witness,
            records=api.records,
            containers=CgroupContainers(settings.paths.cgroup, adapters.worker),
            hooks=adapters.hooks,
            refresh=pods.refresh,
            look_at_pod=pods.look,
            look_at_node=node.refresh,
            epoch=knowing.kubelet.now,
            streams=front.server.traffic.streams,
            clock=adapters.clock,
            look=node.look,
            lag=front.allocator.lag,
        ),
    )


def _reconcile(
    adapters: Adapters, front: Front, api: ApiServer, source: SchedulerShares
) -> Reconcile:
    facts, state = front.facts, front.state
    return Reconcile(
        views=ReconcileViews(
            facts.pods,
            state.ledger,
            front.knowing.kubelet.epoch,
            source.calls.taken,
            front.endpoint.rivals.gone,
        ),
        peers=ReconcilePeers(
            witness=api.witness,
            records=api.records,
            hooks=adapters.hooks,
            clock=adapters.clock,
            calls=front.allocator.calls,
        ),
        rule=ReconcileRule(judge_by_scheduler, lambda: facts.resource.value, source.adopt),
        commit=state.commit,
    )


@contextlib.asynccontextmanager
async def open_plain(
    settings: Settings, plain: PlainSettings, adapters: Adapters, front: Front
) -> AsyncIterator[PlainBack]:
    """Open the adapters of plain mode and join its services; close them at the end."""
    witness = PodResourcesWitness(settings.paths.pod_resources_socket)
    records = KubeletRecordsFile(settings.paths.plugins, adapters.worker)
    facts = front.facts
    source = KubeletShares(
        KubeletViews(facts.inventory, front.state.ledger, facts.edits, front.knowing.kubelet.now),
        KubeletPeers(records, adapters.hooks, adapters.clock, adapters.random, front.allocator.lag),
        plain,
    )
    reconcile = Reconcile(
        views=ReconcileViews(
            Cell(PodTable(synced=True)),
            front.state.ledger,
            front.knowing.kubelet.epoch,
            source.calls.taken,
            front.endpoint.rivals.gone,
        ),
        peers=ReconcilePeers(
            witness, records, adapters.hooks, adapters.clock, front.allocator.calls
        ),
        rule=ReconcileRule(
            judge_by_kubelet,
            resource=lambda: facts.resource.value,
            adopt=unread,
            within=None,
            sweeps=False,
        ),
        commit=front.state.commit,
    )
    with contextlib.closing(witness):
        yield PlainBack(
            Allocation(
                source, front.state.commit, adapters.hooks, front.notices.say, front.refused
            ),
            reconcile,
            NoticeLog(front.notices),
            _join_usage(settings, adapters, front),
        )


def _join_usage(settings: Settings, adapters: Adapters, front: Front) -> UsageServices:
    """Join what is known about the use of containers: samples, and the Event at a limit."""
    facts, state, paths = front.facts, front.state, settings.paths
    regions = HostRegions(paths.hook, adapters.regions, ContainerProcesses(paths.cgroup))
    containers = ContainerUsage(
        regions,
        state.ledger,
        facts.pods,
        facts.inventory,
        adapters.clock,
        switches=settings.feedback and not settings.observe,
        observes=settings.observe,
    )
    return UsageServices(
        containers=containers,
        pressure=MemoryPressure(
            containers.newest, state.ledger, facts.inventory, front.notices.say
        ),
    )
