"""What containers left is removed part by part, and what stays is told once."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

import pytest

from agent.cluster import NodeEvent
from agent.errors import StateError
from agent.hookdirs import Cleared, DiskRoom
from agent.reconcile import CLEARING_DEADLINE, CLEARING_PERIOD, RETRY, ROOM_PERIOD, Clearing
from tests.fakes.kubelet_side import FakeHookDirs
from tests.services.at_work import at_work


@pytest.fixture
def hooks():
    return FakeHookDirs()


@contextlib.asynccontextmanager
async def clearing(hooks: FakeHookDirs) -> AsyncIterator[tuple[Clearing, list[NodeEvent]]]:
    """It, at work, and what it said."""
    said: list[NodeEvent] = []
    service = Clearing(hooks, hooks.set_aside, said.append)
    async with at_work(service.run):
        yield service, said


async def test_it_clears_at_the_start_until_nothing_is_left_and_then_rests(hooks):
    hooks.cleared = [Cleared(more=True), Cleared(more=True), Cleared()]

    async with clearing(hooks):
        await asyncio.sleep(CLEARING_PERIOD / 2)

    assert [True, False, False] == hooks.clears


async def test_what_is_set_aside_is_cleared_at_once_and_what_stays_is_not_tried_for_it(hooks):
    async with clearing(hooks):
        await asyncio.sleep(10)
        hooks.set_aside.set(1)
        await asyncio.sleep(0.01)

    assert [True, False] == hooks.clears


async def test_what_stays_is_tried_again_every_hour_however_much_goes_meanwhile(hooks):
    async with clearing(hooks):
        for count in range(100):
            hooks.set_aside.set(count + 1)
            await asyncio.sleep(CLEARING_PERIOD / 40)

    assert 3 == hooks.clears.count(True)


async def test_what_stays_is_told_once_until_nothing_does(hooks):
    one = Cleared(kept=1, why="Permission denied")
    async with clearing(hooks) as (service, said):
        for number, parts in enumerate(
            (
                [one],
                [Cleared(more=True), one],
                [Cleared(kept=3, why="Permission denied")],
                [Cleared()],
                [one],
            )
        ):
            hooks.cleared = parts
            hooks.set_aside.set(number + 1)
            await asyncio.sleep(10)

    assert 1 == service.state.value.kept
    assert ["DirectoriesKept", "DirectoriesKept"] == [event.reason for event in said]
    assert said[0].text.startswith(
        "The agent cannot remove a directory of containers that are gone"
    )
    assert "(Permission denied)" in said[0].text


async def test_while_it_is_tried_again_what_stayed_is_counted_on(hooks):
    hooks.cleared = [Cleared(kept=2), Cleared(more=True, kept=0), Cleared(more=True, kept=1)]
    async with clearing(hooks) as (service, said):
        await asyncio.sleep(1)
        hooks.set_aside.set(1)
        await asyncio.sleep(1)

        assert 2 == service.state.value.kept
    assert 1 == len(said)


@pytest.mark.parametrize("failure", ["an error", "silence"])
async def test_a_disk_that_fails_is_asked_again_and_ends_nothing(hooks, failure):
    if failure == "silence":
        hooks.hanging = "clear"
    else:
        hooks.failure = StateError("read-only")
    async with clearing(hooks) as (_, said):
        await asyncio.sleep(CLEARING_DEADLINE + 1)
        hooks.failure, hooks.hanging = None, ""
        await asyncio.sleep(RETRY)

    assert [True] == hooks.clears
    assert [] == said


@pytest.mark.parametrize("hangs", [False, True])
async def test_the_room_that_is_left_is_known_and_unknown_again_when_the_disk_fails(hooks, hangs):
    service = Clearing(hooks, hooks.set_aside, lambda _: None)
    async with at_work(service.follow_room):
        await asyncio.sleep(1)
        assert DiskRoom(2.0**30, 1000.0) == service.room.value

        if hangs:
            hooks.hanging = "room"
        else:
            hooks.failure = StateError("Input/output error")
        await asyncio.sleep(ROOM_PERIOD + CLEARING_DEADLINE)
        assert math.isnan(service.room.value.available)

        hooks.hanging, hooks.failure = "", None
        await asyncio.sleep(CLEARING_DEADLINE + ROOM_PERIOD)
        assert DiskRoom(2.0**30, 1000.0) == service.room.value
