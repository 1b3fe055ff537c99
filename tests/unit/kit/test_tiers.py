"""run_tiers(): outer tiers start first and stop last; a failure anywhere unwinds them all."""

import asyncio

import pytest
import structlog

from agent.kit.tiers import Task, TaskEnded, run_tiers


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
