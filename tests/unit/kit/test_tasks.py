"""When a failed activity runs again or is given up, and in which order tiers start and stop."""

import asyncio

import pytest
import structlog

from agent.kit.tasks import (
    BudgetSpent,
    Heartbeat,
    RestartPolicy,
    Task,
    TaskEnded,
    run_tiers,
    supervise,
)
from tests.fakes.chance import Seeded


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


async def watch(flaky, policy, seconds, expected=()):
    with structlog.testing.capture_logs() as logs:
        try:
            async with asyncio.timeout(seconds):
                await supervise("demo", flaky.run, policy, Seeded(0), expected)
        except TimeoutError:
            return logs


async def test_delays_are_kept_to_the_second():
    flaky = Flaky(0, 0, 0, end=ValueError("no"))

    await watch(flaky, RestartPolicy((1.0, 2.0, 4.0)), 100)

    assert [0, 1, 3, 7] == flaky.starts


async def test_a_return_counts_as_a_failure():
    flaky = Flaky(0, 0)

    logs = await watch(flaky, RestartPolicy((1.0, 2.0)), 100)

    assert [0, 1, 3] == flaky.starts
    assert "demo ended although it must never end" == logs[0]["err"]


async def test_a_long_life_resets_the_delays():
    flaky = Flaky(0, 0, 30, 0, end=ValueError("no"))

    await watch(flaky, RestartPolicy((1.0, 2.0, 4.0)), 100)

    assert [0, 1, 3, 34, 36] == flaky.starts


async def test_a_life_just_short_of_healthy_resets_nothing():
    flaky = Flaky(0, 0, 29, end=ValueError("no"))

    await watch(flaky, RestartPolicy((1.0, 2.0, 4.0)), 100)

    assert [0, 1, 3, 36] == flaky.starts


async def test_a_spent_budget_raises_with_the_last_error_as_cause():
    error = ValueError("no")
    flaky = Flaky(*[0] * 9, end=error)

    with pytest.raises(BudgetSpent, match="demo") as caught:
        await watch(flaky, RestartPolicy((1.0,), budget=3), 100)

    assert [0, 1, 2, 3] == flaky.starts
    assert error is caught.value.__cause__
    assert "demo" == caught.value.name


async def test_a_spent_budget_after_returns_names_the_return():
    with pytest.raises(BudgetSpent) as caught:
        await watch(Flaky(0, 0), RestartPolicy((1.0,), budget=0), 100)

    assert isinstance(caught.value.__cause__, TaskEnded)


async def test_a_long_life_resets_the_budget():
    flaky = Flaky(0, 0, 40, 0, 0, end=ValueError("no"))

    await watch(flaky, RestartPolicy((1.0,), budget=3), 100)

    assert [0, 1, 2, 43, 44, 45] == flaky.starts


async def test_failures_older_than_the_window_do_not_count():
    flaky = Flaky(*[0] * 5, end=ValueError("no"))

    await watch(flaky, RestartPolicy((10.0,), budget=2, window=15.0), 100)

    assert [0, 10, 20, 30, 40, 50] == flaky.starts


async def test_unexpected_failures_have_a_budget_of_their_own():
    policy = RestartPolicy((1.0,), bug_budget=1)

    with pytest.raises(BudgetSpent):
        await watch(Flaky(0, 0, end=TypeError("bug")), policy, 100, expected=(OSError,))
    await watch(Flaky(0, 0, 0, end=OSError("net")), policy, 100, expected=(OSError,))


async def test_cancellation_passes_and_starts_nothing_again():
    flaky = Flaky()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(supervise("demo", flaky.run, RestartPolicy((1.0,)), Seeded(0)))
        await asyncio.sleep(5)
        task.cancel()

    assert task.cancelled()
    assert 1 == flaky.cancelled
    assert [0] == flaky.starts


async def test_an_expected_failure_is_one_line_and_a_bug_has_its_traceback():
    expected = await watch(
        Flaky(0, end=OSError("net")), RestartPolicy((1.0,)), 9, expected=(OSError,)
    )
    bug = TypeError("bug")
    unexpected = await watch(Flaky(0, end=bug), RestartPolicy((1.0,)), 9, expected=(OSError,))

    assert [("service.failed", "demo", "net", None)] == [summary(line) for line in expected]
    assert [("service.failed", "demo", "bug", bug)] == [summary(line) for line in unexpected]


@pytest.mark.parametrize(
    ("group", "is_bug"),
    [
        (ExceptionGroup("g", [OSError("a"), ExceptionGroup("h", [OSError("b")])]), False),
        (ExceptionGroup("g", [OSError("a"), TypeError("b")]), True),
    ],
)
async def test_a_group_is_expected_when_all_in_it_are(group, is_bug):
    logs = await watch(Flaky(0, end=group), RestartPolicy((1.0,)), 9, expected=(OSError,))

    assert is_bug == (logs[0]["exc_info"] is not None)


async def test_a_failure_without_words_is_named_by_its_type():
    logs = await watch(Flaky(0, end=OSError()), RestartPolicy((1.0,)), 9)

    assert "OSError" == logs[0]["err"]


def summary(line):
    return line["event"], line["service"], line["err"], line["exc_info"]


async def test_an_error_that_comes_with_the_cancellation_does_not_hide_it():
    runs = []

    async def run():
        runs.append(asyncio.get_running_loop().time())
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise ConnectionError("closed while it was ended") from error

    async with asyncio.TaskGroup() as group:
        task = group.create_task(supervise("demo", run, RestartPolicy((1.0,)), Seeded(0)))
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
            await supervise("demo", run, RestartPolicy((1.0,)), Seeded(0))

    assert [0, 0, 0] == counts


class TierStage:
    """Tasks that write down what happens to them, with the time."""

    def __init__(self):
        self.journal = []
        self.cancels = {}

    def _note(self, what, name):
        self.journal.append((asyncio.get_running_loop().time(), what, name))

    def task(self, name, *, clean_up=0.0, fail_after=None, stubborn=False):
        async def run():
            self._note("start", name)
            try:
                await asyncio.sleep(fail_after if fail_after is not None else 10**6)
                raise ValueError(name)
            except asyncio.CancelledError:
                await self._clean_up(name, clean_up, stubborn=stubborn)
                raise

        return Task(name, run)

    async def _clean_up(self, name, seconds, *, stubborn):
        self._note("cancel", name)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self._note("cut", name)
            if stubborn:
                await asyncio.sleep(1)
            raise
        finally:
            self._note("end", name)


async def run(tiers, *, stop_after=None, deadline=10.0):
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        if stop_after is not None:
            asyncio.get_running_loop().call_later(stop_after, stop.set)
        await group.create_task(run_tiers(tiers, stop, deadline))


async def test_the_outer_tier_starts_first_and_stops_last():
    stage = TierStage()
    tiers = [[stage.task("state")], [stage.task("facts")], [stage.task("door", clean_up=2)]]

    await run(tiers, stop_after=5)

    assert [
        (0, "start", "state"),
        (0, "start", "facts"),
        (0, "start", "door"),
        (5, "cancel", "door"),
        (7, "end", "door"),
        (7, "cancel", "facts"),
        (7, "end", "facts"),
        (7, "cancel", "state"),
        (7, "end", "state"),
    ] == stage.journal


async def test_tasks_of_one_tier_stop_together():
    stage = TierStage()

    await run([[stage.task("a", clean_up=2), stage.task("b", clean_up=1)]], stop_after=5)

    assert [(5, "cancel", "a"), (5, "cancel", "b"), (6, "end", "b"), (7, "end", "a")] == (
        stage.journal[2:]
    )


async def test_a_failure_in_the_inner_tier_unwinds_all_and_surfaces():
    stage = TierStage()
    tiers = [[stage.task("state", clean_up=1)], [stage.task("door", clean_up=1)]]
    tiers[1].append(stage.task("bad", fail_after=3))

    with pytest.raises(ExceptionGroup) as caught:
        await run(tiers)

    assert caught.group_contains(ValueError, match="bad")
    assert [
        (3, "cancel", "door"),
        (4, "end", "door"),
        (4, "cancel", "state"),
        (5, "end", "state"),
    ] == stage.journal[3:]


async def test_a_failure_in_the_outer_tier_cancels_everybody_once():
    stage = TierStage()
    tiers = [[stage.task("bad", fail_after=3)], [stage.task("door", clean_up=2)]]

    with pytest.raises(ExceptionGroup) as caught:
        await run(tiers)

    assert caught.group_contains(ValueError, match="bad")
    assert [(3, "cancel", "door"), (5, "end", "door")] == stage.journal[2:]


async def test_a_task_that_returns_is_a_failure():
    async def run_out():
        await asyncio.sleep(1)

    with pytest.raises(ExceptionGroup) as caught:
        await run([[Task("brief", run_out)]])

    assert caught.group_contains(TaskEnded, match="brief")


async def test_a_task_that_is_cancelled_by_nobody_is_a_failure():
    async def lose_itself():
        raise asyncio.CancelledError

    with pytest.raises(ExceptionGroup) as caught:
        await run([[Task("lost", lose_itself)]])

    assert caught.group_contains(TaskEnded, match="lost")


async def test_a_failing_clean_up_surfaces():
    async def run_badly():
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("disk")

    with pytest.raises(ExceptionGroup) as caught:
        await run([[Task("writer", run_badly)]], stop_after=1)

    assert caught.group_contains(OSError, match="disk")


async def test_a_task_that_outlives_its_share_is_cut_short_and_named():
    stage = TierStage()
    tiers = [[stage.task("state", clean_up=7)], [stage.task("door", clean_up=100, stubborn=True)]]

    with structlog.testing.capture_logs() as logs:
        await run(tiers, stop_after=5, deadline=10)

    assert [
        (5, "cancel", "door"),
        (10, "cut", "door"),
        (11, "end", "door"),
        (11, "cancel", "state"),
        (15, "cut", "state"),
        (15, "end", "state"),
    ] == stage.journal[2:]
    assert ["door", "state"] == [line["task"] for line in logs if "tier.overdue" == line["event"]]


async def test_time_that_a_quick_tier_leaves_is_the_next_ones():
    stage = TierStage()
    tiers = [[stage.task("state", clean_up=9)], [stage.task("door")]]

    await run(tiers, stop_after=5, deadline=10)

    assert (14, "end", "state") == stage.journal[-1]


async def test_a_cancelled_caller_cancels_every_tier_from_the_inside_out():
    stage = TierStage()
    tiers = [[stage.task("state")], [stage.task("door", clean_up=1)]]

    async with asyncio.TaskGroup() as group:
        whole = group.create_task(run_tiers(tiers, asyncio.Event(), 10.0))
        await asyncio.sleep(3)
        whole.cancel()

    assert whole.cancelled()
    assert ["door", "door", "state", "state"] == [name for _, _, name in stage.journal[2:]]


async def test_an_empty_tier_is_no_obstacle():
    stage = TierStage()

    await run([[], [stage.task("door")], []], stop_after=5)

    assert [(0, "start", "door"), (5, "cancel", "door"), (5, "end", "door")] == stage.journal


async def test_before_the_first_beat_the_age_is_infinite():
    assert float("inf") == Heartbeat().age()


async def test_a_turning_loop_keeps_it_fresh_and_an_end_lets_it_age():
    heartbeat = Heartbeat(interval=2.0)
    async with asyncio.TaskGroup() as group:
        beating = group.create_task(heartbeat.run())
        await asyncio.sleep(101)
        assert 1.0 == heartbeat.age()
        beating.cancel()
        await asyncio.sleep(10)

    assert 11.0 == heartbeat.age()
