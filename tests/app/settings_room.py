"""The service of settings with fakes all around: what it reads from, and what it acts on."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from agent.app.settings import SettingsService, SharedCells
from agent.cluster import NodeEvent
from agent.host.system import Systemd
from agent.inventory import InventoryKeeper
from agent.kit.cell import Cell
from agent.kit.timing import IdleWaiter
from agent.kube.objects import NodeWatch
from agent.ledger import LastGood, Ledger, SourceFile
from agent.model import Scan, SliceList
from agent.ports import Disk
from agent.report import ReportCells, Reporter
from agent.settings.reading import Labels, NodeValues, Sources, SourcesRead, begin, look, make_plan
from tests.builders import NODE, a_gpu
from tests.fakes.apiserver import FakeApi
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.disk import MemoryDisk
from tests.fakes.offload import Inline
from tests.services.at_work import at_work


class SystemdSide(Systemd):
    """What the service manager is told, by the first word of each message."""

    def __init__(self) -> None:
        super().__init__({})
        self.said: list[str] = []

    def tell(self, message: str) -> None:
        self.said.append(message.partition("=")[0].lower())


async def nothing_new(last: SourcesRead | None, good: Sources) -> SourcesRead:
    """A look at sources that are those in force."""
    return last or SourcesRead(good, make_plan(good))


def a_plan(own: str) -> NodeValues:
    """What an own file says."""
    return make_plan(Sources(own=SourceFile("c.yaml", own.encode()), host="node-a"))


def start_of(plan: NodeValues) -> SourcesRead:
    """A start with these settings."""
    return SourcesRead(plan.sources, plan)


@dataclasses.dataclass
class SettingsRoom:
    """A service, and what it has said and done."""

    start: SourcesRead
    look: Callable[[SourcesRead | None, Sources], Awaitable[SourcesRead]] = nothing_new
    disk: Disk = dataclasses.field(default_factory=MemoryDisk)
    systemd: SystemdSide = dataclasses.field(default_factory=SystemdSide)
    asked: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    told: list[NodeEvent] = dataclasses.field(default_factory=list)
    refreshed: list[int] = dataclasses.field(default_factory=list)
    ledger: Cell[Ledger] = dataclasses.field(default_factory=lambda: Cell(Ledger()))
    rebuild: Callable[[], None] = lambda: None
    calls: IdleWaiter = dataclasses.field(default_factory=IdleWaiter)
    stored: LastGood | None = None

    def __post_init__(self) -> None:
        settings = self.start.taken().settings()
        self.cells = SharedCells(settings)
        self.service = SettingsService(
            start=self.start,
            stored=self.stored,
            cells=self.cells,
            look=self.look,
            asked=self.asked,
            disk=self.disk,
            notifier=self.systemd,
            refresh=self._refresh,
            say=self.told.append,
            ledger=self.ledger,
            calls=self.calls,
        )
        self.labels: Cell[Labels] = Cell(None)

    @property
    def tasks(self) -> tuple[Callable[[], Coroutine[object, object, None]], ...]:
        service = self.service
        return service.follow_files, partial(service.follow_labels, self.labels), service.keep_copy

    def _refresh(self) -> None:
        self.refreshed.append(self.split_count)
        self.rebuild()

    @property
    def trouble(self) -> str:
        """Why not all settings are in force."""
        return str(self.service.fault or "")

    @property
    def split_count(self) -> int:
        return self.cells.sharing.value.split_count


# A node whose settings lie in files, with the services between them and the lists that follow.
#
# Joined as the composition root joins them, on virtual time; every list and write is counted.


SETTLED = 5.0
"""Seconds after which a change has reached everybody: the reporter spreads its writes over one."""

GPUS = Scan("570", tuple(a_gpu(index=n) for n in range(4)))


@dataclasses.dataclass
class SettingsNode:
    """What a test holds in its hands."""

    root: Path
    room: SettingsRoom
    keeper: InventoryKeeper
    api: FakeApi
    lists: list[SliceList] = dataclasses.field(default_factory=list)
    logs: list[MutableMapping[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.facts = self.room.cells
        self.service = self.room.service
        self.events = self.room.told

    async def take_lists(self) -> None:
        """The kubelet's side: each list as it comes."""
        async for listed in self.facts.slices.follow():
            self.lists += [listed] if listed.generation else []

    async def edit(self, *, asked: bool = False, **files: str | None) -> None:
        """Write the files (None: remove), have them read, and wait until all has settled."""
        for name, text in files.items():
            if text is None:
                (self.root / name).unlink()
            else:
                (self.root / name).write_text(text)
        await self.service.read(asked=asked)
        await asyncio.sleep(SETTLED)

    def count(self) -> tuple[int, int]:
        """Lists and writes since the last count."""
        found = len(self.lists), self.api.calls["annotate_node"]
        self.lists.clear()
        del self.api.calls["annotate_node"]
        return found

    def said(self, *levels: str) -> list[object]:
        """The log's events of these levels about settings since the last call."""
        found = [
            line["event"]
            for line in self.logs
            if line["log_level"] in levels and str(line["event"]).startswith("config.")
        ]
        self.logs.clear()
        return found


@contextlib.asynccontextmanager
async def a_settings_node(
    root: Path,
    own: str = "",
    stored: LastGood | None = None,
    *,
    scan: Scan = GPUS,
    labels: Mapping[str, str] | None = None,
) -> AsyncIterator[SettingsNode]:
    """A node with these GPUs that has listed and reported; counts and logs begin after that."""
    (root / "own").write_text(own)
    (root / "nodeconfig").write_text('{"nodeconfig": []}')
    api = FakeApi()
    api.create_node()
    api.label_node(labels or {})
    with structlog.testing.capture_logs() as logs:
        flags = {"--nodeconfig": f"{root}/nodeconfig", "--device-config": "", "--node-name": NODE}
        sources = Sources(root / "own", {}, {**flags, "--state-dir": f"{root}/state"})
        start = await begin(sources, Inline(), Inline())
        room = SettingsRoom(start, look=partial(look, sources, Inline()), stored=stored)
        facts = room.cells
        keeper = InventoryKeeper(facts.inventory, facts.sharing, LoopClock(), slices=facts.slices)
        room.rebuild = keeper.refresh
        node = SettingsNode(root, room, keeper, api)
        watch = NodeWatch(api, facts.node, Seeded())
        room.labels = watch.labels
        cells = ReportCells(facts.inventory, facts.node, watch.returns, facts.report)
        reporter = Reporter(api, cells, watch.on_answer, room.told.append, LoopClock(), Seeded())
        host = (keeper.run, *room.tasks, node.take_lists)
        async with at_work(*host):
            await asyncio.sleep(0)
            await room.service.await_labels()
            keeper.found(scan)
            await asyncio.sleep(0.01)
            async with at_work(watch.run, reporter.run):
                await asyncio.sleep(SETTLED)
                node.count()
                logs.clear()
                node.logs = logs
                yield node
