"""What containers left is removed pass by pass, and what stays is told once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from agent.errors import StateError
from agent.hookdirs import DEADLINE, PERIOD, Cleared, clear_directories
from agent.kit.cell import Cell
from tests.fakes.kubelet_side import FakeHookDirs
from tests.services.at_work import at_work

ONE = Cleared(kept=1, why="Permission denied")


@contextlib.asynccontextmanager
async def clearing(hooks: FakeHookDirs, *passes: Cleared) -> AsyncIterator[Cell[Cleared]]:
    """It, at work."""
    hooks.cleared = list(passes)
    state = Cell(Cleared())
    async with at_work(lambda: clear_directories(hooks, state)):
        yield state


async def test_it_clears_at_the_start_until_nothing_is_left_and_then_each_minute():
    hooks = FakeHookDirs()
    async with clearing(hooks, Cleared(more=True), Cleared(more=True), Cleared()):
        await asyncio.sleep(1)
        assert 3 == hooks.clears
        await asyncio.sleep(60 * PERIOD)

    assert 63 == pytest.approx(hooks.clears, abs=1)


async def test_what_is_set_aside_is_removed_at_once():
    hooks = FakeHookDirs()
    async with clearing(hooks, Cleared()):
        await asyncio.sleep(1)
        hooks.set_aside.set()
        await asyncio.sleep(1)

    assert 2 == hooks.clears


async def test_what_stays_is_told_once_until_nothing_does():
    three = Cleared(kept=3, why="Permission denied")
    with capture_logs() as logs:
        async with clearing(FakeHookDirs(), ONE, ONE, three, Cleared(), ONE) as state:
            await asyncio.sleep(6 * PERIOD)

    assert ONE == state.value
    assert [("hooks.kept", 1, "Permission denied")] * 2 == [
        (line["event"], line["directories"], line["err"]) for line in logs
    ]


@pytest.mark.parametrize("failure", ["an error", "silence"])
async def test_a_disk_that_fails_forgets_nothing_and_is_asked_again(failure):
    hooks = FakeHookDirs()
    async with clearing(hooks, ONE) as state:
        await asyncio.sleep(1)
        hooks.hanging = "clear" if failure == "silence" else ""
        hooks.failure = None if hooks.hanging else StateError("read-only")
        await asyncio.sleep(PERIOD + DEADLINE)
        assert Cleared(kept=1) == state.value

        hooks.failure, hooks.hanging = None, ""
        await asyncio.sleep(2 * PERIOD)

        assert ONE == state.value
