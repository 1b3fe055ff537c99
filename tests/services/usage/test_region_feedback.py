"""Feedback at work: what is written, by whom, and that it is released however the agent ends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
from structlog.testing import capture_logs

from agent.cluster import PodTable
from agent.hami.region import RegionChange, RegionReading, RegionState
from agent.kit.cell import Cell
from agent.ledger import Ledger, container_directory
from agent.model import Inventory
from agent.usage import FRESH, PERIOD, WRITE_DEADLINE, ContainerUsage
from tests.builders import G1, POD_UID, a_row
from tests.fakes.clock import LoopClock
from tests.fakes.regions import MemoryRegions, a_process, a_region
from tests.services.at_work import at_work

HIGH, LOW = (container_directory(POD_UID, name) for name in ("high", "low"))
LIVE = frozenset({1})


class FeedbackBench:
    """Two containers of one GPU, of priorities 0 and 1."""

    def __init__(self, *, switches: bool = True, observes: bool = False) -> None:
        self.regions = MemoryRegions()
        self.clock = LoopClock()
        rows = [
            msgspec.structs.replace(a_row(container=name), priority=number)
            for number, name in enumerate(("high", "low"))
        ]
        self.ledger = Cell(Ledger(tuple(rows)))
        self.usage = ContainerUsage(
            self.regions,
            self.ledger,
            Cell(PodTable()),
            Cell(Inventory()),
            self.clock,
            switches=switches,
            observes=observes,
        )
        self.idle(HIGH, priority=0)
        self.idle(LOW)

    def work(self, name: str) -> None:
        """A kernel of the container runs."""
        region = self.regions.region(name)
        processes = (a_process(2**30, sm=50),)
        region = msgspec.structs.replace(region, processes=processes, last_kernel=self.clock.now())
        self.regions.put(name, region, LIVE)

    def idle(self, name: str, **fields) -> None:
        """Nothing of the container runs, nor has it lately."""
        region = a_region(G1, **({"recent_kernel": 0, "is_limiting": False} | fields))
        self.regions.put(name, region, LIVE)

    def state(self, name: str) -> tuple[int, bool]:
        """recent_kernel and the utilisation switch."""
        region = self.regions.region(name)
        return region.recent_kernel, region.is_limiting


@contextlib.asynccontextmanager
async def switching(bench: FeedbackBench) -> AsyncIterator[None]:
    async with at_work(bench.usage.run):
        await asyncio.sleep(0.001)
        yield


async def test_the_low_container_is_held_back_while_the_high_one_works_and_then_released():
    bench = FeedbackBench()
    async with switching(bench):
        await asyncio.sleep(10 * PERIOD)
        assert [] == bench.regions.writes
        bench.work(HIGH)
        await asyncio.sleep(2 * PERIOD)
        assert [{LOW: RegionChange(is_limiting=True, recent_kernel=-1)}] == bench.regions.writes
        assert ((-1, True), (0, False)) == (bench.state(LOW), bench.state(HIGH))
        bench.idle(HIGH, priority=0)
        await asyncio.sleep(3 * PERIOD)
        assert (0, False) == bench.state(LOW)


async def test_the_end_releases_all_that_was_held_back_and_is_not_delayed_by_a_silent_disk():
    bench, loop = FeedbackBench(), asyncio.get_running_loop()
    bench.work(HIGH)
    async with switching(bench):
        assert (-1, True) == bench.state(LOW)
    assert (0, False) == bench.state(LOW)
    with capture_logs() as logs:
        async with switching(bench):
            assert (-1, True) == bench.state(LOW)
            bench.regions.hangs = True
            ended = loop.time()

    assert WRITE_DEADLINE == pytest.approx(loop.time() - ended)
    assert ["usage.unwritten"] == [line["event"] for line in logs]


async def test_with_feedback_off_the_use_is_read_and_nothing_is_written():
    bench = FeedbackBench(switches=False)
    bench.idle(LOW, is_limiting=True)
    bench.work(HIGH)
    async with switching(bench):
        await asyncio.sleep(3 * PERIOD)
        assert 4 == len(bench.usage.history(bench.ledger.value.rows[0].key)[G1])

    assert [] == bench.regions.writes


@pytest.mark.parametrize("held", [-1, -5, -(2**31)])
@pytest.mark.parametrize(("switches", "is_known"), [(True, True), (True, False), (False, False)])
async def test_whom_an_agent_that_was_killed_held_back_is_released_in_the_first_round(
    held, switches, is_known
):
    bench = FeedbackBench(switches=switches)
    if not is_known:
        bench.ledger.set(Ledger())
    bench.idle(LOW, recent_kernel=held, is_limiting=is_known)
    async with switching(bench):
        assert (0, False) == bench.state(LOW)


async def test_with_feedback_off_who_was_held_back_is_released_once_and_not_limited_anew():
    bench = FeedbackBench(switches=False)
    bench.idle(LOW, recent_kernel=-1, is_limiting=True)
    async with switching(bench):
        assert (0, True) == bench.state(LOW)
        bench.idle(LOW, recent_kernel=-1)
        await asyncio.sleep(3 * PERIOD)
        assert (-1, False) == bench.state(LOW)  # by the monitor that runs beside the agent


@pytest.mark.parametrize("trouble", ["unread", "read_only", "broken"])
async def test_a_release_that_the_disk_refuses_is_tried_again(trouble):
    bench = FeedbackBench(switches=False)
    bench.idle(LOW, recent_kernel=-1)
    setattr(bench.regions, trouble, "no disk")
    async with switching(bench):
        await asyncio.sleep(2 * PERIOD)
        assert (-1, False) == bench.state(LOW)
        setattr(bench.regions, trouble, "")
        await asyncio.sleep(PERIOD)
        assert (0, False) == bench.state(LOW)


async def test_who_is_to_be_held_back_is_not_released_meanwhile():
    bench = FeedbackBench()
    bench.idle(LOW, recent_kernel=-1, is_limiting=True)
    bench.work(HIGH)
    async with switching(bench):
        assert ((-1, True), []) == (bench.state(LOW), bench.regions.writes)


async def test_an_observer_releases_nobody_and_says_so():
    bench = FeedbackBench(switches=False, observes=True)
    bench.idle(LOW, recent_kernel=-1)
    with capture_logs() as logs:
        async with switching(bench):
            await asyncio.sleep(3 * PERIOD)

    assert ((-1, False), []) == (bench.state(LOW), bench.regions.writes)
    assert [("usage.held_back", [LOW])] == [(line["event"], line["directories"]) for line in logs]


@pytest.mark.parametrize("name", [LOW, HIGH])
async def test_nobody_is_held_back_by_or_in_a_region_that_is_not_readable(name):
    bench = FeedbackBench()
    bench.work(HIGH)
    async with switching(bench):
        assert (-1, True) == bench.state(LOW)
        bench.regions.unseen[name] = RegionReading(RegionState.UNREADABLE, None, "cut off")
        await asyncio.sleep(PERIOD)
        assert (0, False) == bench.state(LOW)


async def test_who_is_held_back_is_released_when_nothing_can_be_read_for_long():
    bench = FeedbackBench()
    bench.work(HIGH)
    async with switching(bench):
        bench.regions.unread = "no disk"
        await asyncio.sleep(FRESH - PERIOD)
        assert (-1, True) == bench.state(LOW)
        await asyncio.sleep(2 * PERIOD)
        assert (0, False) == bench.state(LOW)


@pytest.mark.parametrize(("name", "why"), [(LOW, "it is read-only"), ("all", "no disk")])
async def test_a_write_that_fails_is_logged_once_and_tried_again(name, why):
    bench = FeedbackBench()

    def refuse(text: str) -> None:
        bench.regions.refused = {LOW: text} if text and name == LOW else {}
        bench.regions.read_only = text if name == "all" else ""

    refuse(why)
    with capture_logs() as logs:
        async with switching(bench):
            for _ in range(3):
                bench.work(HIGH)
                await asyncio.sleep(PERIOD)
            assert (0, False) == bench.state(LOW)
            refuse("")
            bench.work(HIGH)
            await asyncio.sleep(PERIOD)
            assert (-1, True) == bench.state(LOW)

    assert [("usage.unwritten", name, why)] == [
        (line["event"], line["directory"], line["err"]) for line in logs
    ]


async def test_the_work_of_a_row_that_is_gone_is_forgotten():
    bench = FeedbackBench()
    bench.work(HIGH)
    async with switching(bench):
        high, low = bench.ledger.value.rows
        bench.ledger.set(Ledger((low,)))
        await asyncio.sleep(PERIOD)
        assert (0, False) == bench.state(LOW)
        bench.idle(HIGH, priority=0)
        bench.ledger.set(Ledger((high, low)))
        await asyncio.sleep(PERIOD)
        assert (0, False) == bench.state(LOW)
