"""Delays between attempts: a row of seconds whose last entry repeats, and chance on top."""

import random


class Backoff:
    """The next delay of a row, until reset.

    `jitter` is the largest fraction that chance adds to a delay: 0.5 makes 2 s become 2 to 3 s.
    """

    def __init__(self, delays: tuple[float, ...], jitter: float, random: random.Random) -> None:
        if not delays or min(delays) < 0 or jitter < 0:
            raise ValueError("delays are one or more seconds, none negative, and so is jitter")
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
        """Start over: an attempt went well."""
        self._given = 0
