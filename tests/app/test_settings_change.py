"""Settings that change while the agent runs: one list and one write for all of it, or none.

And whatever is wrong with the files, what was good stays: one Event, one line in the log.
"""

import pytest
import structlog

from agent.ledger import LastGood, SourceFile
from agent.settings.sources import Sources
from agent.settings.values import make_plan
from tests.app.settings_room import GPUS_8, SettingsRoom, a_settings_node, start_of
from tests.builders import NODE, a_uuid

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


async def test_a_filtered_gpu_stays_listed_until_its_last_slice_is_free(tmp_path):
    async with a_settings_node(tmp_path) as node:
        await node.hold((GPU, 0))
        node.count()

        await node.edit(own="sharing: {filterIndexes: [0]}")
        assert [False, True, True, True] == [one.healthy for one in node.lists[-1].groups]
        assert (1, 1) == node.count()

        await node.hold()
        assert 3 == len(node.lists[-1].groups)
        assert (1, 1) == node.count()


async def test_who_asks_is_answered_and_systemd_too(tmp_path):
    async with a_settings_node(tmp_path, GOOD) as node:
        await node.edit(asked=True)
        assert ["config.unchanged"] == node.said("info", "warning", "error")
        await node.edit(asked=True, own="sharing: {splitCount: many}")

        assert ["reloading", "ready"] * 2 == node.room.systemd.said
        assert (0, 0) == node.count()


BAD = {
    "half": '{"nodeconfig": [{"name": "node-a", "devicesplitc',
    "type": '{"nodeconfig": [{"name": "node-a", "devicesplitcount": "many"}]}',
    "type-deep": '{"nodeconfig": [{"name": "a", "filterdevices": {"uuid": [1]}}]}',
    "twice": '{"nodeconfig": [{"name": "a", "name": "b"}]}',
    "nan": '{"nodeconfig": [{"name": "a", "devicememoryscaling": NaN}]}',
    "infinity": '{"nodeconfig": [{"name": "a", "devicememoryscaling": 1e999}]}',
    "negative": '{"nodeconfig": [{"name": "node-1", "devicememoryscaling": -1}]}',
    "slices": '{"nodeconfig": [{"name": "node-1", "devicesplitcount": 1000000000}]}',
    "junk": "\x00" * (1024 * 1024),
    "larger": "x" * (1024 * 1024 + 1),
    "empty": "",
    "removed": None,
}
OWN_BAD = {
    "half": "sharing: {splitCou",
    "type": "sharing: 7",
    "unknown": "sharing: {splitCuont: 4}",
    "twice": "sharing: {splitCount: 4}\nsharing: {splitCount: 5}",
    "nan": "sharing: {memoryScaling: .nan}",
    "negative": "sharing: {splitCount: -1}",
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


POOL = "profiles: [{name: p, match: {labels: pool=big}, sharing: {splitCount: 3}}]\n"


@pytest.mark.parametrize(("name", "slices"), [(NODE, 3), ("another", 10)])
async def test_labels_of_the_last_run_hold_in_the_first_list(tmp_path, name, slices):
    stored = LastGood("0.0.9", name, {"pool": "big"})
    async with a_settings_node(tmp_path, POOL, stored, labels={"pool": "big"}) as node:
        assert slices == len(node.first.groups[0].ids)
        assert 3 == node.facts.sharing.value.split_count


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
