"""Joins what serves the kubelet: state, inventory, lists, node checks and the registration."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial

import msgspec

from agent.allocate.edits import check_library
from agent.allocate.service import AllocateStep
from agent.app.adapters import Adapters, SharedCells, new_facts
from agent.app.settings import SettingsPorts, SettingsService
from agent.errors import AgentError, Refusal, StateError
from agent.health.watch import HealthWatch
from agent.host.files import DirectoryWatch, HostFileWatch
from agent.inventory import (
    Cue,
    Discovery,
    InventoryKeeper,
    NodeCheck,
    Samples,
    Withholder,
)
from agent.kit.cell import Cell
from agent.kit.tasks import Backoff, supervise
from agent.kube.watches import RecentlyRegistered
from agent.kubelet.door import PluginServer, check_directory
from agent.kubelet.register import KubeletWatch, Registration, Rival, Rivals
from agent.ledger import LastGood, Row
from agent.model import GpuUuid, Scan, SliceId
from agent.ports import ServiceNotifier
from agent.reconcile import Clearing, check_start
from agent.report import NodeEventQueue, follow_cordons, follow_gpus, follow_left_out
from agent.settings.reading import SourcesRead
from agent.settings.schema import Settings
from agent.settings.sources import Sources
from agent.state import NodeJournal, Recovered, StateService

# How often each task may fail, and the delays before its restarts.

EXPECTED: tuple[type[Exception], ...] = (AgentError, TimeoutError, OSError)
"""Failures of the outside world, logged in one line. Any other exception is a defect."""

_LOCAL = (0.1, 0.5, 1.0, 5.0), 0.0
_DRIVER = (0.5, 1.0, 5.0, 30.0), 0.0
_WEB = (0.5, 1.0, 10.0, 30.0), 0.0
_API = (1.0, 2.0, 5.0, 15.0, 60.0), 0.3

DELAYS: Mapping[str, tuple[tuple[float, ...], float]] = {
    "state": _LOCAL,
    "notify": _LOCAL,
    "settings": _LOCAL,
    "inventory": _LOCAL,
    "left_out": _LOCAL,
    "gpu_events": _LOCAL,
    "cordons": _LOCAL,
    "held": _LOCAL,
    "withholder": _LOCAL,
    "clearing": _LOCAL,
    "room": _LOCAL,
    "discovery": _DRIVER,
    "health": _DRIVER,
    "samples": _DRIVER,
    "usage": _LOCAL,
    "node": _API,
    "pods": _API,
    "report": _API,
    "settlement": _API,
    "kubelet_start": _LOCAL,
    "reconcile": ((1.0, 5.0, 15.0, 60.0), 0.0),
    "plugin": ((0.1, 0.5, 1.0, 10.0), 0.0),
    "registration": ((0.05, 0.1, 0.5, 1.0, 10.0), 0.2),
    "rival": ((0.1, 0.5, 1.0, 10.0), 0.0),
    "announcer": _API,
    "pod_announcer": _API,
    "condition": _API,
    "recent": _LOCAL,
    "kubelet": ((0.1, 0.5, 1.0, 5.0), 0.0),
    "heartbeat": _LOCAL,
    "web": _WEB,
    "web_socket": _WEB,
}
"""Seconds before each restart of a task, the last of them repeatedly, and their jitter."""


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


Run = Callable[[], Coroutine[object, object, None]]


class KnowledgeServices(msgspec.Struct, frozen=True):
    """Services that observe the host."""

    keeper: InventoryKeeper
    left_out: Run
    gpu_events: Run
    cordons: Run
    discovery: Discovery
    health: HealthWatch
    samples: Samples
    kubelet: KubeletWatch
    recent: RecentlyRegistered
    withholder: Withholder
    clearing: Clearing


class Front(msgspec.Struct, frozen=True):
    """The services that need no API server. `notices`: Events that wait for the API server.

    `journal`: what happened lately.
    """

    facts: SharedCells
    state: StateService
    knowing: KnowledgeServices
    server: PluginServer
    registration: Registration
    rivals: Rivals
    random: random.Random
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

    async def serve(self) -> None:
        """Serve the kubelet and keep registered until cancelled."""

        async def register() -> None:
            # Registering an empty list would remove every slice.
            await self.facts.slices.until(lambda listed: listed.generation > 0)
            await self.registration.run()

        runs = {"plugin": self.server.run, "registration": register, "rival": self.rivals.run}
        async with asyncio.TaskGroup() as group:
            for name, run in runs.items():
                backoff = Backoff(*DELAYS[name], self.random)
                group.create_task(supervise(name, run, backoff, EXPECTED))


def join_front(settings: Settings, adapters: Adapters, host: HostFacts) -> Front:
    """Build them around their cells and ports."""
    facts = new_facts(settings)
    state = StateService(disk=adapters.disk, recovered=host.recovered.state, boot_id=host.boot_id)

    def check(ids: tuple[SliceId, ...]) -> None:
        """Check that the container that holds these slices may start. Raises Refusal."""
        check_start(state.ledger.value, ids)

    plugins, resource, chance = settings.paths.plugins, facts.resource, adapters.random
    fence = check if settings.fenced else None
    server = PluginServer(plugins, resource, facts.slices, chance, fence)
    journal = NodeJournal(adapters.clock)
    notices = NodeEventQueue(journal.changed)
    keeper = InventoryKeeper(
        facts.inventory,
        facts.sharing,
        adapters.clock,
        state.health,
        facts.edits,
        adapters.cdi.names,
        facts.slices,
    )
    keeper.hold(state.ledger.value.held_ids())
    outside = SettingsPorts(
        look=host.look,
        watch=adapters.files.follow,
        asked=host.asked,
        disk=adapters.disk,
        notifier=host.notifier,
        refresh=keeper.refresh,
        say=notices.say,
        stop=host.stop,
        ledger=state.ledger,
        calls=server.traffic.admissions,
    )
    service = SettingsService(host.start, settings, facts, outside)
    service.recall(host.stored)

    def sockets() -> tuple[str, ...]:
        """The names to watch in the kubelet's directory. They change."""
        ours = filter(None, (server.endpoint, *rival.names))
        return (settings.paths.kubelet_socket.name, *ours)

    def heard(name: str) -> None:
        """Take note that a socket came or went. The empty name stands for all."""
        registration.heard(name)
        rivals.heard(name)

    directory = DirectoryWatch(settings.paths.plugins, sockets, settings.paths.kubelet_socket.name)
    kubelet = KubeletWatch(directory, heard)
    knowing = _services(settings, adapters, host, facts, state, service, keeper, kubelet, notices)
    registration = Registration(
        resource, server, directory, adapters.registrar, server.traffic.streams, chance
    )
    rival = Rival(plugins, resource)
    rivals = Rivals(rival, registration, notices.say)
    return Front(
        facts=facts,
        state=state,
        knowing=knowing,
        server=server,
        registration=registration,
        rivals=rivals,
        random=chance,
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

    def is_ill(uuid: GpuUuid) -> bool:
        shared = facts.inventory.value.find(uuid)
        return shared is not None and shared.health.ill

    discovery = Discovery(adapters.driver, scanned, ill=is_ill)
    before = host.recovered.state.boot_id
    health = HealthWatch(
        driver=adapters.driver,
        inventory=facts.inventory,
        judged=keeper.judged,
        remember=state.remember,
        changed=discovery.rescan,
        settings=settings.health,
        clock=clock,
        recalled=state.health,
        boot_changed=bool(before) and before != host.boot_id,
    )
    return KnowledgeServices(
        keeper=keeper,
        left_out=partial(follow_left_out, keeper.left_out, facts.inventory, notices.say),
        gpu_events=partial(
            follow_gpus, facts.inventory, state.ledger, facts.pods, keeper.left_out, notices.say
        ),
        cordons=partial(follow_cordons, facts.node, facts.inventory, notices.say),
        discovery=discovery,
        health=health,
        samples=Samples(adapters.driver, facts.inventory, clock),
        kubelet=kubelet,
        recent=RecentlyRegistered(facts.inventory),
        withholder=Withholder(
            _node_checks(settings, adapters, state.error),
            keeper.withhold,
            notices.say,
            _cues(settings, adapters, state.error),
        ),
        clearing=Clearing(adapters.hooks, adapters.hooks.set_aside, notices.say),
    )


def _node_checks(
    settings: Settings, adapters: Adapters, write_error: Cell[str]
) -> tuple[NodeCheck, ...]:
    """The node checks that these settings need: what they find would refuse every new pod.

    `write_error`: that of the last durable write.
    """
    with_core = _mounts_core(settings)

    async def state() -> None:
        if write_error.value:
            raise StateError(write_error.value)
        await adapters.disk.check()

    async def files() -> None:
        facts = await adapters.hooks.facts()
        if with_core:
            check_library(facts)

    async def directories() -> None:
        if with_core:
            await adapters.hooks.check()

    call, plugins = adapters.worker.call, settings.paths.plugins
    return (
        NodeCheck(AllocateStep.WRITE, state, turn=2),
        NodeCheck(AllocateStep.HOOK, partial(call, adapters.driver.check), turn=3),
        NodeCheck(AllocateStep.HOOK, files, turn=3),
        NodeCheck(AllocateStep.DIRECTORY, directories, turn=3),
        NodeCheck(AllocateStep.HOOK, partial(call, check_directory, plugins), turn=3),
    )


def _cues(settings: Settings, adapters: Adapters, write_error: Cell[str]) -> tuple[Cue, ...]:
    """What tells at once that a check may have another result.

    Full disks and changed rights are not reported by the kernel.
    """

    async def written(look: Callable[[], None]) -> None:
        async for _ in write_error.follow():
            look()

    async def library(look: Callable[[], None]) -> None:
        # Not on the thread that reads settings: this file system is another one, and may hang.
        await HostFileWatch(adapters.worker).follow(adapters.hooks.mounted, look)

    return (written, library) if _mounts_core(settings) else (written,)


def _mounts_core(settings: Settings) -> bool:
    """Plain mode without limits mounts nothing of HAMi-core and makes no directories."""
    return settings.plain is None or settings.plain.memory_limits
