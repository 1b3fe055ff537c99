"""Whatever the API server answers, the annotation gets there in the end, and not by force."""

import asyncio

import pytest

from agent.core.annotations import REGISTER
from agent.core.errors import (
    ApiConflict,
    ApiError,
    ApiForbidden,
    ApiGone,
    ApiNotFound,
    ApiThrottled,
)
from tests.builders import an_inventory
from tests.fakes.apiserver import FakeApi
from tests.services.reporting import reported, reporting


@pytest.mark.parametrize(
    "error",
    [
        ApiConflict("conflict", status=409),
        ApiThrottled("too many requests", status=429, retry_after=7),
        ApiForbidden("nodes is forbidden", status=403),
        ApiError("internal error", status=500),
        ApiError("no answer in time"),
    ],
    ids=["409", "429", "403", "500", "none"],
)
async def test_a_refused_write_is_said_and_tried_again_until_it_is_taken(error: ApiError):
    async with reported() as room:
        room.api.fail(error, count=20, call="annotate_node")
        room.inventory.set(an_inventory(count=3, generation=2))
        await asyncio.sleep(60)
        assert not room.state.value.reported
        assert str(error) == room.state.value.reason
        tried = room.api.writes
        await room.settled()

        assert room.told(an_inventory(count=3))
        assert tried <= 1 + 1 + 60 / (error.retry_after or 5) + 4
        assert {(str(error.status or "none"),): 20} == dict(room.reporter.failures.items())


async def test_rights_that_are_missing_for_hours_cost_two_tries_a_minute():
    async with reported() as room:
        forbidden = ApiForbidden("nodes is forbidden", status=403)
        room.api.fail(forbidden, count=100_000, call="annotate_node")
        room.inventory.set(an_inventory(count=3, generation=2))
        await asyncio.sleep(4 * 3600)

        assert room.api.writes < 4 * 3600 / 20


async def test_a_watch_whose_version_is_gone_is_opened_again_and_nothing_is_written():
    async with reported() as room:
        room.api.fail(ApiGone("too old resource version", status=410), count=3, call="watch_node")
        room.api.forget_history()
        await asyncio.sleep(300)

        assert 1 == room.api.writes
        assert room.state.value.reported
        room.api.edit_node({REGISTER: None})
        await room.settled()
        assert room.told(an_inventory())


async def test_an_edit_during_a_gap_of_the_watch_is_seen_after_it():
    async with reported() as room:
        room.api.fail(ApiGone("too old resource version", status=410), call="watch_node")
        room.api.end_watches()
        room.api.edit_node({REGISTER: "[]"})
        async with asyncio.timeout(120):
            await room.node.until(lambda _: room.told(an_inventory()))

        assert 1 == room.written("foreign")


async def test_a_node_that_is_gone_while_it_is_written_to_gets_its_text_when_it_is_back():
    async with reported() as room:
        room.api.delete_node()
        room.inventory.set(an_inventory(count=3, generation=2))
        room.api.fail(ApiNotFound("no such Node", status=404), call="annotate_node")
        await asyncio.sleep(600)
        assert not room.state.value.reported
        room.api.create_node()
        await room.settled()

        assert room.told(an_inventory(count=3))


async def test_an_answer_that_is_late_is_no_second_write():
    api = FakeApi()
    api.create_node()
    api.lag = 3.0

    async with reporting(api) as room:
        await room.settled()
        await asyncio.sleep(600)

    assert 1 == api.writes


async def test_health_and_inventory_that_change_during_a_write_are_in_the_next():
    api = FakeApi()
    api.create_node()
    api.delay = 2.0

    async with reporting(api) as room:
        await room.settled()
        room.inventory.set(an_inventory(count=3, generation=2))
        await asyncio.sleep(1)
        room.inventory.set(an_inventory(count=4, generation=3))
        await room.settled()

    assert room.told(an_inventory(count=4))
    assert 3 == api.writes
