"""Runs standing tasks: how often something is tried, restarts, tiers that stop one by one."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Final, NoReturn, Protocol, TypeVar, TypeVarTuple

import msgspec
import structlog

log = structlog.get_logger(__name__)

TEXT_LIMIT = 256
"""Characters of an error in the log of a restart."""

T = TypeVar("T")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Offload(Protocol):
    """Runs blocking calls elsewhere, one after the other."""

    async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        """Run `work(*args)`. Cancelling the caller does not stop work that has begun."""


# How often something is tried: delays between attempts, and limits on a rate.


async def retry(ask: Callable[[], Awaitable[T]], refused: type[Exception], pause: float) -> T:
    """Call `ask` every `pause` seconds until it does not raise `refused`; return its answer."""
    while True:
        try:
            return await ask()
        except refused:
            await asyncio.sleep(pause)


class Allowance(msgspec.Struct):
    """A token bucket, the limit of every rate: `burst` at once, then one every `refill` seconds.

    `full_at`: the loop time at which all `burst` are there again. `left_out`: see admit().
    """

    burst: int
    refill: float
    full_at: float = 0.0
    left_out: int = 0

    def allows(self, now: float) -> bool:
        """Whether one more is allowed now."""
        return self.wait(now) == 0

    def wait(self, now: float) -> float:
        """Seconds until one more is allowed."""
        missing = max(0.0, self.full_at - now) - (self.burst - 1) * self.refill
        # Sums of floats: a caller that waited as long as it was told must find its token.
        return missing if missing > 1e-6 else 0.0

    def spend(self, now: float) -> None:
        """Take one."""
        self.full_at = max(self.full_at, now) + self.refill

    def admit(self) -> int | None:
        """For log lines: how many were left out since the last one; None: leave this one out."""
        now = asyncio.get_running_loop().time()
        if not self.allows(now):
            self.left_out += 1
            return None
        self.spend(now)
        left_out, self.left_out = self.left_out, 0
        return left_out


class Backoff:
    """Gives the delays one after the other, from the first again after reset().

    `jitter` is the largest fraction added at random: 0.5 turns 2 s into 2 to 3 s.
    """

    def __init__(self, delays: tuple[float, ...], jitter: float, random: random.Random) -> None:
        self._delays = delays
        self._jitter = jitter
        self._random = random
        self._given = 0

    def next(self) -> float:
        """Seconds to wait before the next attempt."""
        delay = self._delays[min(self._given, len(self._delays) - 1)]
        self._given += 1
        return delay * (1 + self._jitter * self._random.random())

    def reset(self) -> None:
        """Start again with the first delay: an attempt succeeded."""
        self._given = 0


HEALTHY_AFTER: Final = 30.0
"""Seconds: an activity that lasted so long resets the delays."""

DEFECTS: Final = 3
WINDOW: Final = 300.0
"""An activity is given up after more than DEFECTS defects in WINDOW seconds."""


class BudgetSpent(Exception):  # noqa: N818 -- names what happened
    """An activity failed too often; its last error is the cause."""


class TaskEnded(Exception):  # noqa: N818 -- names what happened
    """A task that must never end ended without an error."""


class Task(msgspec.Struct, frozen=True):
    """A standing task: `run` ends only when it is cancelled.

    `delays`: before it is run again, and their jitter, see Backoff. None: its failure ends all.
    `after`: what it waits for at its start.
    """

    name: str
    run: Callable[[], Coroutine[object, object, None]]
    delays: tuple[tuple[float, ...], float] | None = (0.1, 0.5, 1.0, 5.0), 0.0
    after: Callable[[], Awaitable[object]] | None = None


async def in_own_task(work: Awaitable[T]) -> T:
    """Return the result of `work` or raise its error; CancelledError if the caller is cancelled.

    `work` runs in a task of its own, so that its cancellations are not the caller's. To end a call,
    grpclib cancels the task of the call, raises the error in its place, and lets the cancellation
    count; so does a TaskGroup on Python 3.11. In the caller's task, an outer `asyncio.timeout`
    would take its own cancellation for another's. (Give a call of grpclib no `timeout` of its own.)
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
    backoff: Backoff,
    expected: tuple[type[Exception], ...],
) -> NoReturn:
    """Run `run`, and again whenever it fails or returns. Cancellation ends it.

    Failures of the types `expected` (alone or in groups) may repeat for ever; all others are
    defects, and logged with their traceback: BudgetSpent is raised after too many. A run of
    HEALTHY_AFTER seconds resets delays and counts.
    """
    loop = asyncio.get_running_loop()
    budget = Allowance(DEFECTS, WINDOW / max(DEFECTS, 1))
    while True:
        started = loop.time()
        failure: Exception = TaskEnded(f"{name} ended although it must never end")
        try:
            await in_own_task(run())
        except Exception as error:  # noqa: BLE001 -- every failure leads to a restart
            failure = error

        now = loop.time()
        if now - started >= HEALTHY_AFTER:
            backoff.reset()
            budget.full_at = now

        is_defect = ExceptionGroup("", [failure]).split(expected)[1] is not None
        text = (str(failure) or type(failure).__name__)[:TEXT_LIMIT]
        if is_defect and not budget.allows(now):
            log.error("service.given_up", service=name, err=text, exc_info=failure)
            raise BudgetSpent(f"{name} failed too often and was given up") from failure
        if is_defect:
            budget.spend(now)

        delay, trace = backoff.next(), failure if is_defect else None
        again = round(delay, 3)
        log.warning("service.failed", service=name, err=text, again_in=again, exc_info=trace)
        del failure, trace  # they hold the frames of the ended run
        await asyncio.sleep(delay)


async def run_tiers(
    tiers: Sequence[Sequence[Task]],
    stop: asyncio.Event,
    deadline: float,
    chance: random.Random,
    expected: tuple[type[Exception], ...],
) -> None:
    """Run all tasks until `stop` is set; then stop tier by tier. `expected`: see supervise().

    The first tier starts first and stops last. All tiers together have `deadline` seconds, each an
    equal share of the time left. A task that exceeds it is cancelled a second time, which
    interrupts its clean-up. Raises ExceptionGroup: a task failed or ended; all tiers are stopped.
    """
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        running: list[list[asyncio.Task[None]]] = []
        for tier in filter(None, tiers):
            group = await stack.enter_async_context(asyncio.TaskGroup())
            running.append(
                [group.create_task(_stand(task, chance, expected), name=task.name) for task in tier]
            )
        # A failure ends the wait: the groups have cancelled their tasks then, and a second cancel
        # would interrupt their clean-up.
        await stop.wait()

        over_at = loop.time() + deadline
        while running:
            share = max(0.0, over_at - loop.time()) / len(running)
            tasks = running.pop()
            for task in tasks:
                task.cancel()
            _, overdue = await asyncio.wait(tasks, timeout=share)
            for task in overdue:
                log.warning("tier.overdue", task=task.get_name(), share=round(share, 3))
                task.cancel()
            if overdue:
                await asyncio.wait(overdue)


async def _stand(task: Task, chance: random.Random, expected: tuple[type[Exception], ...]) -> None:
    """Run a task; any end but a requested cancellation is a failure."""
    try:
        if task.after is not None:
            await task.after()
        if task.delays is None:
            await task.run()
        else:
            await supervise(task.name, task.run, Backoff(*task.delays, chance), expected)
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
    raise TaskEnded(f"{task.name} ended although it must never end")
