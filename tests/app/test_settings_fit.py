"""Settings in force: they fit the GPUs and follow the labels; what is good is kept on disk."""

import asyncio
import json

import msgspec
import pytest
import structlog
from typing_extensions import override

from agent.app.settings import RETRY
from agent.cluster import NodeView
from agent.errors import SettingsError
from agent.ledger import LastGood, SourceFile
from agent.model import GpuFault, Scan
from agent.settings.reading import begin
from agent.settings.sources import Sources
from agent.settings.values import make_plan
from agent.state import decode_last_good
from tests.app.settings_room import SettingsRoom, a_plan, a_settings_node, start_of
from tests.builders import a_gpu
from tests.fakes.disk import MemoryDisk
from tests.fakes.offload import Inline
from tests.services.at_work import at_work

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
LONG = "sharing: {splitCount: 9000}"
"""Too many slices for eight GPUs, and few enough for six."""


def a_scan(*models: str) -> Scan:
    return Scan("570", tuple(a_gpu(index=n, name=name) for n, name in enumerate(models)))


def t4(count: int, first: int = 0) -> Scan:
    scan = a_scan(*["Tesla T4"] * count)
    return msgspec.structs.replace(scan, gpus=scan.gpus[first:])


def a_node(**labels: str) -> NodeView:
    return NodeView("node-a", "uid", "1", labels=labels)


def room_of(text: str = OWN) -> SettingsRoom:
    return SettingsRoom(start_of(a_plan(text)))


def taken(room: SettingsRoom, *texts: str, asked: bool = False) -> list[str]:
    """The log's events when these settings are read."""
    with structlog.testing.capture_logs() as lines:
        for text in texts:
            room.service.take(a_plan(text), asked=asked)
    return [line["event"] for line in lines]


async def test_labels_are_followed_and_a_node_unseen_keeps_its_last_ones():
    room = room_of()
    async with at_work(room.service.run):
        await asyncio.sleep(0.01)
        assert (10, False) == (room.split_count, room.service.labelled.is_set())
        for node, count in ((a_node(pool="big"), 20), (None, 20), (a_node(pool="small"), 10)):
            room.cells.node.set(node)
            await asyncio.sleep(0.01)
            assert (count, True) == (room.split_count, room.service.labelled.is_set())
            is_big = count == 20
            assert is_big == room.cells.report.value.topology_score
            assert ("4" if is_big else "1") == room.cells.edits.value.cuda_log_level
    assert [20, 10] == room.refreshed


async def test_a_reload_is_resolved_for_the_facts_that_are_known():
    room = room_of()
    room.service.recall(LastGood("0.1.0", "node-a", labels={"pool": "t4"}))

    taken(room, OWN.replace("splitCount: 2}", "splitCount: 3}"))

    assert (3, []) == (room.split_count, room.told)


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


async def test_no_entry_of_another_node_applies_before_the_start_under_its_name():
    room = room_of()
    entry = b'{"nodeconfig": [{"name": "other", "devicesplitcount": 4}]}'
    own, nodes = SourceFile("c.yaml", RENAMED.encode()), SourceFile("n.json", entry)

    room.service.take(make_plan(Sources(own=own, node_config=nodes, host="node-a")))

    assert 10 == room.split_count


async def test_warnings_are_told_and_a_megabyte_of_them_is_a_few_lines():
    keys = {"nodeconfig": [], **{f"key{number:06}": 1 for number in range(70_000)}}
    junk = SourceFile("n.json", json.dumps(keys).encode())

    with structlog.testing.capture_logs() as lines:
        room_of().service.take(make_plan(Sources(node_config=junk, host="node-a")))

    assert "unknown key `key000000`" in lines[0]["what"]
    assert len(lines) < 30


# GPUs that the list has no room for.


async def test_a_list_too_long_for_the_first_gpus_stops_the_process_with_the_reason():
    room = room_of(LONG)

    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            assert not room.service.saw_gpus(t4(8))

    assert [] == lines  # whoever ends says why, in one line
    assert room.stop.is_set()
    assert isinstance(room.service.refusal, SettingsError)
    assert ["ConfigRejected"] == [event.reason for event in room.told]


@pytest.mark.parametrize(
    ("scans", "listed", "told"),
    [
        ((t4(6), t4(8), t4(8)), t4(6), 1),
        ((t4(6), t4(8, first=1)), t4(6, first=1), 1),  # one goes while others come
        ((t4(6), t4(8), t4(8, first=3), t4(8)), t4(8, first=3), 2),
        ((t4(6), t4(8), t4(5), t4(8)), t4(5), 2),
    ],
)
async def test_gpus_that_make_the_list_too_long_later_are_not_taken_in_and_told_once(
    scans, listed, told
):
    room = room_of(LONG)
    for scan in scans:
        found = room.service.saw_gpus(scan)

    assert listed.gpus == found.gpus
    others = [gpu.uuid for gpu in scans[-1].gpus if gpu not in listed.gpus]
    assert others == [fault.gpu for fault in found.faults]
    assert (told, False) == (len(room.told), room.stop.is_set())
    assert room.told[0].text == room.service.trouble
    taken(room, "sharing: {splitCount: 10}")
    assert "" == room.service.trouble
    assert scans[-1] == room.service.saw_gpus(scans[-1])


async def test_a_gpu_that_does_not_answer_takes_room_in_the_list():
    room = room_of(LONG)
    room.service.saw_gpus(t4(6))
    scan = t4(7, first=1)
    fault = GpuFault(t4(1).gpus[0].uuid, "silent")

    found = room.service.saw_gpus(msgspec.structs.replace(scan, faults=(fault,)))

    assert found is not None
    assert scan.gpus[:5] == found.gpus
    assert [fault.gpu, scan.gpus[5].uuid] == [one.gpu for one in found.faults]


async def test_settings_that_do_not_fit_change_nothing_and_who_asks_is_answered_each_time():
    room = room_of()
    room.service.saw_gpus(t4(8))

    assert ["config.rejected"] == taken(room, LONG, LONG)
    assert 2 * ["config.rejected"] == taken(room, LONG, LONG, asked=True)
    assert 10 == room.split_count
    (event,) = room.told
    assert "ConfigRejected" == event.reason
    assert "8 GPUs x 9000 slices" in event.text


# The last good copy on disk.

ONE = LastGood("0.1.0", "node-a")
OTHER = LastGood("0.1.0", "node-a", {"pool": "big"})


class Shelf(MemoryDisk):
    """A disk that remembers each write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    @override
    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        assert ("settings.json", None) == (name, keep)
        await super().replace(name, data)
        self.written.append(data)


@pytest.mark.parametrize(
    ("stored", "steps", "kept"),
    [
        (None, [ONE, ONE, OTHER], [ONE, OTHER]),
        (ONE, [ONE], []),
        (None, ["full", ONE, OTHER, "free"], [OTHER]),
    ],
)
async def test_the_copy_is_written_when_it_changed_and_a_failed_write_is_said_once(
    stored, steps, kept
):
    disk = Shelf()
    room = SettingsRoom(start_of(a_plan("")), disk=disk)
    room.service.recall(stored)
    with structlog.testing.capture_logs() as logs:
        async with at_work(room.service.run):
            for step in steps:
                if isinstance(step, str):
                    disk.files.full = step == "full"
                else:
                    room.service.copy.set(step)
                await asyncio.sleep(2 * RETRY)

    assert kept == [decode_last_good(one) for one in disk.written]
    said = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert ["config.copy_unwritable"] * ("full" in steps) == said


# Entries of HAMi's config.json by label selector: when labels come, change, or never come.


def by(pool: str, **more: object) -> dict[str, object]:
    return {"nodelabelselector": {"matchLabels": {"Pool": pool}}, **more}


BIG, SMALL = by("big", devicesplitcount=20), by("small", devicesplitcount=10**6)
ANY = {"name": "*", "devicesplitcount": 5}


def text(*entries: object) -> str:
    return json.dumps({"nodeconfig": entries})


async def room_with(tmp_path, *entries: object) -> SettingsRoom:
    (tmp_path / "n.json").write_text(text(*entries))
    flags = {"--nodeconfig": f"{tmp_path}/n.json", "--device-config": ""}
    start = await begin(Sources(None, {}, flags, "node-a"), Inline(), Inline())
    return SettingsRoom(start_of(start.taken()))


@pytest.mark.parametrize(("after", "waited"), [(0.5, 0.5), (1.9, 1.9), (60.0, 2.0)])
async def test_the_first_start_waits_two_seconds_for_the_node(
    tmp_path, after: float, waited: float
):
    room = await room_with(tmp_path, BIG, ANY)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    async with at_work(room.service.run):
        loop.call_later(after, room.cells.node.set, a_node(Pool="big"))
        with structlog.testing.capture_logs() as logs:
            await room.service.await_labels()
        assert waited == pytest.approx(loop.time() - begun, abs=0.05)
        assert (after > 2) == ("config.labels_unknown" in [line["event"] for line in logs])
        assert room.service.saw_gpus(a_scan("NVIDIA H100"))
        assert (20 if after < 2 else 5) == room.split_count
        await asyncio.sleep(61)
        assert 20 == room.split_count


@pytest.mark.parametrize(
    ("entries", "stored"),
    [
        ((BIG, ANY), LastGood("0.0.9", "node-a", {"Pool": "big"})),
        (({"name": "node-a", "devicesplitcount": 20}, ANY), None),
        ((by("", nodelabelselector={}, devicesplitcount=20), ANY), None),
    ],
)
async def test_nothing_waits_where_labels_are_kept_or_decide_nothing(tmp_path, entries, stored):
    room = await room_with(tmp_path, *entries)
    room.service.recall(stored)
    begun = asyncio.get_running_loop().time()
    await room.service.await_labels()

    assert begun == asyncio.get_running_loop().time()
    assert room.service.saw_gpus(a_scan("NVIDIA H100"))
    assert 20 == room.split_count


async def test_labels_that_lead_to_a_wrong_entry_change_nothing_until_it_is_mended(tmp_path):
    async with a_settings_node(tmp_path, labels={"Pool": "big"}) as node:
        await node.edit(nodeconfig=text(BIG, SMALL, ANY))
        assert (1, 1) == node.count()
        assert ["config.ignored", "config.applied"] == node.said("info", "warning", "error")

        node.api.label_node({"Pool": "small"})
        await node.edit()
        assert (0, 0) == node.count()
        assert 20 == node.facts.sharing.value.split_count
        assert ["ConfigRejected"] == [event.reason for event in node.events]
        assert "splitCount: expected 1 to 10000" in node.service.trouble

        await node.edit(nodeconfig=text(BIG, by("small", devicesplitcount=7), ANY))
        assert (1, 1) == node.count()
        assert 7 == node.facts.sharing.value.split_count
        assert "" == node.service.trouble


async def test_a_wrong_entry_of_another_node_is_a_warning_and_the_file_is_taken(tmp_path):
    async with a_settings_node(tmp_path) as node:
        wrong = {"name": "other", "operatingmode": "fast"}
        await node.edit(nodeconfig=text(wrong, {"name": "other", "operatingmode": "remote"}, ANY))

        assert 5 == node.facts.sharing.value.split_count
        assert [] == node.events
        assert 3 * ["config.ignored"] + ["config.applied"] == node.said("info", "warning", "error")


@pytest.mark.parametrize("has_copy", [True, False])
async def test_a_start_with_a_wrong_entry_takes_the_last_good_file_or_ends(tmp_path, has_copy):
    good = SourceFile(f"{tmp_path}/n.json", text(by("small", devicesplitcount=8)).encode())
    stored = LastGood("0.0.9", "node-a", {"Pool": "small"}, node_config=good)
    room = await room_with(tmp_path, BIG, SMALL, ANY)
    room.service.recall(stored if has_copy else None)
    async with at_work(room.service.run):
        asyncio.get_running_loop().call_later(0.5, room.cells.node.set, a_node(Pool="small"))
        await room.service.await_labels()
        assert has_copy == bool(room.service.saw_gpus(a_scan("NVIDIA H100")))

    assert ["ConfigRejected"] == [event.reason for event in room.told]
    assert has_copy != room.stop.is_set()
    if has_copy:
        assert 8 == room.split_count
    else:
        assert "splitCount: expected 1 to 10000" in str(room.service.refusal)
