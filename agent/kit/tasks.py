"""Runs standing tasks: each again whenever it ends, and all in tiers that stop one by one."""

import asyncio
import collections
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn, TypeVar

import msgspec
import structlog

from agent.kit.backoff import Backoff
from agent.kit.ticks import until_tick

log = structlog.get_logger(__name__)

TEXT_LIMIT = 256

T = TypeVar("T")


class RestartPolicy(msgspec.Struct, frozen=True):
    """How often an activity may fail, and how long to wait before it runs again.

    `delays` (seconds; the last one repeats) and `jitter`: see Backoff. At most `budget` restarts
    are allowed within `window` seconds (None: any number), and at most `bug_budget` of them after
    unexpected failures. A run of `healthy_after` seconds resets delays and counts.
    """

    delays: tuple[float, ...]
    jitter: float = 0.0
    budget: int | None = None
    window: float = 300.0
    healthy_after: float = 30.0
    bug_budget: int | None = None


class BudgetSpent(Exception):  # noqa: N818 -- names what happened
    """An activity failed more often than its policy allows; its last error is the cause."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} failed too often and was given up")
        self.name = name


class TaskEnded(Exception):  # noqa: N818 -- names what happened
    """A task that must never end ended without an error."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} ended although it must never end")
        self.name = name


class Task(msgspec.Struct, frozen=True):
    """A standing task: `run` ends only when it is cancelled."""

    name: str
    run: Callable[[], Awaitable[None]]


async def apart(work: Awaitable[T]) -> T:
    """Return the result of `work` or raise its error; CancelledError if the caller is cancelled.

    `work` runs in a task of its own, so that its cancellations are not the caller's. To end a call,
    grpclib cancels the task of the call, raises the error in its place, and lets the cancellation
    count; so does a TaskGroup on Python 3.11. In the caller's task, an outer `asyncio.timeout`
    would take its own cancellation for another's, and an error that comes with a cancellation of
    the caller would hide it. (So give a call of grpclib no `timeout` of its own.)
    """
    caller = asyncio.current_task()
    before = caller.cancelling() if caller else 0
    try:
        return await asyncio.ensure_future(work)  # noqa: TID251 -- a group would hide errors
    finally:
        if caller and caller.cancelling() > before:
            raise asyncio.CancelledError


async def supervise(
    name: str,
    run: Callable[[], Awaitable[None]],
    policy: RestartPolicy,
    random: random.Random,
    expected: tuple[type[Exception], ...] = (),
) -> NoReturn:
    """Run `run`, and again whenever it fails or returns. Cancellation ends it.

    Failures of the types `expected` (alone or in groups) are logged as one line, all others with
    their traceback.

    Raises:
        BudgetSpent: the policy allows no further restart.
    """
    loop = asyncio.get_running_loop()
    backoff = Backoff(policy.delays, policy.jitter, random)
    failures: collections.deque[tuple[float, bool]] = collections.deque()
    while True:
        started = loop.time()
        try:
            await apart(run())
            raise TaskEnded(name)  # noqa: TRY301 -- a return is a failure
        except Exception as error:  # noqa: BLE001 -- every failure leads to a restart
            failure = error
        now = loop.time()
        if now - started >= policy.healthy_after:
            backoff.reset()
            failures.clear()
        if isinstance(failure, ExceptionGroup) and expected:
            is_bug = failure.split(expected)[1] is not None
        else:
            is_bug = not isinstance(failure, expected)
        failures.append((now, is_bug))
        while failures[0][0] < now - policy.window:
            failures.popleft()
        text = (str(failure) or type(failure).__name__)[:TEXT_LIMIT]
        bugs = sum(was_bug for _, was_bug in failures)
        for count, budget in ((len(failures), policy.budget), (bugs, policy.bug_budget)):
            if budget is not None and count > budget:
                log.error("service.given_up", service=name, err=text, exc_info=failure)
                raise BudgetSpent(name) from failure
        delay = backoff.next()
        log.warning(
            "service.failed",
            service=name,
            err=text,
            again_in=round(delay, 3),
            exc_info=failure if is_bug else None,
        )
        del failure  # it holds the frames of the ended run
        await asyncio.sleep(delay)


async def run_tiers(
    tiers: Sequence[Sequence[Task]], stop: asyncio.Event, deadline: float, depth: int = 0
) -> float:
    """Run all tasks until `stop` is set; then stop tier by tier.

    The first tier is the outer one: it starts first and stops last. Each tier is cancelled and
    awaited before the next. All tiers together have `deadline` seconds: each gets an equal share of
    the time left. A task that exceeds its share is cancelled a second time, which interrupts its
    clean-up. Returns the loop time at which all had to end.

    Raises:
        ExceptionGroup: a task failed or ended (TaskEnded). All tiers are stopped.
    """
    loop = asyncio.get_running_loop()
    if depth == len(tiers):
        await stop.wait()
        return loop.time() + deadline
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_stand(task), name=task.name) for task in tiers[depth]]
        over_at = await run_tiers(tiers, stop, deadline, depth + 1)
        # Not after a failure: the group has cancelled them already, and a second cancel would
        # interrupt their clean-up.
        for task in tasks:
            task.cancel()
        if tasks:
            share = max(0.0, over_at - loop.time()) / (depth + 1)
            _, overdue = await asyncio.wait(tasks, timeout=share)
            for task in overdue:
                log.warning("tier.overdue", task=task.get_name(), share=round(share, 3))
                task.cancel()
    return over_at


async def _stand(task: Task) -> None:
    """Run a task; any end but a requested cancellation is a failure."""
    try:
        await task.run()
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
        raise TaskEnded(task.name) from error
    raise TaskEnded(task.name)


class Heartbeat:
    """Measures for how long the loop has been blocked: it notes the time at each tick."""

    def __init__(self, interval: float = 5.0) -> None:
        self._interval = interval
        self._last: float | None = None

    async def run(self) -> NoReturn:
        """Beat every `interval` seconds until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._last = loop.time()
            await asyncio.sleep(until_tick(self._interval))

    def age(self) -> float:
        """Seconds since the last beat; infinite before the first one."""
        if self._last is None:
            return float("inf")
        return asyncio.get_running_loop().time() - self._last
