"""The service of settings with fakes all around: what it reads from, and what it acts on."""

import asyncio
import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

from agent.app.adapters import new_facts
from agent.app.settings import SettingsPorts, SettingsService
from agent.cluster import NodeEvent
from agent.kit.cell import Cell
from agent.kit.timing import Lull
from agent.ledger import Ledger, SourceFile
from agent.ports import Disk
from agent.settings.reading import SourcesRead
from agent.settings.sources import NodeFacts, Sources
from agent.settings.values import NodeValues, make_plan
from tests.fakes.disk import MemoryDisk


@dataclasses.dataclass
class FakeWatch:
    """The FileWatch port: `change` says that something changed."""

    followed: list[frozenset[Path]] = dataclasses.field(default_factory=list)
    change: Callable[[], None] = lambda: None

    async def follow(self, paths: Collection[Path], changed: Callable[[], None]) -> NoReturn:
        self.followed.append(frozenset(paths))
        self.change = changed
        changed()
        await asyncio.Event().wait()
        raise AssertionError


@dataclasses.dataclass
class SystemdSide:
    """The ServiceNotifier port."""

    said: list[str] = dataclasses.field(default_factory=list)
    watchdog: None = None

    def ready(self) -> None:
        self.said.append("ready")

    def reloading(self) -> None:
        self.said.append("reloading")

    def status(self, text: str) -> None:
        raise AssertionError(text)

    def stopping(self) -> None:
        raise AssertionError

    def alive(self) -> None:
        raise AssertionError


async def nothing_new(good: Sources) -> SourcesRead:
    """A look at sources that are those in force."""
    return SourcesRead(frozenset(), good)


def a_plan(own: str) -> NodeValues:
    """What an own file says."""
    return make_plan(Sources(own=SourceFile("c.yaml", own.encode()), host="node-a"))


def start_of(plan: NodeValues, *asked: Path) -> SourcesRead:
    """A start with these settings, after these files were looked for."""
    return SourcesRead(frozenset(asked), plan.sources, plan)


@dataclasses.dataclass
class SettingsRoom:
    """A service, and what it has said and done."""

    start: SourcesRead
    look: Callable[[Sources], object] = nothing_new
    disk: Disk = dataclasses.field(default_factory=MemoryDisk)
    watch: FakeWatch = dataclasses.field(default_factory=FakeWatch)
    systemd: SystemdSide = dataclasses.field(default_factory=SystemdSide)
    asked: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    stop: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    told: list[NodeEvent] = dataclasses.field(default_factory=list)
    refreshed: list[int] = dataclasses.field(default_factory=list)
    ledger: Cell[Ledger] = dataclasses.field(default_factory=lambda: Cell(Ledger()))
    rebuild: Callable[[], None] = lambda: None
    calls: Lull = dataclasses.field(default_factory=Lull)

    def __post_init__(self) -> None:
        settings = self.start.taken().settings(NodeFacts())
        self.cells = new_facts(settings)
        outside = SettingsPorts(
            look=self.look,  # type: ignore[arg-type]
            files=self.watch,
            asked=self.asked,
            disk=self.disk,
            notifier=self.systemd,
            refresh=self._refresh,
            say=self.told.append,
            stop=self.stop,
            ledger=self.ledger,
            calls=self.calls,
        )
        self.service = SettingsService(self.start, settings, self.cells, outside)

    def _refresh(self) -> None:
        self.refreshed.append(self.split_count)
        self.rebuild()

    @property
    def split_count(self) -> int:
        return self.cells.sharing.value.split_count
