"""Whoever keeps too much in its directory is told of once, and nothing waits for the looks."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from agent.core.cluster.changes import NodeEvent
from agent.core.errors import StateError
from agent.core.ports import HookDirs
from agent.core.reconcile.measuring import DirectorySize, DiskRoom
from agent.core.state.ledger import Ledger
from agent.kit.cell import Cell
from agent.services.reconcile.clearing import Clearing
from agent.services.reconcile.measuring import DEADLINE, PERIOD, Measuring
from tests.builders import POD_UID, a_row
from tests.fakes.kubelet_side import FakeHookDirs
from tests.services.at_work import at_work

MAIN, OTHER = f"{POD_UID}_main", f"{POD_UID}_other"
LARGE = DirectorySize(entries=10_001)
ROWS = Ledger().put(a_row()).put(a_row(container="other"))


@pytest.fixture
def hooks():
    return FakeHookDirs()


@pytest.fixture
def ledger():
    return Cell(ROWS)


@contextlib.asynccontextmanager
async def measuring(
    hooks: HookDirs, ledger: Cell[Ledger]
) -> AsyncIterator[tuple[Measuring, list[NodeEvent]]]:
    """It, after its first look, and what it said."""
    said: list[NodeEvent] = []
    service = Measuring(hooks, ledger, said.append)
    async with at_work(service.run):
        await asyncio.sleep(1)
        yield service, said


async def test_each_row_is_looked_at_at_the_start_and_every_minute(hooks, ledger):
    async with measuring(hooks, ledger) as (service, said):
        assert [(MAIN, True), (OTHER, True)] == hooks.parts
        await asyncio.sleep(PERIOD)

        assert 4 == len(hooks.parts)
        assert frozenset() == service.state.value.large
    assert [] == said


async def test_what_is_large_is_told_once_and_told_again_after_it_was_small(hooks, ledger):
    hooks.sizes[MAIN] = [LARGE]
    async with measuring(hooks, ledger) as (service, said):
        await asyncio.sleep(5 * PERIOD)
        assert frozenset({MAIN}) == service.state.value.large
        assert 1 == len(said)

        hooks.sizes[MAIN] = [DirectorySize(entries=3)]
        await asyncio.sleep(PERIOD)
        assert frozenset() == service.state.value.large
        assert 1 == len(said)

        hooks.sizes[MAIN] = [LARGE]
        await asyncio.sleep(2 * PERIOD)

    assert ["DirectoryLarge", "DirectoryLarge"] == [event.reason for event in said]
    assert {("team-a", "train-0", POD_UID)} == {(e.namespace, e.pod, e.pod_uid) for e in said}


async def test_it_is_a_line_in_the_log_too(hooks, ledger):
    hooks.sizes[OTHER] = [DirectorySize(allocated=2**30, entries=5, closed=2)]
    with capture_logs() as lines:
        async with measuring(hooks, ledger):
            pass

    (line,) = [one for one in lines if one["event"] == "hooks.large"]
    assert ("team-a", "train-0", "other", 2**30, 5, 2) == tuple(
        line[key] for key in ("ns", "pod", "container", "bytes", "entries", "closed")
    )


async def test_one_that_is_gone_is_large_no_longer(hooks, ledger):
    hooks.sizes[MAIN] = hooks.sizes[OTHER] = [LARGE]
    async with measuring(hooks, ledger) as (service, said):
        ledger.set(ledger.value.drop([a_row().key]))
        await asyncio.sleep(PERIOD)

        assert frozenset({OTHER}) == service.state.value.large
    assert 2 == len(said)


async def test_a_look_takes_parts_until_there_is_no_more_to_be_looked_at(hooks, ledger):
    more = DirectorySize(entries=1_000, more=True)
    hooks.sizes[MAIN] = [more, more, LARGE]
    async with measuring(hooks, ledger) as (service, _):
        assert [(MAIN, True), (MAIN, False), (MAIN, False), (OTHER, True)] == hooks.parts
        assert frozenset({MAIN}) == service.state.value.large


async def test_the_room_that_is_left_is_known_and_unknown_again_when_the_disk_fails(hooks, ledger):
    async with measuring(hooks, ledger) as (service, _):
        assert DiskRoom(2.0**30, 1000.0) == service.state.value.room

        hooks.failure = StateError("Input/output error")
        await asyncio.sleep(PERIOD)
        assert math.isnan(service.state.value.room.available)

        hooks.failure = None
        await asyncio.sleep(PERIOD)
        assert DiskRoom(2.0**30, 1000.0) == service.state.value.room


async def test_a_directory_that_fails_hides_no_other_and_is_a_line_a_minute(hooks, ledger):
    class OneFails(FakeHookDirs):
        async def measure(self, name: str, *, anew: bool) -> DirectorySize:
            if name == MAIN:
                raise StateError("Input/output error")
            return await super().measure(name, anew=anew)

    hooks = OneFails()
    hooks.sizes[OTHER] = [LARGE]
    with capture_logs() as lines:
        async with measuring(hooks, ledger) as (service, _):
            await asyncio.sleep(PERIOD)
            assert frozenset({OTHER}) == service.state.value.large

    failed = [one for one in lines if one["event"] == "hooks.not_measured"]
    assert [(1, "Input/output error")] * 2 == [(one["failures"], one["err"]) for one in failed]


async def test_what_was_large_stays_so_while_the_disk_fails_and_is_not_told_again(hooks, ledger):
    hooks.sizes[MAIN] = [LARGE]
    async with measuring(hooks, ledger) as (service, said):
        hooks.failure = StateError("Input/output error")
        await asyncio.sleep(PERIOD)
        assert frozenset({MAIN}) == service.state.value.large

        hooks.failure = None
        await asyncio.sleep(PERIOD)

    assert 1 == len(said)


@pytest.mark.parametrize("call", ["measure", "room"])
async def test_a_disk_that_hangs_holds_up_no_removal_and_is_asked_again(hooks, ledger, call):
    hooks.hanging = call
    hooks.sizes[MAIN] = [LARGE]
    clearing = Clearing(hooks, hooks.set_aside, lambda _: None)
    async with measuring(hooks, ledger) as (service, said), at_work(clearing.run):
        await asyncio.sleep(1)
        hooks.set_aside.set(1)
        await asyncio.sleep(1)
        assert [True, False] == hooks.clears
        assert [] == hooks.parts

        hooks.hanging = ""
        await asyncio.sleep(DEADLINE + PERIOD)

        assert frozenset({MAIN}) == service.state.value.large
    assert 1 == len(said)
