"""Settings in force: they fit the GPUs, follow the labels and the files, and wait for the drain."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog

from agent.app.settings import PERIOD, STILL, SettingsService, SharedCells
from agent.cluster import NodeEvent
from agent.errors import SettingsError
from agent.inventory import InventoryKeeper
from agent.kit.cell import Cell
from agent.kit.timing import IdleWaiter
from agent.kube.objects import NodeWatch
from agent.kubelet.door import PREFERENCE_FOLLOWED
from agent.ledger import LastGood, Ledger, SourceFile
from agent.model import Scan, SliceList
from agent.ports import Disk
from agent.report import ReportCells, Reporter
from agent.settings.reading import Labels, NodeValues, Sources, SourcesRead, begin, look, make_plan
from agent.state import LAST_GOOD_KIND, unseal
from tests.app.front_node import SystemdSide, nothing_new, start_of
from tests.builders import NODE, a_gpu, a_row, a_uuid
from tests.fakes.apiserver import FakeApi
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.disk import MemoryDisk
from tests.fakes.offload import Inline
from tests.services.at_work import at_work
from tests.unit.core.allocation.plain_scene import a_plain_row


def a_plan(own: str) -> NodeValues:
    """What an own file says."""
    return make_plan(Sources(own=SourceFile("c.yaml", own.encode()), host="node-a"))


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


# They fit the GPUs and follow the labels; what is good is kept on disk.

OWN = """
sharing: {splitCount: 10}
profiles:
- name: named
  match: {nodes: [node-a], labels: pool=t4}
  sharing: {splitCount: 2}
- name: pool
  match: {labels: pool=big}
  sharing: {splitCount: 20}
  library: {cudaLogLevel: "4"}
  report: {topologyScore: true}
"""


def room_of(text: str = OWN) -> SettingsRoom:
    return SettingsRoom(start_of(a_plan(text)))


async def test_labels_are_followed_and_a_node_unseen_keeps_its_last_ones():
    room = room_of()
    async with at_work(*room.tasks):
        await asyncio.sleep(0.01)
        assert (10, False) == (room.split_count, room.service.labelled.is_set())
        for labels, count in (({"pool": "big"}, 20), (None, 20), ({"pool": "small"}, 10)):
            room.labels.set(labels)
            await asyncio.sleep(0.01)
            assert (count, True) == (room.split_count, room.service.labelled.is_set())
            is_big = count == 20
            assert is_big == room.cells.report.value.topology_score
            assert ("4" if is_big else "1") == room.cells.edits.value.cuda_log_level
    assert [20, 10] == room.refreshed
    assert {"pool": "small"} == room.service.copy.value.labels


RENAMED = """
node: {name: other}
profiles:
- {name: other, match: {nodes: [other]}, sharing: {splitCount: 3}}
- {name: same, match: {nodes: [node-a]}, sharing: {memoryScaling: 2}}
"""


@pytest.mark.parametrize(
    ("text", "late"),
    [
        (OWN + "library: {hookPath: /opt/hami, cudaLogLevel: '3'}\n", "library.hookPath"),
        ("web: {port: 1}", "web.port"),
        (RENAMED, "node.name"),
        ("node: {name: node-a}", ""),
        ("sharing: {resourceName: example.com/vgpu}", ""),
        ("files: {nodeConfig: /elsewhere}", ""),
        ("files: {deviceConfig: /elsewhere}", ""),
    ],
)
async def test_what_acts_only_at_the_next_start_is_said_and_the_rest_acts_now(text, late):
    room = room_of()
    with structlog.testing.capture_logs() as lines:
        for again in ("", "# the same"):
            room.service.take(a_plan(text + again))

    told = [line for line in lines if line["event"] == "config.needs_restart"]
    assert [[late]] * bool(late) == [line["settings"] for line in told]
    assert (10, []) == (room.split_count, room.told)
    cells = room.cells
    assert ("hookPath" in text) == (cells.edits.value.cuda_log_level == "3")
    assert (text == RENAMED) == (cells.sharing.value.memory_scaling == 2.0)
    for settings in (cells.sharing.value, cells.edits.value, cells.match.value):
        assert ("resourceName" in text) == (settings.resource == "example.com/vgpu")


# The last good copy on disk.

ONE = LastGood("0.1.0", "node-a")
OTHER = LastGood("0.1.0", "node-a", {"pool": "big"})


async def test_the_copy_is_written_when_it_changed_and_again_after_a_failed_write():
    disk = MemoryDisk()
    room = SettingsRoom(start_of(a_plan("")), disk=disk, stored=ONE)
    kept = room.service.keep_copy
    async with at_work(kept):
        room.service.copy.set(ONE)
        await asyncio.sleep(1)
        assert None is await disk.read("settings.json"), "it is on disk already"

    room.service.copy.set(OTHER)
    disk.files.full = True
    with pytest.raises(ExceptionGroup, match="unhandled"):
        async with at_work(kept):
            await asyncio.sleep(1)

    disk.files.full = False
    async with at_work(kept):
        await asyncio.sleep(1)
    content = await disk.read("settings.json")
    assert content is not None
    assert OTHER == unseal(content, LAST_GOOD_KIND, LastGood)


# Entries of HAMi's config.json by label selector: when labels come, change, or never come.


def by(pool: str, **more: object) -> dict[str, object]:
    return {"nodelabelselector": {"matchLabels": {"Pool": pool}}, **more}


BIG, SMALL = by("big", devicesplitcount=20), by("small", devicesplitcount=10**6)
ANY = {"name": "*", "devicesplitcount": 5}
WRONG = {"name": "*", "devicesplitcount": 10**6}
OF_POOLS = """
profiles:
- {name: of-big, match: {labels: Pool=big}}
- {name: of-small, match: {labels: Pool=small}}
"""


def text(*entries: object) -> str:
    return json.dumps({"nodeconfig": entries})


async def room_with(tmp_path, *entries: object) -> SettingsRoom:
    (tmp_path / "n.json").write_text(text(*entries))
    flags = {"--nodeconfig": f"{tmp_path}/n.json", "--device-config": ""}
    start = await begin(Sources(None, {}, flags, "node-a"), Inline(), Inline())
    return SettingsRoom(start_of(start.taken()))


@pytest.mark.parametrize(("after", "waited"), [(0.5, 0.5), (1.9, 1.9), (60.0, 2.0)])
async def test_the_first_start_waits_two_seconds_for_the_node(tmp_path, after, waited):
    room = await room_with(tmp_path, BIG, ANY)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    async with at_work(*room.tasks):
        loop.call_later(after, room.labels.set, {"Pool": "big"})
        await room.service.await_labels()
        assert waited == pytest.approx(loop.time() - begun, abs=0.05)
        assert (20 if after < 2 else 5) == room.split_count
        await asyncio.sleep(61)
        assert 20 == room.split_count


async def test_labels_that_lead_to_a_wrong_entry_change_nothing_until_it_is_mended(tmp_path):
    async with a_settings_node(tmp_path, labels={"Pool": "big"}) as node:
        await node.edit(own=OF_POOLS, nodeconfig=text(BIG, SMALL, ANY))
        assert (1, 1) == node.count()
        assert ["config.ignored", "config.applied"] == node.said("info", "warning", "error")

        node.api.label_node({"Pool": "small"})
        await node.edit()
        assert (0, 0) == node.count()
        assert 20 == node.facts.sharing.value.split_count
        assert ("of-big",) == node.room.service.profiles
        assert ["ConfigRejected"] == [event.reason for event in node.events]
        assert "splitCount: expected 1 to 3000" in node.room.trouble

        await node.edit(nodeconfig=text(BIG, by("small", devicesplitcount=7), ANY))
        assert (1, 1) == node.count()
        assert 7 == node.facts.sharing.value.split_count
        assert ("of-small",) == node.room.service.profiles
        assert "" == node.room.trouble


async def test_a_start_with_a_wrong_entry_for_the_labels_goes_without_it_and_says_so(tmp_path):
    room = await room_with(tmp_path, BIG, SMALL, ANY)
    async with at_work(*room.tasks):
        asyncio.get_running_loop().call_later(0.5, room.labels.set, {"Pool": "small"})
        await room.service.await_labels()

    assert ["ConfigRejected"] == [event.reason for event in room.told]
    assert "splitCount: expected 1 to 3000" in room.told[0].text
    assert (5, room.told[0].text) == (room.split_count, room.trouble)


# Settings that change while the agent runs: one list and one write for all of it, or none.
#
# And whatever is wrong with the files, what was good stays: one Event, one line in the log.


GOOD = "sharing: {splitCount: 8}\n"


@pytest.mark.parametrize(
    ("change", "lists", "writes"),
    [
        ("sharing: {splitCount: 4}", 1, 1),
        ("sharing: {memoryScaling: 2}", 0, 1),
        ("sharing: {coreScaling: 2}", 0, 1),
        ("sharing: {filterIndexes: [1]}", 1, 1),
        (f"sharing: {{filterUUIDs: [{a_uuid(2)}]}}", 1, 1),
        ("sharing: {operatingMode: mps}", 0, 1),
        ("sharing: {operatingMode: mig}", 1, 1),
        ("sharing: {numaTopology: true}", 1, 0),
        ("report: {topologyScore: true}", 0, 1),
        ("report: {profile: colon}", 0, 1),
        ("library: {cudaLogLevel: '4'}", 0, 0),
        ("allocation: {passDeviceSpecs: true}", 0, 0),
        ("allocation: {unlockedPods: unique}", 0, 0),
        ("sharing: {memoryFactor: 4}", 0, 0),
        ("sharing: {splitCount: 4, memoryScaling: 2, filterIndexes: [1]}", 1, 1),
        ("sharing: {splitCount: 4}\nreport: {topologyScore: true}", 1, 1),
        ("# nothing", 0, 0),
        ("sharing: {splitCount: 10, memoryScaling: 1, operatingMode: hami-core}", 0, 0),
    ],
)
async def test_a_change_is_one_list_and_one_write_at_most(tmp_path, change, lists, writes):
    async with a_settings_node(tmp_path) as node:
        await node.edit(own=change)
        assert (lists, writes) == node.count()
        assert ["config.applied"] == node.said("info", "warning", "error")

        await node.edit(own="")
        assert (lists, writes) == node.count()
        assert [] == node.events


@pytest.mark.parametrize(
    ("devices", "own", "said"),
    [
        ("", "", ["config.requests_unchecked"]),
        ("nvidia: {}", "sharing: {memoryFactor: 4}", ["config.requests_unchecked"]),
        ("nvidia: {memoryFactor: 4}", "", []),
        ("", "scheduler: none", []),
    ],
)
async def test_the_start_says_where_no_annotation_is_checked_against_requests(devices, own, said):
    files = [SourceFile(name, text.encode()) for name, text in (("d", devices), ("o", own))]
    room = SettingsRoom(start_of(make_plan(Sources(device_config=files[0], own=files[1]))))
    with structlog.testing.capture_logs() as logs:
        room.service.tell_start(room.start)

    assert said == [line["event"] for line in logs]
    before = room.cells.match.value
    room.service.take(
        make_plan(Sources(device_config=SourceFile("d", b"nvidia: {memoryFactor: 7}")))
    )
    assert 7 == room.cells.match.value.requests.memory_factor
    assert before != room.cells.match.value


BAD = {
    "half": ("nodeconfig", '{"nodeconfig": [{"name": "node-a", "devicesplitc'),
    "slices": ("nodeconfig", '{"nodeconfig": [{"name": "node-1", "devicesplitcount": 100000}]}'),
    "larger": ("nodeconfig", "x" * (1024 * 1024 + 1)),
    "removed": ("nodeconfig", None),
    "own half": ("own", "sharing: {splitCou"),
    "own unknown": ("own", "sharing: {splitCuont: 4}"),
    "own removed": ("own", None),
}


@pytest.mark.parametrize(("file", "text"), BAD.values(), ids=BAD)
async def test_a_bad_file_changes_nothing_and_is_told_once_until_it_is_mended(tmp_path, file, text):
    async with a_settings_node(tmp_path, GOOD) as node:
        before = (tmp_path / file).read_text()
        for _ in range(3):
            await node.service.read(asked=False)
        assert [] == node.said("info", "warning", "error")
        await node.edit(**{file: text})
        await node.service.read(asked=False)
        assert ["config.rejected"] == node.said("info", "warning", "error")
        await node.service.read(asked=True)

        assert 8 == node.facts.sharing.value.split_count
        assert GOOD.encode() == node.service.copy.value.own.content
        assert (0, 0) == node.count()
        assert ["ConfigRejected"] == [event.reason for event in node.events]
        assert str(tmp_path / file) in node.events[0].text
        assert ["config.rejected"] == node.said("info", "warning", "error")
        await node.edit(**{file: before})
        assert ["config.applied"] == node.said("info", "warning", "error")
        await node.edit(**{file: text})
        assert 2 == len(node.events)
        await node.edit(own="sharing: {splitCount: 4}", nodeconfig='{"nodeconfig": []}')
        assert (4, (1, 1)) == (node.facts.sharing.value.split_count, node.count())
        await node.edit(**{file: text})
        assert 3 == len(node.events)


# Another resource name or scheduler is refused until the node is drained, then read again.

OLD, NEW = "nvidia.com/gpu", "example.com/vgpu"
HELD = Ledger((a_row(),))
ANOTHER_NAME = f"sharing: {{resourceName: {NEW}}}"
SOON = PERIOD + 3.0
"""Seconds in which files are read, and the kubelet's calls pause."""


@dataclasses.dataclass
class Written:
    """The settings file as it is now; each read finds the first of `drafts` instead, once."""

    own: str
    drafts: list[str] = dataclasses.field(default_factory=list)
    read_at: list[float] = dataclasses.field(default_factory=list)
    _reads: dict[str, SourcesRead] = dataclasses.field(default_factory=dict)

    async def look(self, last: SourcesRead | None, good: Sources) -> SourcesRead:
        self.read_at.append(asyncio.get_running_loop().time())
        text = self.drafts.pop(0) if self.drafts else self.own
        if text not in self._reads:
            try:
                plan = a_plan(text)
                self._reads[text] = SourcesRead(plan.sources, plan)
            except SettingsError as error:
                self._reads[text] = SourcesRead(Sources(), refusal=error)
        return self._reads[text]


@contextlib.asynccontextmanager
async def a_room(
    ledger: Ledger = HELD, own: str = ""
) -> AsyncIterator[tuple[SettingsRoom, Written]]:
    """A service that starts with these settings and rows on a node that needs no labels."""
    written = Written(own)
    room = SettingsRoom(start_of(a_plan(own)), look=written.look)
    room.ledger.set(ledger)
    room.service.tell_start(room.start)
    async with at_work(*room.tasks):
        await asyncio.sleep(SOON)
        yield room, written


def copied(room: SettingsRoom) -> str:
    copy = room.service.copy.value
    return copy.own.content.decode() if copy and copy.own else ""


def name_of(room: SettingsRoom) -> str:
    cells = room.cells
    names = {cells.resource.value, cells.sharing.value.resource, cells.edits.value.resource}
    (name,) = names
    return name


async def test_while_a_pod_holds_slices_another_name_is_told_once_and_the_old_one_stays():
    async with a_room() as (room, written):
        written.own = ANOTHER_NAME
        for _ in range(2):
            await room.service.read()

        assert OLD == name_of(room)
        (event,) = room.told
        assert ("ConfigRejected", True) == (event.reason, event.warning)
        assert event.text.startswith(
            f"c.yaml:1:25: sharing.resourceName cannot change from {OLD} to {NEW} while pods hold "
            "slices;"
        )
        assert event.text == room.trouble


async def test_with_the_last_row_the_name_comes_by_itself():
    async with a_room() as (room, written):
        written.own = ANOTHER_NAME
        await room.service.read()
        room.ledger.set(Ledger((a_row(pod="other"),)))
        await asyncio.sleep(SOON)
        assert OLD == name_of(room)

        room.ledger.set(Ledger())
        await asyncio.sleep(SOON)

        assert (NEW, ANOTHER_NAME, "") == (name_of(room), copied(room), room.trouble)
        assert 1 == len(room.told)


@pytest.mark.parametrize(("meanwhile", "told"), [("", 1), ("sharing: 7", 2)])
async def test_a_name_that_was_put_back_or_broken_does_not_come_with_the_last_row(meanwhile, told):
    async with a_room() as (room, written):
        for written.own in (ANOTHER_NAME, meanwhile):
            await room.service.read()
        assert (meanwhile != "") == room.trouble.startswith("c.yaml:1:10: keys and values")
        room.ledger.set(Ledger())
        await asyncio.sleep(SOON)
        assert (OLD, told) == (name_of(room), len(room.told))

        written.own = ANOTHER_NAME
        await asyncio.sleep(SOON)
        assert (NEW, "") == (name_of(room), room.trouble)


async def test_an_answer_that_is_under_way_counts_before_its_row_does():
    async with a_room(Ledger()) as (room, written):
        written.own = ANOTHER_NAME
        async with asyncio.TaskGroup() as group:
            with room.calls.busy():
                group.create_task(room.service.read())
                await asyncio.sleep(1)
                assert OLD == name_of(room)
                room.ledger.set(HELD)

        assert (OLD, 1) == (name_of(room), len(room.told))


async def test_a_new_name_comes_between_two_admissions_and_not_within_one():
    """The Allocate of a pod comes some time after its preference."""
    async with a_room(Ledger()) as (room, written):
        written.own = ANOTHER_NAME
        async with asyncio.TaskGroup() as group:
            with room.calls.busy():
                group.create_task(room.service.read())
                await asyncio.sleep(0)
            await asyncio.sleep(PREFERENCE_FOLLOWED / 2)
            assert OLD == name_of(room)

        assert NEW == name_of(room)


async def test_calls_without_a_pause_hold_up_a_name_and_no_other_settings_and_it_is_tried_again():
    async with a_room(Ledger()) as (room, written):
        written.own = ANOTHER_NAME
        with room.calls.busy():
            await asyncio.sleep(3 * PERIOD)
            assert OLD == name_of(room)

            written.own = "sharing: {splitCount: 4}"
            await asyncio.sleep(3 * PERIOD)
            assert 4 == room.split_count
            written.own = ANOTHER_NAME
            await asyncio.sleep(SOON)
        await asyncio.sleep(2 * PERIOD)

        assert NEW == name_of(room)


@pytest.mark.parametrize(
    ("before", "after", "ledger"),
    [
        ("scheduler: hami", "scheduler: none", HELD),
        ("scheduler: none", "scheduler: hami", Ledger((a_plain_row(),))),
    ],
)
async def test_another_scheduler_waits_for_the_drain_and_then_for_the_restart(
    before, after, ledger
):
    async with a_room(ledger, before) as (room, written):
        with structlog.testing.capture_logs() as logs:
            written.own = after
            await room.service.read()
            assert "config.needs_restart" not in [line["event"] for line in logs]

            room.ledger.set(Ledger())
            await asyncio.sleep(SOON)

        (line,) = [line for line in logs if line["event"] == "config.needs_restart"]
        assert ["scheduler"] == line["settings"]
        assert "restart the agent" in line["what"]


# Files are read every five seconds, at once on demand, and what is half written is not taken.

FOUR, FIVE, SIX = (f"sharing: {{splitCount: {count}}}" for count in (4, 5, 6))


async def test_what_changed_while_the_agent_stood_by_is_read_at_once():
    written = Written(FOUR)
    room = SettingsRoom(start_of(a_plan("")), look=written.look)
    async with at_work(*room.tasks):
        await asyncio.sleep(2 * STILL)

    assert 4 == room.split_count


async def test_a_change_is_taken_once_two_reads_find_the_same():
    async with a_room(Ledger()) as (room, written):
        written.own, written.drafts = SIX, [FOUR, "sharing: {splitCou", FIVE]
        await asyncio.sleep(2 * PERIOD)
        assert ([], []) == (room.refreshed, room.told)
        await asyncio.sleep(PERIOD)

        assert ([6], []) == (room.refreshed, room.told)
        assert pytest.approx(STILL) == written.read_at[-1] - written.read_at[-2]


@pytest.mark.parametrize("drafts", [[], [FOUR]], ids=["at rest", "half written"])
async def test_who_asks_does_not_wait(drafts):
    async with a_room(Ledger()) as (room, written):
        written.own, written.drafts = SIX, list(drafts)
        loop = asyncio.get_running_loop()
        if drafts:
            await asyncio.sleep(written.read_at[-1] + PERIOD + STILL / 2 - loop.time())
        began = loop.time()
        room.asked.set()
        await asyncio.sleep(STILL / 10)

        assert (began, [6]) == (written.read_at[-1], room.refreshed)
        assert ["reloading", "ready"] == room.systemd.said
