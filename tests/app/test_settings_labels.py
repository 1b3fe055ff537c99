"""Entries of HAMi's config.json by label selector: when labels come, change, or never come.

A wrong value in an entry that comes to apply changes nothing, and is told once.
"""

import asyncio
import json

import pytest
import structlog

from agent.ledger import LastGood, SourceFile
from agent.settings.reading import begin
from agent.settings.sources import Sources
from tests.app.settings_node import a_settings_node
from tests.app.settings_room import SettingsRoom, start_of
from tests.app.test_settings_fit import a_node, a_scan
from tests.fakes.offload import Inline
from tests.services.at_work import at_work


def by(pool: str, **more: object) -> dict[str, object]:
    return {"nodelabelselector": {"matchLabels": {"Pool": pool}}, **more}


BIG, SMALL = by("big", devicesplitcount=20), by("small", devicesplitcount=10**6)
ANY = {"name": "*", "devicesplitcount": 5}


def text(*entries: object) -> str:
    return json.dumps({"nodeconfig": entries})


async def room_of(tmp_path, *entries: object) -> SettingsRoom:
    (tmp_path / "n.json").write_text(text(*entries))
    flags = {"--nodeconfig": f"{tmp_path}/n.json", "--device-config": ""}
    start = await begin(Sources(None, {}, flags, "node-a"), Inline(), Inline())
    return SettingsRoom(start_of(start.taken()))


@pytest.mark.parametrize(("after", "waited"), [(0.5, 0.5), (1.9, 1.9), (60.0, 2.0)])
async def test_the_first_start_waits_two_seconds_for_the_node(
    tmp_path, after: float, waited: float
):
    room = await room_of(tmp_path, BIG, ANY)
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
    room = await room_of(tmp_path, *entries)
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
    room = await room_of(tmp_path, BIG, SMALL, ANY)
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
