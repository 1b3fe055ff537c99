"""supervise(): when a failed activity runs again, when it is given up, and what passes through."""

import asyncio

import pytest
import structlog

from agent.kit.supervisor import BudgetSpent, RestartPolicy, RunReturned, supervise
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
    assert "demo returned although it must never end" == logs[0]["err"]


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

    assert isinstance(caught.value.__cause__, RunReturned)


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
