"""How often something is tried: delays between attempts, and limits on a rate."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

T = TypeVar("T")


async def retry(ask: Callable[[], Awaitable[T]], refused: type[Exception], pause: float) -> T:
    """Call `ask` every `pause` seconds until it does not raise `refused`; return its answer.

    The caller sets the deadline. A `pause` of whole seconds can collide every time with another
    client that calls in bursts at fixed times.
    """
    while True:
        try:
            return await ask()
        except refused:
            await asyncio.sleep(pause)


class Allowance(msgspec.Struct):
    """A token bucket: `burst` at once, then one every `refill` seconds.

    `spent` tokens were missing at `since` (loop time).
    """

    burst: int
    refill: float
    spent: float = 0.0
    since: float = 0.0

    def allows(self, now: float) -> bool:
        """Whether one more is allowed now."""
        return self.wait(now) == 0

    def wait(self, now: float) -> float:
        """Seconds until one more is allowed."""
        return max(0.0, (self._at(now) + 1 - self.burst) * self.refill)

    def spend(self, now: float) -> None:
        """Take one."""
        self.spent, self.since = self._at(now) + 1, now

    def _at(self, now: float) -> float:
        return max(0.0, self.spent - (now - self.since) / self.refill)


class Throttle:
    """Admits one, then none for `period` seconds, and counts the ones left out: for log lines."""

    def __init__(self, period: float) -> None:
        self._period = period
        self._next = 0.0
        self._left_out = 0

    def admit(self) -> int | None:
        """How many were left out since the last admitted one; None: leave this one out."""
        now = asyncio.get_running_loop().time()
        if now < self._next:
            self._left_out += 1
            return None
        self._next = now + self._period
        left_out, self._left_out = self._left_out, 0
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
