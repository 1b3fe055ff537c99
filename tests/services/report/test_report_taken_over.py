"""A report that another wrote and that is true is marked once, and never written again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from agent.core.cluster.annotations import HANDSHAKE, REGISTER, REPORTS
from agent.core.errors import ApiError, ApiForbidden
from agent.services.report.service import FIGHT, MARK_RETRY
from tests.builders import an_inventory
from tests.fakes.apiserver import FakeApi
from tests.services.report.reporting import COLON, Reporting, reported, reporting, text_in

HAMI = "nvidia-device-plugin 2026-01-01T00:00:00Z"
LATER = "nvidia-device-plugin 2026-01-01T00:00:30Z"


def their_api(writer: str = HAMI) -> FakeApi:
    """A Node on which another has said what the inventory says."""
    api = FakeApi()
    api.create_node({REGISTER: text_in(an_inventory()), HANDSHAKE: "Reported"})
    api.credit_node(writer)
    return api


@contextlib.asynccontextmanager
async def taken_over() -> AsyncIterator[Reporting]:
    async with reporting(their_api()) as made:
        await made.settled()
        await made.node.until(lambda node: node is not None and REPORTS in node.annotations)
        yield made


async def test_another_writers_true_report_is_marked_and_left_as_it_is():
    async with taken_over() as room:
        assert f"after {HAMI}" == room.says(REPORTS)
        assert text_in(an_inventory()) == room.says(REGISTER)
        assert room.says(HANDSHAKE) is None
        assert (1, 1) == (room.written("taken-over"), room.api.writes)
        assert room.state.value.reported


async def test_a_mark_that_is_there_is_not_written_again():
    async with taken_over() as room:
        for _ in range(3):
            await asyncio.sleep(2 * FIGHT)
            room.api.touch_node()

        assert 1 == room.api.writes
        async with reporting(room.api) as again:
            await again.settled()
            await asyncio.sleep(FIGHT)

        assert 1 == room.api.writes


async def test_who_writes_on_is_marked_again_only_after_long():
    async with taken_over() as room:
        room.api.credit_node(LATER)
        await asyncio.sleep(FIGHT / 2)
        room.api.touch_node()
        await asyncio.sleep(10)
        assert 1 == room.api.writes

        await asyncio.sleep(FIGHT)
        room.api.touch_node()
        await room.node.until(
            lambda node: node is not None and node.annotations[REPORTS] == f"after {LATER}"
        )

        assert 2 == room.api.writes


async def test_a_report_of_an_agents_or_of_nobody_known_gets_no_mark():
    async with reporting(their_api("")) as room:
        await room.settled()
        await asyncio.sleep(FIGHT)

        assert (0, None) == (room.api.writes, room.says(REPORTS))
    async with reported() as room:
        await asyncio.sleep(FIGHT)

        assert (1, None) == (room.api.writes, room.says(REPORTS))


async def test_a_mark_that_fails_makes_no_report_untrue_and_is_tried_again():
    api = their_api()
    api.fail(ApiForbidden("no", status=403), count=2, call="annotate_node")
    async with reporting(api) as room:
        await room.settled()
        for _ in range(3):
            await asyncio.sleep(MARK_RETRY + 1)
            assert room.state.value.reported
            room.api.touch_node()
        await room.node.until(lambda node: node is not None and REPORTS in node.annotations)

        assert 3 == api.calls["annotate_node"]


async def test_stamps_do_not_wait_for_a_mark():
    api = FakeApi()
    api.create_node({REGISTER: text_in(an_inventory(), COLON)})
    api.credit_node(HAMI)
    api.fail(ApiError("no answer"), call="annotate_node")
    async with reporting(api, settings=COLON) as room:
        await room.node.until(lambda node: node is not None and HANDSHAKE in node.annotations)

        assert (1, None) == (room.written("stamp"), room.says(REPORTS))
