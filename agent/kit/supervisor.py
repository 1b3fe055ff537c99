"""Runs one activity, and runs it again after a delay whenever it ends."""

import asyncio
import collections
import random
from collections.abc import Awaitable, Callable
from typing import NoReturn

import msgspec
import structlog

from agent.kit.apart import apart
from agent.kit.backoff import Backoff

log = structlog.get_logger(__name__)

TEXT_LIMIT = 256


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


class RunReturned(Exception):  # noqa: N818 -- names what happened
    """An activity that must never end returned without an error."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} returned although it must never end")


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
    failures = _Failures(policy)
    while True:
        started = loop.time()
        try:
            await apart(run())
            raise RunReturned(name)  # noqa: TRY301 -- a return is a failure
        except Exception as error:  # noqa: BLE001 -- every failure leads to a restart
            failure = error
        now = loop.time()
        if now - started >= policy.healthy_after:
            backoff.reset()
            failures.forget()
        is_bug = not _is_expected(failure, expected)
        failures.add(now, is_bug=is_bug)
        if failures.spent():
            log.error("service.given_up", service=name, err=_text(failure), exc_info=failure)
            raise BudgetSpent(name) from failure
        delay = backoff.next()
        log.warning(
            "service.failed",
            service=name,
            err=_text(failure),
            again_in=round(delay, 3),
            exc_info=failure if is_bug else None,
        )
        del failure  # it holds the frames of the ended run
        await asyncio.sleep(delay)


class _Failures:
    """The failures within the window: loop time, and whether each was unexpected."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._times: collections.deque[tuple[float, bool]] = collections.deque()

    def add(self, now: float, *, is_bug: bool) -> None:
        self._times.append((now, is_bug))
        while self._times[0][0] < now - self._policy.window:
            self._times.popleft()

    def forget(self) -> None:
        self._times.clear()

    def spent(self) -> bool:
        bugs = sum(is_bug for _, is_bug in self._times)
        return _over(len(self._times), self._policy.budget) or _over(bugs, self._policy.bug_budget)


def _over(count: int, budget: int | None) -> bool:
    return budget is not None and count > budget


def _is_expected(failure: Exception, expected: tuple[type[Exception], ...]) -> bool:
    if isinstance(failure, ExceptionGroup) and expected:
        return failure.split(expected)[1] is None
    return isinstance(failure, expected)


def _text(failure: Exception) -> str:
    return (str(failure) or type(failure).__name__)[:TEXT_LIMIT]
