"""Joins the front half, which runs first: state, inventory, lists and the registration.

A kubelet that has just started admits pods within 1 s. What the registration does not need is in
agent.app.back and loads later.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from agent.app.adapters import Adapters
from agent.app.endpoint import Endpoint, EndpointFacts, join_endpoint
from agent.app.facts import SharedCells, new_facts
from agent.app.late import LateAllocator
from agent.app.settings import SettingsPorts, SettingsService
from agent.app.withholding import cues_of, looks_of
from agent.core.errors import Refusal
from agent.core.inventory.condition import Health
from agent.core.inventory.gpu import GpuUuid, Scan
from agent.core.node.withholding import Withholding
from agent.core.ports import ServiceNotifier
from agent.core.state.last_good import LastGood
from agent.core.state.ledger import Row
from agent.host.watch import DirectoryWatch
from agent.plugin.registration import KubeletWatch, Registration
from agent.plugin.server import PluginServer
from agent.services.cluster.recent import RecentlyRegistered
from agent.services.health.news import GpuEvents, LeftOut
from agent.services.health.watch import HealthWatch
from agent.services.inventory.discovery import Discovery
from agent.services.inventory.listing import Listing
from agent.services.inventory.samples import Samples
from agent.services.inventory.service import InventoryKeeper
from agent.services.inventory.withholding import Withholder
from agent.services.journal import NodeJournal
from agent.services.reconcile.clearing import Clearing
from agent.services.report.announce import NodeEventQueue
from agent.services.report.cordons import CordonEvents
from agent.services.state import Recovered, StateService
from agent.settings.reading import SourcesRead
from agent.settings.sections import Settings
from agent.settings.sources import Sources


class HostFacts(msgspec.Struct, frozen=True):
    """The facts about the host before anything runs. `stop` ends the process.

    `start`: the settings as they were read. `look` reads them again, at once when `asked` is set.
    `stored`: the last good settings on disk.
    """

    boot_id: str
    recovered: Recovered
    start: SourcesRead
    look: Callable[[Sources], Awaitable[SourcesRead]]
    asked: asyncio.Event
    stop: asyncio.Event
    notifier: ServiceNotifier
    stored: LastGood | None = None


class KnowledgeServices(msgspec.Struct, frozen=True):
    """Services that observe the host."""

    keeper: InventoryKeeper
    left_out: LeftOut
    gpu_events: GpuEvents
    cordons: CordonEvents
    listing: Listing
    discovery: Discovery
    health: HealthWatch
    samples: Samples
    kubelet: KubeletWatch
    recent: RecentlyRegistered
    withholder: Withholder
    clearing: Clearing


class Front(msgspec.Struct, frozen=True):
    """The services that run first. `notices`: Events that wait for the API server.

    `journal`: what happened lately.
    """

    facts: SharedCells
    state: StateService
    knowing: KnowledgeServices
    allocator: LateAllocator
    endpoint: Endpoint
    notices: NodeEventQueue
    journal: NodeJournal
    settings: SettingsService

    async def follow_held(self) -> None:
        """Pass the ids in use to the inventory, so that they stay listed."""
        async for ledger in self.state.ledger.follow():
            self.knowing.keeper.hold(ledger.held_ids())

    def refused(self, refusal: Refusal, row: Row | None) -> None:
        """Record a refusal, and check whether the node would refuse every new pod."""
        self.journal.refused(refusal, row)
        self.knowing.withholder.refused(str(refusal))

    @property
    def server(self) -> PluginServer:
        """The device plugin server of our resource."""
        return self.endpoint.server

    @property
    def registration(self) -> Registration:
        """The registration of our resource."""
        return self.endpoint.registration


def join_front(settings: Settings, adapters: Adapters, host: HostFacts) -> Front:
    """Build the front half around its cells and ports."""
    facts = new_facts(settings)
    state = StateService(disk=adapters.disk, recovered=host.recovered.state, boot_id=host.boot_id)
    allocator = LateAllocator()
    journal = NodeJournal(adapters.clock, adapters.disk)
    notices = NodeEventQueue(journal.changed)
    keeper = InventoryKeeper(
        facts.inventory, facts.sharing, adapters.clock, state.health, facts.edits, adapters.cdi
    )
    keeper.hold(state.ledger.value.held_ids())
    outside = SettingsPorts(
        look=host.look,
        files=adapters.files,
        asked=host.asked,
        disk=adapters.disk,
        notifier=host.notifier,
        refresh=keeper.refresh,
        say=notices.say,
        stop=host.stop,
        ledger=state.ledger,
        calls=allocator.calls,
    )
    service = SettingsService(host.start, settings, facts, outside)
    service.recall(host.stored)

    def sockets() -> tuple[str, ...]:
        """The names to watch in the kubelet's directory. They change."""
        return (settings.paths.kubelet_socket.name, *endpoint.sockets)

    def heard(name: str) -> None:
        endpoint.heard(name)

    directory = DirectoryWatch(settings.paths.plugins, sockets, settings.paths.kubelet_socket.name)
    kubelet = KubeletWatch(directory, heard)
    knowing = _services(settings, adapters, host, facts, state, service, keeper, kubelet, notices)
    served = EndpointFacts(directory, facts.resource, facts.slices, state.ledger, notices.say)
    endpoint = join_endpoint(settings, adapters, served, allocator)
    return Front(
        facts=facts,
        state=state,
        knowing=knowing,
        allocator=allocator,
        endpoint=endpoint,
        notices=notices,
        journal=journal,
        settings=service,
    )


def _services(
    settings: Settings,
    adapters: Adapters,
    host: HostFacts,
    facts: SharedCells,
    state: StateService,
    service: SettingsService,
    keeper: InventoryKeeper,
    kubelet: KubeletWatch,
    notices: NodeEventQueue,
) -> KnowledgeServices:
    clock = adapters.clock

    def scanned(scan: Scan) -> None:
        """Update the settings first: they may depend on the GPUs."""
        listed = service.saw_gpus(scan)
        if listed is not None:
            keeper.found(listed)
        health.scanned(scan)

    listing = Listing(facts.inventory, keeper.held, facts.slices)

    def judged(verdicts: Mapping[GpuUuid, Health]) -> None:
        """Update the list at once, before the other followers of the inventory run."""
        keeper.judged(verdicts)
        listing.refresh()

    def withhold(state: Withholding) -> None:
        """Update the list at once, as above."""
        keeper.withhold(state)
        listing.refresh()

    def is_ill(uuid: GpuUuid) -> bool:
        shared = facts.inventory.value.find(uuid)
        return shared is not None and shared.health.ill

    discovery = Discovery(adapters.driver, scanned, ill=is_ill)
    before = host.recovered.state.boot_id
    health = HealthWatch(
        driver=adapters.driver,
        inventory=facts.inventory,
        judged=judged,
        remember=state.remember,
        changed=discovery.rescan,
        settings=settings.health,
        clock=clock,
        recalled=state.health,
        boot_changed=bool(before) and before != host.boot_id,
    )
    return KnowledgeServices(
        keeper=keeper,
        left_out=LeftOut(keeper.left_out, facts.inventory, notices.say),
        gpu_events=GpuEvents(
            facts.inventory, state.ledger, facts.pods, keeper.left_out, notices.say
        ),
        cordons=CordonEvents(facts.node, facts.inventory, notices.say),
        listing=listing,
        discovery=discovery,
        health=health,
        samples=Samples(adapters.driver, facts.inventory, clock),
        kubelet=kubelet,
        recent=RecentlyRegistered(facts.inventory),
        withholder=Withholder(
            looks_of(settings, adapters, state.error),
            withhold,
            notices.say,
            cues_of(settings, adapters, state.error),
        ),
        clearing=Clearing(adapters.hooks, adapters.hooks.set_aside, notices.say),
    )
