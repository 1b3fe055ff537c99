"""The settings fit the node: profiles apply when labels are known, and follow them."""

import asyncio
import json

import msgspec
import pytest
import structlog

from agent.cluster import NodeView
from agent.errors import SettingsError
from agent.ledger import LastGood, SourceFile
from agent.model import Scan
from agent.settings.sources import Sources
from agent.settings.values import make_plan
from tests.app.settings_room import SettingsRoom, a_plan, start_of
from tests.builders import a_gpu

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


def a_scan(*models: str) -> Scan:
    return Scan("570", tuple(a_gpu(index=n, name=name) for n, name in enumerate(models)))


def a_node(**labels: str) -> NodeView:
    return NodeView("node-a", "uid", "1", labels=labels)


def room_of(text: str = OWN) -> SettingsRoom:
    return SettingsRoom(start_of(a_plan(text)))


async def settle() -> None:
    await asyncio.sleep(0.01)


async def test_gpus_that_are_away_take_no_room_in_the_list_and_none_when_they_are_back_too_many():
    room = room_of("sharing: {splitCount: 9000}")
    eight = a_scan(*["Tesla T4"] * 8)
    room.service.saw_gpus(msgspec.structs.replace(eight, gpus=eight.gpus[:6]))
    room.service.saw_gpus(eight)
    assert room.service.saw_gpus(msgspec.structs.replace(eight, gpus=eight.gpus[3:]))

    listed = room.service.saw_gpus(eight)

    assert listed is not None
    assert eight.gpus[3:] == listed.gpus


async def test_labels_are_followed_and_a_node_unseen_keeps_its_last_ones():
    room = room_of()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(room.service.run())
        await settle()
        assert 10 == room.split_count
        assert not room.service.labelled.is_set()

        room.cells.node.set(a_node(pool="big"))
        await settle()
        assert room.service.labelled.is_set()
        assert [20] == room.refreshed
        assert 20 == room.split_count
        assert "4" == room.cells.edits.value.cuda_log_level
        assert room.cells.report.value.topology_score

        room.cells.node.set(None)
        await settle()
        assert 20 == room.split_count

        room.cells.node.set(a_node(pool="small"))
        await settle()
        assert 10 == room.split_count
        following.cancel()


async def test_a_reload_is_resolved_for_the_facts_that_are_known():
    room = room_of()
    copy = LastGood("0.1.0", "node-a", labels={"pool": "t4"})
    room.service.recall(copy)

    room.service.take(a_plan(OWN.replace("splitCount: 2}", "splitCount: 3}")))

    assert 3 == room.split_count
    assert [] == room.told


async def test_another_hook_path_acts_at_the_next_start_which_is_said():
    room = room_of()

    with structlog.testing.capture_logs() as lines:
        room.service.take(a_plan(OWN + "library: {hookPath: /opt/hami, cudaLogLevel: '3'}\n"))

    assert [["library.hookPath"]] == [line["settings"] for line in lines if "settings" in line]
    assert "3" == room.cells.edits.value.cuda_log_level


async def test_a_reload_tells_what_was_passed_over(capsys):
    warned = Sources(device_config=SourceFile("d.yaml", b"nvidia: {colour: red}"))

    room_of().service.take(make_plan(msgspec.structs.replace(warned, host="node-a")))

    assert "unknown key `colour`" in capsys.readouterr().out


async def test_a_list_too_long_for_the_first_gpus_stops_the_process_with_the_reason():
    room = room_of("sharing: {splitCount: 9000}")

    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            assert not room.service.saw_gpus(a_scan(*["Tesla T4"] * 8))

    assert [] == lines  # whoever ends says why, in one line
    assert room.stop.is_set()
    assert isinstance(room.service.refusal, SettingsError)
    assert ["ConfigRejected"] == [event.reason for event in room.told]


async def test_gpus_that_make_the_list_too_long_later_are_not_taken_in_and_told_once():
    room = room_of("sharing: {splitCount: 9000}")
    assert room.service.saw_gpus(a_scan(*["Tesla T4"] * 6))

    later = a_scan(*["Tesla T4"] * 8)
    for _ in range(2):
        listed = room.service.saw_gpus(later)
        assert listed is not None
        assert later.gpus[:6] == listed.gpus
        assert [gpu.uuid for gpu in later.gpus[6:]] == [fault.gpu for fault in listed.faults]

    assert not room.stop.is_set()
    assert 1 == len(room.told)
    room.service.take(a_plan("sharing: {splitCount: 10}"))
    assert room.service.saw_gpus(a_scan(*["Tesla T4"] * 8))


async def test_a_gpu_that_goes_is_gone_though_others_came_that_the_settings_do_not_fit():
    room = room_of("sharing: {splitCount: 9000}")
    assert room.service.saw_gpus(a_scan(*["Tesla T4"] * 6))
    later = a_scan(*["Tesla T4"] * 8)

    listed = room.service.saw_gpus(msgspec.structs.replace(later, gpus=later.gpus[1:]))

    assert listed is not None
    assert later.gpus[1:6] == listed.gpus


async def test_gpus_that_fitted_in_between_are_told_again():
    room = room_of("sharing: {splitCount: 9000}")
    for models in (6, 8, 5, 8):
        room.service.saw_gpus(a_scan(*["Tesla T4"] * models))

    assert 2 == len(room.told)


async def test_a_reload_that_does_not_fit_the_gpus_changes_nothing():
    room = room_of()
    room.service.saw_gpus(a_scan(*["NVIDIA H100"] * 8))

    room.service.take(a_plan("sharing: {splitCount: 9000}"))

    assert 10 == room.split_count
    assert ["ConfigRejected"] == [event.reason for event in room.told]
    assert "8 GPUs x 9000 slices" in room.told[0].text


@pytest.mark.parametrize("text", ["node: {name: other}", "web: {port: 1}"])
async def test_what_acts_only_at_the_next_start_is_left_as_it_is(text: str):
    room = room_of()
    room.service.take(a_plan(text))
    assert 10 == room.split_count
    assert [] == room.told


RENAMED = """
node: {name: other}
profiles:
- {name: other, match: {nodes: [other]}, sharing: {splitCount: 3}}
- {name: same, match: {nodes: [node-a]}, sharing: {memoryScaling: 2}}
"""


async def test_another_node_name_acts_at_the_next_start_and_no_profile_of_that_node_before():
    room = room_of()
    entry = b'{"nodeconfig": [{"name": "other", "devicesplitcount": 4}]}'
    given = Sources(
        own=SourceFile("c.yaml", RENAMED.encode()), node_config=SourceFile("n.json", entry)
    )

    with structlog.testing.capture_logs() as lines:
        room.service.take(make_plan(msgspec.structs.replace(given, host="node-a")))

    sharing = room.cells.sharing.value
    assert (10, 2.0) == (sharing.split_count, sharing.memory_scaling)
    (told,) = [line for line in lines if line["event"] == "config.needs_restart"]
    assert ("warning", ["node.name"]) == (told["log_level"], told["settings"])


async def test_the_name_that_the_node_has_already_needs_no_restart():
    room = room_of()

    with structlog.testing.capture_logs() as lines:
        room.service.take(a_plan("node: {name: node-a}"))

    assert ["config.applied"] == [line["event"] for line in lines]


async def test_another_resource_name_is_taken_over_and_needs_no_restart():
    room = room_of()

    with structlog.testing.capture_logs() as lines:
        room.service.take(a_plan("sharing: {resourceName: example.com/vgpu}"))

    assert "example.com/vgpu" == room.cells.sharing.value.resource
    assert "example.com/vgpu" == room.cells.edits.value.resource
    assert ["config.applied"] == [line["event"] for line in lines]


@pytest.mark.parametrize("key", ["nodeConfig", "deviceConfig"])
async def test_another_path_of_a_file_is_read_at_once_and_needs_no_restart(key: str):
    room = room_of()

    with structlog.testing.capture_logs() as lines:
        room.service.take(a_plan(f"files: {{{key}: /elsewhere}}"))

    assert ["config.applied"] == [line["event"] for line in lines]


async def test_who_asks_while_settings_are_refused_is_answered_each_time_and_the_event_is_one():
    room = room_of()
    error = SettingsError("c.yaml:1:1: no")

    with structlog.testing.capture_logs() as lines:
        room.service.reject(error)
        room.service.reject(error)
        room.service.reject(error, asked=True)
        room.service.reject(error, asked=True)

    assert 3 * ["config.rejected"] == [line["event"] for line in lines]
    assert 1 == len(room.told)


async def test_who_asks_while_settings_do_not_fit_the_gpus_is_answered_each_time():
    room = room_of()
    room.service.saw_gpus(a_scan(*["NVIDIA H100"] * 8))

    with structlog.testing.capture_logs() as lines:
        for asked in (False, True):
            room.service.take(a_plan("sharing: {splitCount: 9000}"), asked=asked)

    assert 2 * ["config.rejected"] == [line["event"] for line in lines]
    assert 1 == len(room.told)


async def test_a_megabyte_of_unknown_keys_is_a_few_lines_of_the_log():
    keys = {"nodeconfig": [], **{f"key{number:06}": 1 for number in range(70_000)}}
    junk = Sources(node_config=SourceFile("n.json", json.dumps(keys).encode()))

    with structlog.testing.capture_logs() as lines:
        room_of().service.take(make_plan(msgspec.structs.replace(junk, host="node-a")))

    assert len(lines) < 30
