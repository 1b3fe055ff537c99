"""What of the report is asked for: stamps for schedulers up to 2.7.1, and the score annotation."""

import asyncio
import datetime as dt
import json

import pytest

from agent.cluster import HANDSHAKE, REGISTER, SCORE
from agent.errors import ApiError
from agent.hami.register import (
    HandshakeWord,
    ReportProfile,
    ReportSettings,
    decode_handshake,
    decode_register_colon,
    encode_register,
    registered,
)
from agent.model import Link, PciPath
from agent.report import CONFLICT
from tests.builders import a_gpu, a_shared_gpu, a_uuid, an_inventory
from tests.fakes.apiserver import FakeApi
from tests.fakes.clock import START
from tests.services.report.reporting import COLON, SCORED, Reporting, reported, reporting

REQUESTING = "Requesting_2026-08-21 06:20:50"
DELETED = "Deleted_2026-08-21 06:20:50"


def stamp(room: Reporting) -> dt.datetime | None:
    """When the last stamp says that it was written."""
    shake = decode_handshake(room.says(HANDSHAKE) or "")
    assert HandshakeWord.REPORTED is shake.word
    return shake.stamp


async def test_the_text_has_records_and_a_stamp_is_written_every_30_seconds_and_nothing_else():
    async with reported(settings=COLON) as room:
        text = room.says(REGISTER) or ""
        assert 2 == len(decode_register_colon(text))
        assert [9, 9, 1] == [len(record.split(",")) for record in text.split(":")]
        assert (START, 1) == (stamp(room), room.api.writes)
        await asyncio.sleep(3601)

        assert 120 == room.written("stamp")
        assert 121 == room.api.writes
        assert START + dt.timedelta(hours=1) == stamp(room)
        assert room.state.value.reported


async def test_a_request_of_the_scheduler_is_answered_with_the_next_stamp():
    async with reported(settings=COLON) as room:
        await asyncio.sleep(10)
        room.api.edit_node({HANDSHAKE: REQUESTING})
        await asyncio.sleep(19)
        assert REQUESTING == room.says(HANDSHAKE)
        await asyncio.sleep(1)

        assert START + dt.timedelta(seconds=30) == stamp(room)


async def test_an_agent_that_starts_writes_its_first_stamp_at_once():
    async with reported(settings=COLON) as room:
        text = room.says(REGISTER)
    api = FakeApi()
    api.create_node({REGISTER: str(text), HANDSHAKE: DELETED})

    async with reporting(api, settings=COLON) as room:
        await room.settled()
        await asyncio.sleep(0)

        assert START == stamp(room)
        assert 1 == room.written("stamp") == api.writes


async def test_a_changed_inventory_takes_its_stamp_along_and_the_next_is_30_seconds_later():
    async with reported(settings=COLON) as room:
        await asyncio.sleep(20)
        room.inventory.set(an_inventory(count=3, generation=2))
        await room.settled()
        assert START + dt.timedelta(seconds=20) == stamp(room)
        await asyncio.sleep(29)

        assert START + dt.timedelta(seconds=20) == stamp(room)
        assert 2 == room.api.writes


async def test_a_stamp_that_failed_is_tried_again_and_said():
    async with reported(settings=COLON) as room:
        room.api.fail(ApiError("connection refused"), count=2, call="annotate_node")
        await asyncio.sleep(30.5)
        assert not room.state.value.reported
        assert "connection refused" == room.state.value.reason
        await asyncio.sleep(10)

        assert room.state.value.reported
        assert 1 == room.written("stamp")


async def test_after_hours_without_an_api_server_the_stamp_comes_with_the_connection():
    async with reported(settings=COLON) as room:
        room.api.begin_outage()
        await asyncio.sleep(4 * 3600)
        before = room.written("stamp")
        room.api.end_outage()
        async with asyncio.timeout(120):
            await room.state.until(lambda state: state.reported)

        assert before + 1 == room.written("stamp")
        assert room.api.calls["annotate_node"] < 4 * 3600 / 20


async def test_no_stamp_is_written_while_another_writer_is_left_alone():
    async with reported(settings=COLON) as room:
        for _ in range(6):
            room.api.edit_node({REGISTER: "GPU-theirs,1,1,1,T,0,true,0,:"})
            await asyncio.sleep(1)
        before = room.api.writes
        await asyncio.sleep(300)

        assert before == room.api.writes
        assert CONFLICT == room.state.value.reason


async def test_a_scheduler_that_was_updated_gets_its_text_with_the_changed_setting():
    async with reported(settings=COLON) as room:
        room.settings.set(ReportSettings())
        await room.settled()
        writes = room.api.writes
        await asyncio.sleep(3600)

        assert (room.says(REGISTER) or "").startswith("[{")
        assert room.says(HANDSHAKE) is None
        assert writes == room.api.writes
        room.settings.set(COLON)
        await room.settled()
        assert (room.says(REGISTER) or "").endswith(":")


# The score annotation: beside the register annotation, and only where it is asked for.


def linked(*counts: int, generation: int = 1):
    """One GPU per count; each pair has as many NVLinks as the first of the two tells."""
    gpus = [
        a_gpu(
            index=n,
            links=tuple(
                Link(a_uuid(other), PciPath.SAME_CPU, nvlinks)
                for other in range(len(counts))
                if other != n
            ),
        )
        for n, nvlinks in enumerate(counts)
    ]
    return an_inventory(gpus=[a_shared_gpu(gpu=gpu) for gpu in gpus], generation=generation)


@pytest.mark.parametrize("profile", ReportProfile)
async def test_with_the_setting_one_write_says_both(profile: ReportProfile):
    settings = ReportSettings(profile, topology_score=True)
    async with reported(inventory=linked(2, 2), settings=settings) as room:
        first, second = json.loads(room.says(SCORE) or "")

        assert {"uuid": a_uuid(0), "score": {a_uuid(1): 220}} == first
        assert {"uuid": a_uuid(1), "score": {a_uuid(0): 220}} == second
        assert 1 == room.api.writes


async def test_changed_links_alone_are_told_and_the_scheduler_made_to_read_them():
    async with reported(inventory=linked(2, 2), settings=SCORED) as room:
        room.api.edit_node({HANDSHAKE: "Requesting_2026-08-21 06:20:50"})
        before = room.says(REGISTER)
        room.inventory.set(linked(4, 4, generation=2))
        await room.settled()

        assert '"score":{"' in (room.says(SCORE) or "")
        assert "420" in (room.says(SCORE) or "")
        assert (before, None) == (room.says(REGISTER), room.says(HANDSHAKE))
        assert 1 == room.written("score")


async def test_the_setting_is_taken_over_in_both_directions():
    async with reported(inventory=linked(2, 2)) as room:
        assert room.says(SCORE) is None
        room.settings.set(SCORED)
        await room.settled()
        before = room.says(SCORE)
        assert before is not None
        room.api.edit_node({SCORE: "{}"})
        await room.settled()
        assert (before, 1) == (room.says(SCORE), room.written("foreign"))
        room.settings.set(ReportSettings())
        await room.settled()

        assert room.says(SCORE) is None
        assert 2 == room.written("score")


async def test_a_score_of_the_same_meaning_is_left_alone():
    inventory = linked(2, 2)
    async with reported(inventory=inventory, settings=SCORED) as room:
        score = json.dumps(list(reversed(json.loads(room.says(SCORE) or ""))))
    api = FakeApi()
    api.create_node({REGISTER: encode_register(registered(inventory)), SCORE: score})

    async with reporting(api, inventory=inventory, settings=SCORED) as room:
        await room.settled()
        await asyncio.sleep(3600)

    assert 0 == api.writes


async def test_a_pair_with_different_sides_scores_nothing_and_is_told_once():
    async with reported(inventory=linked(2, 0), settings=SCORED) as room:
        await asyncio.sleep(3600)

        (event,) = room.events
        assert ("AsymmetricGPUP2PLink", True) == (event.reason, event.warning)
        assert a_uuid(0) in event.text
        assert [0, 0] == [
            points for one in json.loads(room.says(SCORE) or "") for points in one["score"].values()
        ]
