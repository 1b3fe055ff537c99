"""When a failed activity runs again or is given up, and in which order tiers start and stop.

A cell publishes state: each follower sees the newest value at its own pace.
"""

import asyncio

import pytest
import structlog

from agent.kit.cell import Cell, News
from agent.kit.tasks import Allowance, Backoff, BudgetSpent, Task, TaskEnded, run_tiers, supervise
from tests.fakes.chance import Seeded

NO, BUG = ValueError("no"), TypeError("bug")


def now():
    return asyncio.get_running_loop().time()


async def test_one_is_let_through_in_a_period_and_the_next_one_counts_the_rest():
    throttle = Allowance(1, 1.0)
    assert [0, None, None, None] == [throttle.admit() for _ in range(4)]
    await asyncio.sleep(1.0)
    assert [3, None] == [throttle.admit(), throttle.admit()]
    await asyncio.sleep(5.0)
    assert 1 == throttle.admit()


async def supervised(run, delays=(1.0,), seconds=100.0, expected=(ValueError, TaskEnded)):
    """The log of so many seconds."""
    with structlog.testing.capture_logs() as logs:
        try:
            async with asyncio.timeout(seconds):
                await supervise("demo", run, Backoff(delays, 0.0, Seeded(0)), expected)
        except TimeoutError:
            return logs


def flaky(starts, lives, end):
    """An activity that lives `lives[i]` seconds and then fails, and the last time for ever."""

    async def run():
        starts.append(now())
        if len(starts) > len(lives):
            await asyncio.Event().wait()
        await asyncio.sleep(lives[len(starts) - 1])
        raise end

    return run


@pytest.mark.parametrize(
    ("lives", "end", "delays", "starts"),
    [
        ([0, 0, 0], NO, (1.0, 2.0, 4.0), [0, 1, 3, 7]),
        ([0, 0, 30, 0], NO, (1.0, 2.0, 4.0), [0, 1, 3, 34, 36]),  # after a long life
        ([0, 0, 29], NO, (1.0, 2.0, 4.0), [0, 1, 3, 36]),
        # Unexpected failures have a budget in a window, anew after a long life.
        ([0] * 9, BUG, (1.0,), [0, 1, 2, 3]),
        ([0, 0, 0, 40, 0, 0, 0], BUG, (1.0,), [0, 1, 2, 3, 44, 45, 46]),
        ([0] * 9, BUG, (120.0,), [0, 120, 240, 360, 480, 600, 720, 840, 960]),
    ],
)
async def test_a_failed_activity_runs_again_after_its_delay(lives, end, delays, starts):
    begun, spent = [], None
    try:
        await supervised(flaky(begun, lives, end), delays, starts[-1] + 1, (ValueError,))
    except BudgetSpent as error:
        spent = error

    assert starts == begun
    assert (end is BUG and delays == (1.0,)) == (spent is not None)
    if spent:
        assert end is spent.__cause__
        assert "demo failed too often and was given up" == str(spent)


@pytest.mark.parametrize(
    ("end", "text", "is_bug"),
    [
        (OSError("net"), "net", False),
        (OSError(), "OSError", False),
        (BUG, "bug", True),
        (ExceptionGroup("g", [OSError("a"), ExceptionGroup("h", [OSError("b")])]), "g", False),
        (ExceptionGroup("g", [OSError("a"), TypeError("b")]), "g", True),
    ],
)
async def test_an_expected_failure_is_one_line_and_a_bug_has_its_traceback(end, text, is_bug):
    (line,) = await supervised(flaky([], [0], end), seconds=9, expected=(OSError,))
    assert ("service.failed", "demo") == (line["event"], line["service"])
    assert text in line["err"] if text == "g" else text == line["err"]
    assert line["exc_info"] is (end if is_bug else None)


async def test_an_error_that_comes_with_the_cancellation_does_not_hide_it():
    runs = []

    async def run():
        runs.append(now())
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise ValueError("closed while it was ended") from error

    async with asyncio.TaskGroup() as group:
        task = group.create_task(supervised(run))
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

    await supervised(run, seconds=2.5, expected=(ConnectionError,))
    assert [0, 0, 0] == counts


def a_task(journal, name, *, clean_up=0, fail_after=10**6, stubborn=False):
    """Notes when it is started, cancelled, cut short and ends."""

    async def run():
        journal.append((now(), "start", name))
        try:
            await asyncio.sleep(fail_after)
            raise ValueError(name)
        except asyncio.CancelledError:
            journal.append((now(), "cancel", name))
            try:
                await asyncio.sleep(clean_up)
            except asyncio.CancelledError:
                journal.append((now(), "cut", name))
                await asyncio.sleep(int(stubborn))
                raise
            finally:
                journal.append((now(), "end", name))
            raise

    return Task(name, run, None)


async def run_all(tiers, *, stop_after=None, deadline=10.0):
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        if stop_after is not None:
            asyncio.get_running_loop().call_later(stop_after, stop.set)
        await group.create_task(run_tiers(tiers, stop, deadline, Seeded(0), (OSError,)))


async def test_the_outer_tier_starts_first_and_stops_last_and_an_empty_one_is_no_obstacle():
    seen = []
    state, facts, door = (
        a_task(seen, "state"),
        a_task(seen, "facts"),
        a_task(seen, "door", clean_up=2),
    )
    await run_all([[state], [facts], [], [door], []], stop_after=5)

    assert [
        *((0, "start", name) for name in ("state", "facts", "door")),
        *((5, "cancel", "door"), (7, "end", "door")),
        *((7, "cancel", "facts"), (7, "end", "facts")),
        *((7, "cancel", "state"), (7, "end", "state")),
    ] == seen


@pytest.mark.parametrize("is_inner", [True, False])
async def test_a_failure_unwinds_all_once_and_surfaces(is_inner):
    seen = []
    outer, inner = (a_task(seen, name, clean_up=1) for name in "ab")
    bad = a_task(seen, "bad", fail_after=3)
    with pytest.raises(ExceptionGroup) as caught:
        await run_all([[outer], [inner, bad]] if is_inner else [[bad], [inner]])
    assert caught.group_contains(ValueError, match="bad")
    first, then = [(3, "cancel", "b"), (4, "end", "b")], [(4, "cancel", "a"), (5, "end", "a")]
    assert first + then * is_inner == [note for note in seen if note[1] != "start"]


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
    ("work", "failure", "text"),
    [
        (returns, TaskEnded, "demo"),
        (is_lost, TaskEnded, "demo"),
        (cleans_up_badly, OSError, "disk"),
    ],
)
async def test_any_end_but_the_requested_one_is_a_failure(work, failure, text):
    with pytest.raises(ExceptionGroup) as caught:
        await run_all([[Task("demo", work, None)]], stop_after=1 if failure is OSError else None)
    assert caught.group_contains(failure, match=text)


async def test_a_task_that_outlives_its_share_is_cut_short_and_named():
    seen = []
    state, door = (
        a_task(seen, "state", clean_up=7),
        a_task(seen, "door", clean_up=100, stubborn=True),
    )
    with structlog.testing.capture_logs() as logs:
        await run_all([[state], [door]], stop_after=5)

    assert [
        *((5, "cancel", "door"), (10, "cut", "door"), (11, "end", "door")),
        *((11, "cancel", "state"), (15, "cut", "state"), (15, "end", "state")),
    ] == seen[2:]
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
