"""An agent that observes: its reporter finds its writes done, and the API server sees none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from agent.cluster import HANDSHAKE, REGISTER, SCORE
from agent.hami.annotations import ReportSettings
from tests.builders import an_inventory
from tests.fakes.apiserver import FakeApi
from tests.services.report.reporting import SCORED, Reporting, reporting

THEIRS = '[{"id":"GPU-theirs","count":1}]'


def told(room: Reporting) -> list[dict]:
    """What the log says would be written."""
    return [line["annotations"] for line in room.log if line["event"] == "observe.would_write"]


@contextlib.asynccontextmanager
async def observing(
    annotations: dict[str, str] | None = None, settings: ReportSettings | None = None
) -> AsyncIterator[Reporting]:
    api = FakeApi()
    api.create_node(annotations)
    with structlog.testing.capture_logs() as log:
        async with reporting(api, settings=settings, observes=True) as room:
            room.log = log
            await asyncio.sleep(5)
            yield room
    assert 0 == api.writes


async def test_every_change_is_told_and_what_is_right_again_is_pending_no_more():
    async with observing(settings=SCORED) as room:
        room.inventory.set(an_inventory(count=3, generation=2))
        await asyncio.sleep(5)

        assert 2 == len(told(room))
        assert {REGISTER, SCORE} == set(told(room)[1])
        assert () == room.reporter.writes.items()
        room.api.edit_node({key: room.reporter.pending[key] for key in (REGISTER, SCORE)})
        await asyncio.sleep(5)
        assert {} == room.reporter.pending


async def test_the_plugin_beside_us_may_write_as_it_likes_and_is_no_adversary():
    async with observing() as room:
        for _ in range(100):
            room.api.edit_node({REGISTER: THEIRS, HANDSHAKE: "Requesting_2026-08-21 06:20:50"})
            await asyncio.sleep(1)
            room.api.edit_node({REGISTER: None})
            await asyncio.sleep(1)

        assert 1 == len(told(room))
        assert [] == room.events
        assert not room.unreported
