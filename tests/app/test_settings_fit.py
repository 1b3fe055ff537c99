"""Settings in force: they fit the GPUs and follow the labels; what is good is kept on disk."""

import asyncio
import json

import pytest
import structlog

from agent.ledger import LastGood, SourceFile
from agent.settings.reading import Sources, begin, make_plan
from agent.state import LAST_GOOD_KIND, unseal
from tests.app.settings_room import SettingsRoom, a_plan, a_settings_node, start_of
from tests.builders import a_uuid
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
