"""A node whose settings lie in files: the services between them and the two lists that follow.

Joined as the composition root joins them, on virtual time; every list and every write is counted.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from agent.app.adapters import SharedCells, new_facts
from agent.app.settings import SettingsPorts, SettingsService
from agent.cluster import NodeEvent
from agent.inventory import InventoryKeeper, Listing
from agent.kit.cell import Cell
from agent.kit.timing import Lull
from agent.kube.watches import NodeWatch
from agent.ledger import LastGood, Ledger
from agent.model import GpuUuid, Scan, SliceId, SliceList
from agent.report import ReportCells, Reporter, ReportState
from agent.settings.reading import begin, look
from agent.settings.sources import NodeFacts, Sources
from tests.app.settings_room import FakeWatch, SystemdSide
from tests.builders import NODE, a_gpu
from tests.fakes.apiserver import FakeApi
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.disk import MemoryDisk
from tests.fakes.offload import Inline

Runs = Sequence[Callable[[], Coroutine[None, None, object]]]
SETTLED = 5.0
"""Seconds after which a change has reached everybody: the reporter spreads its writes over one."""

GPUS = Scan("570", tuple(a_gpu(index=n) for n in range(4)))
GPUS_8 = Scan("570", tuple(a_gpu(index=n) for n in range(8)))


@dataclasses.dataclass
class SettingsNode:
    """What a test holds in its hands."""

    root: Path
    facts: SharedCells
    service: SettingsService
    keeper: InventoryKeeper
    api: FakeApi
    systemd: SystemdSide
    lists: list[SliceList]
    events: list[NodeEvent]
    logs: list[MutableMapping[str, Any]]
    stop: asyncio.Event
    first: SliceList = dataclasses.field(default_factory=SliceList)

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

    async def hold(self, *slices: tuple[GpuUuid, int]) -> None:
        """Containers hold these slices and no others."""
        held: dict[GpuUuid, tuple[SliceId, ...]] = {}
        for uuid, number in slices:
            held[uuid] = (*held.get(uuid, ()), SliceId(f"{uuid}-{number}"))
        self.keeper.hold(held)
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


async def _joined(root: Path, api: FakeApi, stored: LastGood | None) -> SettingsNode:
    flags = {"--nodeconfig": f"{root}/nodeconfig", "--device-config": "", "--node-name": NODE}
    sources = Sources(root / "own", {}, {**flags, "--state-dir": f"{root}/state"})
    start = await begin(sources, Inline(), Inline())
    settings = start.taken().settings(NodeFacts())
    facts = new_facts(settings)
    keeper = InventoryKeeper(facts.inventory, facts.sharing, LoopClock())
    events: list[NodeEvent] = []
    systemd = SystemdSide()
    outside = SettingsPorts(
        look=lambda good: look(sources, Inline(), good),
        files=FakeWatch(),
        asked=asyncio.Event(),
        disk=MemoryDisk(),
        notifier=systemd,
        refresh=keeper.refresh,
        say=events.append,
        stop=asyncio.Event(),
        ledger=Cell(Ledger()),
        calls=Lull(),
    )
    service = SettingsService(start, settings, facts, outside)
    service.recall(stored)
    return SettingsNode(
        root=root,
        facts=facts,
        service=service,
        keeper=keeper,
        api=api,
        systemd=systemd,
        stop=outside.stop,
        lists=[],
        events=events,
        logs=[],
    )


def _runs(room: SettingsNode) -> tuple[Runs, Runs]:
    """The services that stand: those of the host, and behind them those of the API server."""
    facts = room.facts
    node = NodeWatch(room.api, facts.node, Seeded())
    state = Cell(ReportState())
    cells = ReportCells(facts.inventory, facts.node, node.returns, facts.report, state)
    reporter = Reporter(room.api, cells, node.saw, room.events.append, LoopClock(), Seeded())
    listing = Listing(facts.inventory, room.keeper.held, facts.slices)

    host = (room.keeper.run, room.service.run, listing.run, room.take_lists)
    return host, (node.run, reporter.run)


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
        room = await _joined(root, api, stored)
        async with asyncio.TaskGroup() as group:
            host, behind = _runs(room)
            tasks = [group.create_task(run()) for run in host]
            await asyncio.sleep(0)
            if room.service.saw_gpus(scan):
                room.keeper.found(scan)
            await asyncio.sleep(0.01)
            tasks += [group.create_task(run()) for run in behind]
            await asyncio.sleep(SETTLED)
            room.first = room.lists[0] if room.lists else SliceList()
            room.count()
            logs.clear()
            room.logs = logs
            yield room
            for task in tasks:
                task.cancel()
