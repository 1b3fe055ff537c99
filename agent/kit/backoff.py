"""Delays between attempts: a list of seconds whose last entry repeats, plus random jitter."""

import random


class Backoff:
    """Gives the delays one after the other, from the first again after reset().

    `jitter` is the largest fraction added at random: 0.5 turns 2 s into 2 to 3 s.
    """

    def __init__(self, delays: tuple[float, ...], jitter: float, random: random.Random) -> None:
        if not delays or min(delays) < 0 or jitter < 0:
            raise ValueError("delays must not be empty; neither they nor jitter may be negative")
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
