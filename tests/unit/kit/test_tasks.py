"""When a failed activity runs again or is given up, and in which order tiers start and stop.

A cell publishes state: each follower sees the newest value at its own pace.
"""

import asyncio

import pytest
import structlog

from agent.kit.cell import Cell, News
from agent.kit.tasks import Allowance, Backoff, BudgetSpent, Task, TaskEnded, run_tiers, supervise
from tests.fakes.chance import Seeded

NO = ValueError("no")


async def test_one_is_let_through_in_a_period_and_the_next_one_counts_the_rest():
    throttle = Allowance(1, 1.0)
    said = [throttle.admit() for _ in range(4)]
    await asyncio.sleep(1.0)

    assert [0, None, None, None] == said
    assert [3, None] == [throttle.admit(), throttle.admit()]
    await asyncio.sleep(5.0)
    assert 1 == throttle.admit()


class Flaky:
    """An activity that lives `lives[i]` seconds, then ends with `end`, or for ever at last."""

    def __init__(self, *lives, end=None):
        self.starts = []
        self.cancelled = 0
        self._lives = lives
        self._end = end

    async def run(self):
        self.starts.append(asyncio.get_running_loop().time())
        try:
            if len(self.starts) > len(self._lives):
                await asyncio.Event().wait()
            await asyncio.sleep(self._lives[len(self.starts) - 1])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self._end is not None:
            raise self._end


async def watch(flaky, delays=(1.0,), seconds=100.0, expected=(ValueError, TaskEnded)):
    with structlog.testing.capture_logs() as logs:
        try:
            async with asyncio.timeout(seconds):
                await supervise("demo", flaky.run, Backoff(delays, 0.0, Seeded(0)), expected)
        except TimeoutError:
            return logs


GROWING = (1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("lives", "starts"),
    [([0, 0, 0], [0, 1, 3, 7]), ([0, 0, 30, 0], [0, 1, 3, 34, 36]), ([0, 0, 29], [0, 1, 3, 36])],
    ids=["delays", "a long life", "a shorter life"],
)
async def test_a_failed_activity_runs_again_after_its_delay(lives, starts):
    flaky = Flaky(*lives, end=NO)
    await watch(flaky, GROWING)

    assert starts == flaky.starts


@pytest.mark.parametrize(
    ("lives", "delay", "starts"),
    [
        ([0] * 9, 1.0, [0, 1, 2, 3]),
        ([0, 0, 0, 40, 0, 0, 0], 1.0, [0, 1, 2, 3, 44, 45, 46]),
        ([0] * 9, 120.0, [0, 120, 240, 360, 480, 600, 720, 840, 960]),
    ],
    ids=["the budget", "a budget after a long life", "the window"],
)
async def test_unexpected_failures_have_a_budget_and_the_last_is_the_cause(lives, delay, starts):
    flaky, bug = Flaky(*lives, end=TypeError("bug")), None
    try:
        await watch(flaky, (delay,), seconds=starts[-1] + 1, expected=(OSError,))
    except BudgetSpent as error:
        bug = error

    assert starts == flaky.starts
    assert (delay == 120.0) == (bug is None)
    if bug:
        assert isinstance(bug.__cause__, TypeError)
        assert "demo failed too often and was given up" == str(bug)


@pytest.mark.parametrize(
    ("end", "text", "is_bug"),
    [
        (OSError("net"), "net", False),
        (OSError(), "OSError", False),
        (TypeError("bug"), "bug", True),
        (ExceptionGroup("g", [OSError("a"), ExceptionGroup("h", [OSError("b")])]), None, False),
        (ExceptionGroup("g", [OSError("a"), TypeError("b")]), None, True),
    ],
    ids=["expected", "without words", "a bug", "an expected group", "a bug in a group"],
)
async def test_an_expected_failure_is_one_line_and_a_bug_has_its_traceback(end, text, is_bug):
    (line,) = await watch(Flaky(0, end=end), seconds=9, expected=(OSError,))

    assert ("service.failed", "demo") == (line["event"], line["service"])
    assert line["err"] == text if text else "g" in line["err"]
    assert line["exc_info"] is (end if is_bug else None)


async def test_an_error_that_comes_with_the_cancellation_does_not_hide_it():
    runs = []

    async def run():
        runs.append(asyncio.get_running_loop().time())
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise ConnectionError("closed while it was ended") from error

    async with asyncio.TaskGroup() as group:
        task = group.create_task(
            supervise("demo", run, Backoff((1.0,), 0.0, Seeded(0)), (ConnectionError,))
        )
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task], timeout=10)
        assert task.cancelled()

    assert [0] == runs


async def test_cancellations_that_a_failure_leaves_are_not_of_the_next_run():
    """On Python 3.11 a group whose task fails leaves a cancellation of its owner uncounted."""
    counts = []

    async def fail():
        await asyncio.sleep(0)
        raise ConnectionError("no")

    async def run():
        counts.append(asyncio.current_task().cancelling())
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(asyncio.sleep(5))

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.5):
            await supervise("demo", run, Backoff((1.0,), 0.0, Seeded(0)), (ConnectionError,))

    assert [0, 0, 0] == counts


class TierStage:
    """Notes when tasks start, are cancelled, cut short and end."""

    def __init__(self):
        self.journal = []

    def _note(self, what, name):
        self.journal.append((asyncio.get_running_loop().time(), what, name))

    def task(self, name, *, clean_up=0, fail_after=None, stubborn=False):
        async def run():
            self._note("start", name)
            try:
                await asyncio.sleep(fail_after if fail_after is not None else 10**6)
                raise ValueError(name)
            except asyncio.CancelledError:
                self._note("cancel", name)
                try:
                    await asyncio.sleep(clean_up)
                except asyncio.CancelledError:
                    self._note("cut", name)
                    if stubborn:
                        await asyncio.sleep(1)
                    raise
                finally:
                    self._note("end", name)
                raise

        return Task(name, run, None)


async def run(tiers, *, stop_after=None, deadline=10.0):
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        if stop_after is not None:
            asyncio.get_running_loop().call_later(stop_after, stop.set)
        await group.create_task(run_tiers(tiers, stop, deadline, Seeded(0), (OSError,)))


async def test_the_outer_tier_starts_first_and_stops_last_and_an_empty_one_is_no_obstacle():
    stage = TierStage()
    tiers = [[stage.task("state")], [stage.task("facts")], [], [stage.task("door", clean_up=2)], []]
    await run(tiers, stop_after=5)

    assert [
        *((0, "start", name) for name in ("state", "facts", "door")),
        *((5, "cancel", "door"), (7, "end", "door")),
        *((7, "cancel", "facts"), (7, "end", "facts")),
        *((7, "cancel", "state"), (7, "end", "state")),
    ] == stage.journal


@pytest.mark.parametrize(
    ("is_inner", "unwound"),
    [
        (True, [(3, "cancel", "b"), (4, "end", "b"), (4, "cancel", "a"), (5, "end", "a")]),
        (False, [(3, "cancel", "b"), (4, "end", "b")]),
    ],
)
async def test_a_failure_unwinds_all_once_and_surfaces(is_inner, unwound):
    stage = TierStage()
    outer, inner, bad = (
        stage.task("a", clean_up=1),
        stage.task("b", clean_up=1),
        stage.task("bad", fail_after=3),
    )
    with pytest.raises(ExceptionGroup) as caught:
        await run([[outer], [inner, bad]] if is_inner else [[bad], [inner]])

    assert caught.group_contains(ValueError, match="bad")
    assert unwound == [note for note in stage.journal if note[1] != "start"]


async def returns():
    await asyncio.sleep(1)


async def is_lost():
    raise asyncio.CancelledError


async def cleans_up_badly():
    try:
        await asyncio.Event().wait()
    finally:
        raise OSError("disk")


@pytest.mark.parametrize(
    ("work", "stop_after", "failure", "text"),
    [
        (returns, None, TaskEnded, "demo"),
        (is_lost, None, TaskEnded, "demo"),
        (cleans_up_badly, 1, OSError, "disk"),
    ],
)
async def test_any_end_but_the_requested_one_is_a_failure(work, stop_after, failure, text):
    with pytest.raises(ExceptionGroup) as caught:
        await run([[Task("demo", work, None)]], stop_after=stop_after)

    assert caught.group_contains(failure, match=text)


async def test_a_task_that_outlives_its_share_is_cut_short_and_named():
    stage = TierStage()
    tiers = [[stage.task("state", clean_up=7)], [stage.task("door", clean_up=100, stubborn=True)]]
    with structlog.testing.capture_logs() as logs:
        await run(tiers, stop_after=5, deadline=10)

    assert [
        *((5, "cancel", "door"), (10, "cut", "door"), (11, "end", "door")),
        *((11, "cancel", "state"), (15, "cut", "state"), (15, "end", "state")),
    ] == stage.journal[2:]
    assert ["door", "state"] == [line["task"] for line in logs if "tier.overdue" == line["event"]]


async def test_there_and_back_again_is_seen_as_a_change():
    cell = Cell("a")
    follower = cell.follow()
    await anext(follower)
    cell.set("b")
    cell.set("a")

    assert "a" == await anext(follower)


async def test_who_waits_for_several_cells_goes_on_in_the_next_turn_of_the_loop():
    """So the kubelet hears of a lost GPU before the report and the Events are made."""
    other, cell = Cell(0), Cell(0)

    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(News(other, cell).wait())
        await asyncio.sleep(0)
        cell.set(1)
        await asyncio.sleep(0)

        assert waiting.done()
