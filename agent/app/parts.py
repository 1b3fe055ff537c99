"""The services, joined: who reads which cell, who calls whom. No logic lives here."""

import dataclasses
from collections.abc import Iterator

from agent.app.adapters import Adapters
from agent.app.facts import Facts, new_facts
from agent.host.watch import DirectoryWatch
from agent.plugin.server import PluginServer
from agent.services.allocation.inquiry import Peers, Views
from agent.services.allocation.service import Allocation, AllocationSettings, Storage
from agent.services.announce import Announcer
from agent.services.discovery import Discovery
from agent.services.health import HealthPorts, HealthWatch
from agent.services.inventory import InventoryKeeper
from agent.services.kubelet import KubeletWatch
from agent.services.listing import Listing
from agent.services.node import Node
from agent.services.outbox import Outbox, OutboxViews
from agent.services.pods import Pods
from agent.services.recent import Recent
from agent.services.reconcile import Reconcile, ReconcilePeers, ReconcileViews
from agent.services.registration import Registration
from agent.services.report import ReportCells, Reporter
from agent.services.settlement import Settlement
from agent.services.state import Recovered, StateService
from agent.settings.schema import Settings


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """What is known of the host before anything runs."""

    boot_id: str
    recovered: Recovered


@dataclasses.dataclass(frozen=True, slots=True)
class Knowing:
    """Services that find out what is true."""

    keeper: InventoryKeeper
    listing: Listing
    discovery: Discovery
    health: HealthWatch
    node: Node
    pods: Pods
    kubelet: KubeletWatch
    recent: Recent


@dataclasses.dataclass(frozen=True, slots=True)
class Following:
    """Services that make the rest of the world agree."""

    report: Reporter
    outbox: Outbox
    settlement: Settlement
    reconcile: Reconcile
    announcer: Announcer


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """Everything that runs."""

    facts: Facts
    state: StateService
    knowing: Knowing
    following: Following
    allocation: Allocation
    server: PluginServer
    registration: Registration

    async def follow_held(self) -> None:
        """Ids in use reach the inventory, so that they stay listed."""
        async for ledger in self.state.ledger.follow():
            self.knowing.keeper.hold(ledger.held_ids())


def join(settings: Settings, adapters: Adapters, host: Host) -> Parts:
    """Build every service around its cells and ports."""
    facts = new_facts(settings.sharing, settings.edits)
    state = StateService(disk=adapters.disk, recovered=host.recovered.state, boot_id=host.boot_id)
    knowing = _knowing(settings, adapters, host, facts, state)
    allocation = _allocation(settings, adapters, facts, state, knowing)
    server = PluginServer(
        settings.paths.plugins, settings.resource, facts.slices, allocation, adapters.random
    )
    names = _Names(settings.paths.kubelet_socket.name, server)
    return Parts(
        facts=facts,
        state=state,
        knowing=knowing,
        following=_following(settings, adapters, facts, state, knowing, allocation),
        allocation=allocation,
        server=server,
        registration=Registration(
            settings.resource,
            server,
            DirectoryWatch(settings.paths.plugins, names, names.kubelet),
            adapters.registrar,
            server.traffic.streams,
            adapters.random,
        ),
    )


class _Names:
    """The names to watch in the kubelet's directory: its socket, and ours as it is now."""

    def __init__(self, kubelet: str, server: PluginServer | None = None) -> None:
        self.kubelet = kubelet
        self._server = server

    def __iter__(self) -> Iterator[str]:
        own = self._server.endpoint if self._server else ""
        return iter((self.kubelet, own) if own else (self.kubelet,))

    def __len__(self) -> int:
        return len(tuple(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in tuple(iter(self))


def _knowing(
    settings: Settings, adapters: Adapters, host: Host, facts: Facts, state: StateService
) -> Knowing:
    clock = adapters.clock
    keeper = InventoryKeeper(facts.inventory, facts.sharing, clock, state.health)
    discovery = Discovery(adapters.driver, keeper.found)
    before = host.recovered.state.boot_id
    health = HealthWatch(
        driver=adapters.driver,
        inventory=facts.inventory,
        ports=HealthPorts(judged=keeper.judged, remember=state.remember, changed=discovery.rescan),
        settings=settings.health,
        clock=clock,
        recalled=state.health,
        boot_changed=bool(before) and before != host.boot_id,
    )
    names = _Names(settings.paths.kubelet_socket.name)
    return Knowing(
        keeper=keeper,
        listing=Listing(facts.inventory, keeper.held, facts.slices),
        discovery=discovery,
        health=health,
        node=Node(adapters.node, facts.node, adapters.random),
        pods=Pods(adapters.pods, facts.pods, clock, adapters.random),
        kubelet=KubeletWatch(DirectoryWatch(settings.paths.plugins, names, names.kubelet)),
        recent=Recent(facts.inventory),
    )


def _allocation(
    settings: Settings, adapters: Adapters, facts: Facts, state: StateService, knowing: Knowing
) -> Allocation:
    return Allocation(
        views=Views(facts.pods, facts.node, facts.inventory, state.ledger, knowing.recent.greatest),
        peers=Peers(
            witness=adapters.witness,
            records=adapters.records,
            containers=adapters.containers,
            refresh=knowing.pods.refresh,
            epoch=knowing.kubelet.now,
            clock=adapters.clock,
        ),
        storage=Storage(commit=state.commit, hooks=adapters.hooks),
        settings=AllocationSettings(match=settings.match, edits=facts.edits),
    )


def _following(
    settings: Settings,
    adapters: Adapters,
    facts: Facts,
    state: StateService,
    knowing: Knowing,
    allocation: Allocation,
) -> Following:
    announcer = Announcer(adapters.pods)
    clock, commit, ledger = adapters.clock, state.commit, state.ledger
    return Following(
        announcer=announcer,
        report=Reporter(
            adapters.node,
            ReportCells(facts.inventory, facts.node, facts.report),
            knowing.node.saw,
            announcer.say,
            adapters.random,
        ),
        outbox=Outbox(
            views=OutboxViews(ledger, facts.pods),
            api=(adapters.node, adapters.pods),
            commit=commit,
            clock=clock,
            random=adapters.random,
        ),
        settlement=Settlement(
            pods=facts.pods, node=facts.node, ledger=ledger, commit=commit, clock=clock
        ),
        reconcile=Reconcile(
            views=ReconcileViews(facts.pods, ledger, knowing.kubelet.epoch, settings.resource),
            peers=ReconcilePeers(
                witness=adapters.witness,
                records=adapters.records,
                hooks=adapters.hooks,
                clock=clock,
                adopt=allocation.adopt,
            ),
            commit=commit,
        ),
    )
