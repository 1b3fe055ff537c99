"""The agent of one node: its services, made in the order in which they need each other.

The standing task of each service is added to its tier next to where the service is made.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from agent import inventory, reconcile, report, settle, usage, witness
from agent.allocate import edits, plain, service
from agent.app.settings import SettingsService, SharedCells
from agent.cluster import PodTable
from agent.errors import Refusal
from agent.health.watch import HealthWatch
from agent.hookdirs import Cleared, HostHookDirs, clear_directories
from agent.host.node import CdiDirectories, CgroupContainers
from agent.host.system import HostDisk, Systemd, Worker
from agent.kit.cell import Cell
from agent.kit.tasks import Task
from agent.kit.timing import SystemClock, Tally
from agent.kube import client, objects
from agent.kube.client import Connection
from agent.kubelet import door, register
from agent.ledger import LastGood, Row
from agent.model import GpuUuid, Scan, SliceId
from agent.ports import Driver, RecordsReader
from agent.settings.reading import Sources, SourcesRead
from agent.settings.schema import Settings
from agent.state import NodeJournal, Recovered, StateService

# What all services stand on: the adapters to host and driver.


class Adapters(msgspec.Struct, frozen=True):
    """The adapters of a running agent. `worker` runs blocking calls.

    The state's disk, `reader` (settings files and CDI, on any file system), the clearing of
    directories and `regions` have threads of their own: while one hangs, the rest goes on.
    """

    driver: Driver
    worker: Worker
    reader: Worker
    disk: HostDisk
    hooks: HostHookDirs
    cdi: CdiDirectories
    regions: Worker
    clock: SystemClock
    random: random.Random


@contextlib.asynccontextmanager
async def open_adapters(
    settings: Settings, disk: HostDisk, environ: Mapping[str, str]
) -> AsyncIterator[Adapters]:
    """Open the other adapters; close them in reverse order.

    Raises SettingsError, PermissionFault: something that the agent needs is missing.
    """
    in_pod = settings.kubeconfig is None and "KUBERNETES_SERVICE_HOST" in environ
    async with (
        Worker("disk") as worker,
        Worker("settings") as reader,
        Worker("regions") as regions,
        Worker("clearing") as clearing,
        open_driver(settings) as driver,
    ):
        yield Adapters(
            driver=driver,
            worker=worker,
            reader=reader,
            disk=disk,
            hooks=HostHookDirs(
                settings.hook_path, Path("/dev"), settings.library_version, worker, clearing
            ),
            cdi=CdiDirectories(reader, in_pod=in_pod),
            regions=regions,
            clock=SystemClock(),
            random=random.SystemRandom(),
        )


@contextlib.asynccontextmanager
async def open_driver(settings: Settings) -> AsyncIterator[Driver]:
    """Open NVML, or the simulated GPUs of the settings. Only the driver in use is imported."""
    if settings.simulate is not None:
        from agent.sandbox.driver import open_simulation  # noqa: PLC0415

        spec, socket_path = settings.simulate, settings.paths.run / "simulate.sock"
        async with open_simulation(spec, socket_path=socket_path) as simulated:
            yield simulated
        return

    from agent.gpu.driver import NvmlDriver  # noqa: PLC0415

    driver = NvmlDriver(path=settings.nvml_library, driver_root=settings.driver_root)
    try:
        yield driver
    finally:
        await driver.close()


SLOWLY = (1.0, 2.0, 5.0, 15.0, 30.0), 0.3
"""Seconds before each restart of a task that asks the driver, the kubelet or the API server, the
last of them repeatedly; and the jitter."""


class StartFacts(msgspec.Struct, frozen=True):
    """What was found on the host before anything runs: the recovered state, and the settings.

    `start`: as they were read. `settings`: as the rows allow. `stored`: the last good ones.
    """

    boot_id: str
    recovered: Recovered
    start: SourcesRead
    settings: Settings
    stored: LastGood | None = None


class NodeAgent:
    """The services of one node, around their cells and ports. Nothing runs until the tiers do.

    - `writers`, `services`, `doors`: the tiers. The doors stop first, the writer of the state last.
    - `asked`: set to request that the settings are read now. `look`: see SettingsService.
    - `notices`: Events that wait for the API server. `journal`: what happened lately.
    - `session`, `events`, `report`, `api_tallies`: empty in plain mode, which has no API server.
    """

    def __init__(
        self,
        found: StartFacts,
        adapters: Adapters,
        connection: Connection,
        notifier: Systemd,
        asked: asyncio.Event,
        look: Callable[[SourcesRead | None, Sources], Awaitable[SourcesRead]],
    ) -> None:
        self.found = found
        self.adapters = adapters
        settings, before = found.settings, found.recovered.state
        clock, chance, plugins = adapters.clock, adapters.random, settings.paths.plugins
        self.observes = settings.observe

        # The facts, their file, and what people are told.
        self.facts = facts = SharedCells(settings)
        self.state = state = StateService(
            disk=adapters.disk, recovered=before, boot_id=found.boot_id, keep=found.recovered.keep
        )
        self.writers = [Task("state", state.run)]
        self.journal = NodeJournal(clock)
        self.notices = report.NodeEventQueue(self.journal.changed)
        say = self.notices.say

        # What the kubelet asks, and what it is offered.
        def fence(ids: tuple[SliceId, ...]) -> None:
            reconcile.check_start(state.ledger.value, ids)

        self.server = door.PluginServer(
            plugins, facts.resource, facts.slices, chance, fence if settings.fenced else None
        )
        self.keeper = inventory.InventoryKeeper(
            facts.inventory,
            facts.sharing,
            clock,
            state.health,
            facts.edits,
            adapters.cdi.names,
            facts.slices,
            "" if self.observes else None,
        )
        self.keeper.hold(state.ledger.value.held_ids)

        # The settings, which depend on the Node's labels, its GPUs and the rows.
        self.settings = SettingsService(
            start=found.start,
            stored=found.stored,
            cells=facts,
            look=look,
            asked=asked,
            disk=adapters.disk,
            notifier=notifier,
            refresh=self.keeper.refresh,
            say=say,
            ledger=state.ledger,
            calls=self.server.admissions,
        )

        # The GPUs.
        self.discovery = inventory.Discovery(adapters.driver, self._scanned, ill=self._is_ill)
        self.health = HealthWatch(
            driver=adapters.driver,
            inventory=facts.inventory,
            judged=self.keeper.judged,
            remember=state.remember,
            changed=self.discovery.rescan,
            settings=settings.health,
            clock=clock,
            recalled=state.health,
            boot_changed=bool(before.boot_id) and before.boot_id != found.boot_id,
        )
        self.samples = inventory.Samples(adapters.driver, facts.inventory)
        self.recent = inventory.RecentlyRegistered(facts.inventory)

        # The kubelet's directory, and the registration there.
        kubelet_socket = settings.paths.kubelet_socket
        self.kubelet = register.KubeletDirectory(plugins, kubelet_socket.name)
        self.registration = register.Registration(
            facts.resource,
            self.server,
            self.kubelet,
            partial(register.register_plugin, kubelet_socket, fenced=settings.fenced),
            chance,
        )
        self.rivals = register.Rivals(plugins, facts.resource, self.registration, say)
        self.kubelet.listeners = [self.registration.heard, self.rivals.heard]

        # Whether new pods can be answered, and what ended pods leave behind.
        self.withholder = inventory.Withholder(self._node_checks(), self.keeper.withhold, say)
        self.cleared = Cell(Cleared())

        left_out = self.keeper.left_out
        events = partial(
            report.follow_gpus, facts.inventory, state.ledger, facts.pods, left_out, say
        )
        self.services = [
            Task("settings", self.settings.follow_files),
            Task("settings_copy", self.settings.keep_copy, SLOWLY),
            Task("inventory", self.keeper.run),
            Task("left_out", partial(report.follow_left_out, left_out, facts.inventory, say)),
            Task("gpu_events", events),
            Task("cordons", partial(report.follow_cordons, facts.node, facts.inventory, say)),
            Task("held", partial(self.keeper.follow_held, state.ledger)),
            # The list of GPUs may depend on the Node's labels.
            Task("discovery", self.discovery.run, SLOWLY, self.settings.await_labels),
            Task("health", self.health.run, SLOWLY),
            Task("samples", self.samples.run, SLOWLY),
            Task("kubelet", self.kubelet.run),
            Task("recent", self.recent.run),
        ]
        self.doors: list[Task] = []

        # An empty list would remove every slice.
        first_list = partial(facts.slices.until, lambda listed: listed.generation > 0)
        # Who only observes acts on no pod, lock, row or directory.
        if not self.observes:
            self.services += [
                Task("withholder", self.withholder.run),
                Task("unwritable", self._follow_disk),
                Task("clearing", partial(clear_directories, adapters.hooks, self.cleared)),
            ]
            self.doors += [
                Task("plugin", self.server.run, None),
                Task("registration", self.registration.run, after=first_list),
                Task("rival", self.rivals.run),
            ]

        self.session: client.KubeSession | None = None
        self.events: objects.EventPoster | None = None
        self.report: report.Reporter | None = None
        self.api_tallies: tuple[Tally, ...] = ()
        self._join_answers(connection)

    def _join_answers(self, connection: Connection) -> None:
        """Make what answers the kubelet, and what follows from the answers."""
        settings, adapters, say = self.found.settings, self.adapters, self.notices.say
        facts, state, paths = self.facts, self.state, settings.paths

        processes = usage.ContainerProcesses(paths.cgroup)
        self.usage = usage.ContainerUsage(
            usage.HostRegions(settings.hook_path, adapters.regions, processes),
            state.ledger,
            facts.pods,
            facts.inventory,
            adapters.clock,
            switches=settings.feedback and not self.observes,
            observes=self.observes,
        )
        self.services.append(Task("usage", self.usage.run))

        self.witness = witness.PodResourcesWitness(paths.pod_resources_socket)
        records = partial(witness.read_records, paths.plugins, adapters.worker)

        allocation: service.Allocation
        if settings.plain is not None:
            table, adopt = Cell(PodTable(synced=True)), None
            allocation = plain.PlainAllocation(
                commit=state.commit,
                say=say,
                noted=self.refused,
                inventory=facts.inventory,
                ledger=state.ledger,
                edits=facts.edits,
                epoch=self.kubelet.now,
                hooks=adapters.hooks,
                clock=adapters.clock,
                chance=adapters.random,
                settings=settings.plain,
            )
        else:
            allocation = beside = self._join_scheduler(connection, records)
            table, adopt = facts.pods, beside.adopt

        self.allocation = self.server.allocator = allocation
        self.reconcile = reconcile.Reconcile(
            pods=table,
            ledger=state.ledger,
            epoch=self.kubelet.epoch,
            taken=allocation.taken,
            calls=self.server.admissions,
            witness=self.witness,
            records=records,
            hooks=adapters.hooks,
            clock=adapters.clock,
            resource=facts.resource,
            adopt=adopt,
            commit=state.commit,
            say=say,
        )
        if not self.observes:
            self.services.append(Task("reconcile", self.reconcile.run, SLOWLY))

        post_event = None if self.events is None or self.observes else self.events.post
        self.services.append(Task("announcer", partial(self.notices.post_all, post_event), SLOWLY))

    def _join_scheduler(
        self, connection: Connection, records: RecordsReader
    ) -> service.HamiAllocation:
        """Make what speaks with HAMi's scheduler through the API server, and answers beside it."""
        settings, adapters, say = self.found.settings, self.adapters, self.notices.say
        facts, state, observes = self.facts, self.state, self.observes
        clock, chance, noted = adapters.clock, adapters.random, self.journal.changed

        self.session = session = client.KubeSession(connection, chance, observes=observes)
        self.events = poster = objects.EventPoster(session, settings.node, clock)
        api = objects.KubeApi(session, settings.node, settings.sharing.resource)
        node = objects.NodeWatch(api, facts.node, chance)
        pods = objects.PodWatch(api, facts.pods, clock, chance, facts.resource, noted)

        allocation = service.HamiAllocation(
            commit=state.commit,
            say=say,
            noted=self.refused,
            pods=facts.pods,
            node=facts.node,
            inventory=facts.inventory,
            ledger=state.ledger,
            match=facts.match,
            edits=facts.edits,
            registered=self.recent.greatest,
            witness=self.witness,
            records=records,
            containers=CgroupContainers(settings.paths.cgroup, adapters.worker),
            hooks=adapters.hooks,
            refresh=pods.refresh,
            look_at_pod=pods.find_uid,
            look_at_node=node.refresh,
            epoch=self.kubelet.now,
            streams=self.server.streams,
            clock=clock,
        )

        self.report = reporter = report.Reporter(
            api,
            report.ReportCells(facts.inventory, facts.node, node.returns, facts.report),
            node.on_answer,
            say,
            clock,
            chance,
            observes=observes,
        )

        # Beside those about the Node: Events that tenants can cause must not hide a bad GPU.
        pod_events = report.NodeEventQueue()
        settlement = settle.Settlement(
            pods=facts.pods,
            lock=node.lock,
            ledger=state.ledger,
            node_api=api,
            pod_api=api,
            say=pod_events.say,
            clock=clock,
            chance=chance,
        )

        self.services += [
            Task("node", node.run, SLOWLY),
            Task("settings_labels", partial(self.settings.follow_labels, node.labels)),
        ]
        # The Node's labels come before the first report: profiles may depend on them.
        self.doors.append(Task("report", reporter.run, SLOWLY, self.settings.labelled.wait))
        if not observes:
            self.services += [
                Task("pods", pods.run, SLOWLY),
                Task("kubelet_start", allocation.run),
                Task("settlement", settlement.run, SLOWLY),
                Task("pod_announcer", partial(pod_events.post_all, poster.post), SLOWLY),
            ]
            if settings.node_condition:
                condition = partial(
                    report.keep_condition, api.set_condition, facts.inventory, facts.node, clock
                )
                self.services.append(Task("condition", condition, SLOWLY))

        self.api_tallies = (
            node.restarts,
            pods.restarts,
            reporter.writes,
            reporter.failures,
            poster.posted,
            session.requests,
        )

        return allocation

    # What passes between the services.

    def refused(self, refusal: Refusal, row: Row | None) -> None:
        """Record a refusal, and check whether the node would refuse every new pod."""
        self.journal.refused(refusal, row)
        self.withholder.refused(str(refusal))

    def _scanned(self, scan: Scan) -> None:
        self.keeper.found(scan)
        self.health.scanned(scan)

    def _is_ill(self, uuid: GpuUuid) -> bool:
        """Whether the GPU has a fault of its own, which says nothing about the driver."""
        shared = self.facts.inventory.value.find(uuid)
        return shared is not None and shared.health.ill

    async def _follow_disk(self) -> None:
        """Run the node checks as soon as the state's disk fails or recovers."""
        async for _ in self.state.error.follow():
            self.withholder.look()

    def _node_checks(self) -> list[inventory.NodeCheck]:
        """The node checks that the settings need: what they find would refuse every new pod."""
        settings, adapters = self.found.settings, self.adapters
        # Plain mode without limits mounts nothing of HAMi-core and makes no directories.
        with_core = settings.plain is None or settings.plain.memory_limits

        async def state() -> None:
            # Only a write shows that there can be one: the first is made, also of what is on disk.
            await self.state.commit(lambda ledger: ledger)
            await adapters.disk.check()

        async def files() -> None:
            facts = await adapters.hooks.facts()
            if with_core:
                edits.check_library(facts)

        step, call = service.AllocateStep, adapters.worker.call
        plugins = partial(call, door.check_directory, settings.paths.plugins)
        checks = [
            inventory.NodeCheck(step.WRITE, state, turn=2),
            inventory.NodeCheck(step.HOOK, partial(call, adapters.driver.check), turn=3),
            inventory.NodeCheck(step.HOOK, files, turn=3),
            inventory.NodeCheck(step.HOOK, plugins, turn=3),
        ]
        if with_core:
            checks.append(inventory.NodeCheck(step.DIRECTORY, adapters.hooks.check, turn=3))
        return checks
