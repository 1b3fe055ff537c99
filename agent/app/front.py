"""Joins what serves the kubelet: state, inventory, lists, node checks and the registration."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from agent.allocate.edits import check_library
from agent.allocate.service import AllocateStep
from agent.app.adapters import Adapters, SharedCells
from agent.app.settings import SettingsPorts, SettingsService
from agent.errors import Refusal, StateError
from agent.health.watch import HealthWatch
from agent.host.files import DirectoryWatch, follow_files
from agent.host.process import Systemd
from agent.inventory import (
    Cue,
    Discovery,
    InventoryKeeper,
    NodeCheck,
    Samples,
    Withholder,
)
from agent.kit.cell import Cell
from agent.kube.watches import RecentlyRegistered
from agent.kubelet.door import PluginServer, check_directory
from agent.kubelet.register import KubeletWatch, Registration, Rival, Rivals
from agent.ledger import LastGood, Row
from agent.model import GpuUuid, Scan, SliceId
from agent.reconcile import Clearing, check_start
from agent.report import NodeEventQueue, follow_cordons, follow_gpus, follow_left_out
from agent.settings.reading import SourcesRead
from agent.settings.schema import Settings
from agent.settings.sources import Sources
from agent.state import NodeJournal, Recovered, StateService


class StartFacts(msgspec.Struct, frozen=True):
    """What was found on the host before anything runs: the recovered state, and the settings.

    `start`: the settings as they were read. `settings`: those that the rows of the state allow.
    `stored`: the last good settings on disk.
    """

    boot_id: str
    recovered: Recovered
    start: SourcesRead
    settings: Settings
    stored: LastGood | None = None


class HostSignals(msgspec.Struct, frozen=True):
    """How the process and the service manager talk to the services.

    `asked`: set to request that the settings are read now. `stop`: set to end the process.
    """

    asked: asyncio.Event
    stop: asyncio.Event
    notifier: Systemd


class Front:
    """The services that need no API server, around their cells and ports.

    `look` reads the settings again, see SettingsPorts. `notices`: Events that wait for the API
    server. `journal`: what happened lately.
    """

    def __init__(
        self,
        found: StartFacts,
        adapters: Adapters,
        signals: HostSignals,
        look: Callable[[SourcesRead | None, Sources], Awaitable[SourcesRead]],
    ) -> None:
        settings = found.settings
        clock, chance = adapters.clock, adapters.random
        self.facts = facts = SharedCells(settings)
        self.state = state = StateService(
            disk=adapters.disk, recovered=found.recovered.state, boot_id=found.boot_id
        )
        plugins, resource = settings.paths.plugins, facts.resource
        fence = self._check_start if settings.fenced else None
        self.server = PluginServer(plugins, resource, facts.slices, chance, fence)
        self.journal = NodeJournal(clock)
        self.notices = NodeEventQueue(self.journal.changed)
        say = self.notices.say
        self.keeper = InventoryKeeper(
            facts.inventory,
            facts.sharing,
            clock,
            state.health,
            facts.edits,
            adapters.cdi.names,
            facts.slices,
        )
        self.keeper.hold(state.ledger.value.held_ids())
        outside = SettingsPorts(
            look=look,
            asked=signals.asked,
            disk=adapters.disk,
            notifier=signals.notifier,
            refresh=self.keeper.refresh,
            say=say,
            stop=signals.stop,
            ledger=state.ledger,
            calls=self.server.traffic.admissions,
        )
        self.settings = SettingsService(found.start, settings, facts, outside)
        self.settings.recall(found.stored)
        self.discovery = Discovery(adapters.driver, self._scanned, ill=self._is_ill)
        before = found.recovered.state.boot_id
        self.health = HealthWatch(
            driver=adapters.driver,
            inventory=facts.inventory,
            judged=self.keeper.judged,
            remember=state.remember,
            changed=self.discovery.rescan,
            settings=settings.health,
            clock=clock,
            recalled=state.health,
            boot_changed=bool(before) and before != found.boot_id,
        )
        left_out = self.keeper.left_out
        self.left_out = partial(follow_left_out, left_out, facts.inventory, say)
        self.gpu_events = partial(
            follow_gpus, facts.inventory, state.ledger, facts.pods, left_out, say
        )
        self.cordons = partial(follow_cordons, facts.node, facts.inventory, say)
        self.samples = Samples(adapters.driver, facts.inventory, clock)
        self.recent = RecentlyRegistered(facts.inventory)
        self.withholder = Withholder(
            _node_checks(settings, adapters, state.error),
            self.keeper.withhold,
            say,
            _cues(settings, adapters, state.error),
        )
        self.clearing = Clearing(adapters.hooks, adapters.hooks.set_aside, say)

        self._kubelet_name = settings.paths.kubelet_socket.name
        directory = DirectoryWatch(plugins, self._sockets, self._kubelet_name)
        self.kubelet = KubeletWatch(directory, self._heard)
        streams = self.server.traffic.streams
        self.registration = Registration(
            resource, self.server, directory, adapters.registrar, streams, chance
        )
        self._rival = Rival(plugins, resource)
        self.rivals = Rivals(self._rival, self.registration, say)

    async def follow_held(self) -> None:
        """Pass the ids in use to the inventory, so that they stay listed."""
        async for ledger in self.state.ledger.follow():
            self.keeper.hold(ledger.held_ids())

    def refused(self, refusal: Refusal, row: Row | None) -> None:
        """Record a refusal, and check whether the node would refuse every new pod."""
        self.journal.refused(refusal, row)
        self.withholder.refused(str(refusal))

    async def register(self) -> None:
        """Keep registered from the first list on: an empty one would remove every slice."""
        await self.facts.slices.until(lambda listed: listed.generation > 0)
        await self.registration.run()

    def _scanned(self, scan: Scan) -> None:
        """Update the settings first: they may depend on the GPUs."""
        listed = self.settings.saw_gpus(scan)
        if listed is not None:
            self.keeper.found(listed)
        self.health.scanned(scan)

    def _is_ill(self, uuid: GpuUuid) -> bool:
        shared = self.facts.inventory.value.find(uuid)
        return shared is not None and shared.health.ill

    def _sockets(self) -> tuple[str, ...]:
        """The names to watch in the kubelet's directory. They change."""
        return (self._kubelet_name, *filter(None, (self.server.endpoint, *self._rival.names)))

    def _heard(self, name: str) -> None:
        """Take note that a socket came or went. The empty name stands for all."""
        self.registration.heard(name)
        self.rivals.heard(name)

    def _check_start(self, ids: tuple[SliceId, ...]) -> None:
        """Check that the container that holds these slices may start. Raises Refusal."""
        check_start(self.state.ledger.value, ids)


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
        await follow_files(adapters.hooks.mounted, look, adapters.worker)

    return (written, library) if _mounts_core(settings) else (written,)


def _mounts_core(settings: Settings) -> bool:
    """Plain mode without limits mounts nothing of HAMi-core and makes no directories."""
    return settings.plain is None or settings.plain.memory_limits
