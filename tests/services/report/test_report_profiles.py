"""Schedulers up to 2.7.1: another text, and a stamp that keeps the node in their memory."""

import asyncio
import datetime as dt

from agent.cluster import HANDSHAKE, REGISTER
from agent.errors import ApiError, ApiThrottled
from agent.hami.register import (
    HandshakeWord,
    ReportSettings,
    decode_handshake,
    decode_register_colon,
)
from agent.report import CONFLICT
from tests.builders import an_inventory
from tests.fakes.apiserver import FakeApi
from tests.fakes.clock import START
from tests.services.report.reporting import COLON, Reporting, reported, reporting

REQUESTING = "Requesting_2026-08-21 06:20:50"
DELETED = "Deleted_2026-08-21 06:20:50"


def stamp(room: Reporting) -> dt.datetime | None:
    """When the last stamp says that it was written."""
    shake = decode_handshake(room.says(HANDSHAKE) or "")
    assert HandshakeWord.REPORTED is shake.word
    return shake.stamp


async def test_the_text_has_records_and_a_stamp_comes_with_it():
    async with reported(settings=COLON) as room:
        text = room.says(REGISTER) or ""

        assert 2 == len(decode_register_colon(text))
        assert [9, 9, 1] == [len(record.split(",")) for record in text.split(":")]
        assert START == stamp(room)
        assert 1 == room.api.writes


async def test_a_stamp_is_written_every_30_seconds_and_nothing_else():
    async with reported(settings=COLON) as room:
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


async def test_a_stamp_respects_retry_after():
    async with reported(settings=COLON) as room:
        throttled = ApiThrottled("busy", status=429, retry_after=20)
        room.api.fail(throttled, call="annotate_node")
        await asyncio.sleep(49)
        assert START == stamp(room)
        await asyncio.sleep(2)

        assert START + dt.timedelta(seconds=50) == stamp(room)


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
