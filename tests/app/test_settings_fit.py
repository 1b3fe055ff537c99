"""Settings in force: they fit the GPUs and follow the labels; what is good is kept on disk."""

import asyncio
import json

import msgspec
import pytest
import structlog

from agent.cluster import NodeView
from agent.errors import SettingsError
from agent.ledger import LastGood, SourceFile
from agent.model import Scan
from agent.settings.reading import begin, make_plan
from agent.settings.sources import Sources
from agent.state import LAST_GOOD_KIND, unseal
from tests.app.settings_room import GPUS_8, SettingsRoom, a_plan, a_settings_node, start_of
from tests.builders import NODE, a_gpu, a_uuid
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
    async with at_work(*room.tasks):
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
        ((t4(6), t4(8), t4(6), t4(8)), t4(6), 2),
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
    assert room.told[0].text == room.trouble
    taken(room, "sharing: {splitCount: 10}")
    assert "" == room.trouble
    assert scans[-1] == room.service.saw_gpus(scans[-1])


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


def text(*entries: object) -> str:
    return json.dumps({"nodeconfig": entries})


async def room_with(tmp_path, *entries: object, stored: LastGood | None = None) -> SettingsRoom:
    (tmp_path / "n.json").write_text(text(*entries))
    flags = {"--nodeconfig": f"{tmp_path}/n.json", "--device-config": ""}
    start = await begin(Sources(None, {}, flags, "node-a"), Inline(), Inline())
    return SettingsRoom(start_of(start.taken()), stored=stored)


@pytest.mark.parametrize(("after", "waited"), [(0.5, 0.5), (1.9, 1.9), (60.0, 2.0)])
async def test_the_first_start_waits_two_seconds_for_the_node(
    tmp_path, after: float, waited: float
):
    room = await room_with(tmp_path, BIG, ANY)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    async with at_work(*room.tasks):
        loop.call_later(after, room.cells.node.set, a_node(Pool="big"))
        with structlog.testing.capture_logs() as logs:
            await room.service.await_labels()
        assert waited == pytest.approx(loop.time() - begun, abs=0.05)
        assert (after > 2) == ("config.labels_unknown" in [line["event"] for line in logs])
        assert room.service.saw_gpus(a_scan("NVIDIA H100"))
        assert (20 if after < 2 else 5) == room.split_count
        await asyncio.sleep(61)
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
        assert "splitCount: expected 1 to 10000" in node.room.trouble

        await node.edit(nodeconfig=text(BIG, by("small", devicesplitcount=7), ANY))
        assert (1, 1) == node.count()
        assert 7 == node.facts.sharing.value.split_count
        assert "" == node.room.trouble


@pytest.mark.parametrize("has_copy", [True, False])
async def test_a_start_with_a_wrong_entry_takes_the_last_good_file_or_ends(tmp_path, has_copy):
    good = SourceFile(f"{tmp_path}/n.json", text(by("small", devicesplitcount=8)).encode())
    stored = LastGood("0.0.9", "node-a", {"Pool": "small"}, node_config=good)
    room = await room_with(tmp_path, BIG, SMALL, ANY, stored=stored if has_copy else None)
    async with at_work(*room.tasks):
        asyncio.get_running_loop().call_later(0.5, room.cells.node.set, a_node(Pool="small"))
        await room.service.await_labels()
        assert has_copy == bool(room.service.saw_gpus(a_scan("NVIDIA H100")))

    assert ["ConfigRejected"] == [event.reason for event in room.told]
    assert has_copy != room.stop.is_set()
    if has_copy:
        assert room.told[0].text == room.trouble
        assert 8 == room.split_count
    else:
        assert "splitCount: expected 1 to 10000" in str(room.service.refusal)


# Settings that change while the agent runs: one list and one write for all of it, or none.
#
# And whatever is wrong with the files, what was good stays: one Event, one line in the log.


GPU = a_uuid(0)
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


async def test_a_lowered_split_count_shrinks_by_draining(tmp_path):
    async with a_settings_node(tmp_path, "sharing: {splitCount: 10}") as node:
        await node.hold(*((GPU, n) for n in (1, 5, 9)))
        node.count()

        await node.edit(own="sharing: {splitCount: 2}")
        group = node.lists[-1].groups[0]
        assert [f"{GPU}-{n}" for n in (1, 5, 9)] == list(group.ids)
        assert (1, 1) == node.count()

        await node.hold((GPU, 9))
        assert [f"{GPU}-{n}" for n in (0, 9)] == list(node.lists[-1].groups[0].ids)
        assert (1, 0) == node.count()


BAD = {
    "half": '{"nodeconfig": [{"name": "node-a", "devicesplitc',
    "type": '{"nodeconfig": [{"name": "node-a", "devicesplitcount": "many"}]}',
    "slices": '{"nodeconfig": [{"name": "node-1", "devicesplitcount": 1000000000}]}',
    "junk": "\x00" * (1024 * 1024),
    "larger": "x" * (1024 * 1024 + 1),
    "empty": "",
    "removed": None,
}
OWN_BAD = {
    "half": "sharing: {splitCou",
    "unknown": "sharing: {splitCuont: 4}",
    "list": "sharing: {splitCount: 10000}",
    "removed": None,
}


@pytest.mark.parametrize(
    ("file", "text"),
    [("nodeconfig", text) for text in BAD.values()] + [("own", text) for text in OWN_BAD.values()],
    ids=[*BAD, *(f"own-{kind}" for kind in OWN_BAD)],
)
async def test_a_bad_file_changes_nothing_and_is_told_once_until_it_is_mended(tmp_path, file, text):
    async with a_settings_node(tmp_path, GOOD) as node:
        before = (tmp_path / file).read_text()
        if text == OWN_BAD["list"]:  # 8 GPUs are too many for it, and 4 are not
            node.service.saw_gpus(GPUS_8)
        for _ in range(3):
            await node.service.read(asked=False)
        assert [] == node.said("info", "warning", "error")
        await node.edit(**{file: text})
        await node.service.read(asked=False)

        assert 8 == node.facts.sharing.value.split_count
        assert (0, 0) == node.count()
        assert ["ConfigRejected"] == [event.reason for event in node.events]
        assert str(tmp_path / file) in node.events[0].text
        assert ["config.rejected"] == node.said("info", "warning", "error")
        await node.edit(**{file: before})
        assert ["config.unchanged"] == node.said("info", "warning", "error")
        await node.edit(**{file: text})
        assert 2 == len(node.events)
        await node.edit(own="sharing: {splitCount: 4}", nodeconfig='{"nodeconfig": []}')
        assert (4, (1, 1)) == (node.facts.sharing.value.split_count, node.count())
        await node.edit(**{file: text})
        assert 3 == len(node.events)


async def test_the_copy_follows_what_is_in_force(tmp_path):
    async with a_settings_node(tmp_path, GOOD) as node:
        file = str(tmp_path / "own")

        def kept() -> tuple[object, object]:
            copy = node.service.copy.value
            assert copy is not None
            assert NODE == copy.node
            return copy.own, copy.labels

        assert (SourceFile(file, GOOD.encode()), {}) == kept()
        node.api.label_node({"pool": "big"})
        await node.edit(own="sharing: {splitCount: many}")
        assert (SourceFile(file, GOOD.encode()), {"pool": "big"}) == kept()
        await node.edit(own="sharing: {splitCount: 3}")
        assert (SourceFile(file, b"sharing: {splitCount: 3}"), {"pool": "big"}) == kept()


async def test_a_file_that_does_not_fit_the_gpus_at_the_start_gives_way_to_the_copy(tmp_path):
    stored = LastGood("0.0.9", NODE, own=SourceFile(f"{tmp_path}/own", GOOD.encode()))
    async with a_settings_node(
        tmp_path, "sharing: {splitCount: 10000}", stored, scan=GPUS_8
    ) as node:
        assert 8 == node.facts.sharing.value.split_count
        assert node.service.refusal is None
        assert ["ConfigRejected"] == [event.reason for event in node.events]
        await node.service.read(asked=False)
        assert 1 == len(node.events)

        await node.edit(own="sharing: {splitCount: 5}")
        assert (1, 1) == node.count()


@pytest.mark.parametrize("own", ["sharing: {splitCount: 9999}", "sharing: {splitCount: many}"])
async def test_a_copy_that_does_not_fit_either_stops_the_process(tmp_path, own):
    stored = LastGood("0.0.9", NODE, own=SourceFile(f"{tmp_path}/own", own.encode()))
    many = "sharing: {splitCount: 10000}"
    async with a_settings_node(tmp_path, many, stored, scan=GPUS_8) as node:
        assert node.room.stop.is_set()
        assert "10000" in str(node.service.refusal)
        assert [] == node.lists
        assert node.service.copy.value is None
