"""Whatever the API server answers, the annotation gets there in the end, and not by force."""

import asyncio
from collections.abc import Mapping

import pytest
from typing_extensions import override

from agent.cluster import REGISTER, NodeView
from agent.errors import ApiConflict, ApiError, ApiForbidden, ApiGone, ApiNotFound, ApiThrottled
from agent.report import DELAYS, SPREAD
from tests.builders import an_inventory
from tests.fakes.apiserver import FakeApi
from tests.services.report.reporting import Reporting, reported, reporting


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


async def lost(room: Reporting) -> None:
    """The server is lost, news waits for it, and it is back: the watch tries it 9 s from now."""
    room.api.begin_outage()
    await asyncio.sleep(20)
    room.inventory.set(an_inventory(count=3, generation=2))
    await asyncio.sleep(69)
    room.api.end_outage()


async def test_the_end_of_an_outage_ends_the_wait_of_what_it_held_up():
    async with reported() as room:
        await lost(room)
        seen = room.api.edit_node({"other": "x"})
        await room.node.until(lambda node: node == seen)
        await asyncio.sleep(SPREAD)

        assert room.told(an_inventory(count=3))


class BlackHole(FakeApi):
    """Writes are answered by nobody for `patience` seconds."""

    patience = 0.0

    @override
    async def annotate_node(self, annotations: Mapping[str, str | None]) -> NodeView:
        if self.patience:
            await asyncio.sleep(self.patience)
            raise ApiError("no answer in time")
        return await super().annotate_node(annotations)


async def test_a_write_that_was_lost_while_the_server_came_back_is_tried_again_soon():
    """The watch is back 98 s after the outage began, a write under way from 91 to 101 s."""
    api = BlackHole()
    api.create_node()
    async with reporting(api) as room:
        await room.settled()
        api.begin_outage()
        api.patience = 10.0
        await asyncio.sleep(33)
        room.inventory.set(an_inventory(count=3, generation=2))
        await asyncio.sleep(62)
        api.end_outage()
        api.patience = 0.0
        await asyncio.sleep(6 + DELAYS[0] + SPREAD)

        assert room.told(an_inventory(count=3))


@pytest.mark.parametrize(
    "error",
    [
        ApiThrottled("too many requests", status=429),
        ApiError("not yet", status=503, retry_after=100),
    ],
    ids=["429", "retry-after"],
)
async def test_the_end_of_an_outage_does_not_end_a_wait_that_the_server_asked_for(error: ApiError):
    async with reported() as room:
        room.api.fail(error, count=1000, call="annotate_node")
        room.inventory.set(an_inventory(count=3, generation=2))
        await asyncio.sleep(65)
        tried = room.api.writes
        for _ in range(5):
            room.api.fail(ApiError("connection refused"), call="watch_node")
            room.api.end_watches()
            await asyncio.sleep(4)

        assert room.api.writes <= tried + 1


async def test_a_watch_that_is_lost_again_and_again_makes_no_storm_of_writes():
    async with reported() as room:
        room.api.fail(ApiError("internal error", status=500), count=100_000, call="annotate_node")
        room.inventory.set(an_inventory(count=3, generation=2))
        for _ in range(3600):
            room.api.fail(ApiError("connection refused"), call="watch_node")
            room.api.end_watches()
            await asyncio.sleep(1)

        assert room.api.writes < 3600 / 5


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


async def test_a_server_that_asks_for_a_while_gets_no_other_write_either():
    async with reported() as room:
        error = ApiError("not yet", status=503, retry_after=100)
        room.api.fail(error, count=1, call="annotate_node")
        room.inventory.set(an_inventory(count=3, generation=2))
        await asyncio.sleep(2)
        tried = room.api.writes
        for count in (4, 5, 6):
            room.inventory.set(an_inventory(count=count, generation=count))
            await asyncio.sleep(20)
        assert tried == room.api.writes
        await room.settled()

        assert room.told(an_inventory(count=6))
