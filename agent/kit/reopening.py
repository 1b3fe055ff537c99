"""Delays before a stream is opened again after it ended, broke or lost its place."""

import asyncio
import random

from agent.kit.backoff import Backoff
from agent.kit.tally import Tally

DELAYS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
JITTER = 0.5
SPREAD = (1.0, 30.0)
"""Seconds: the longest delay after the first lost place, and after each further one."""
SHORTEST = 1.0
"""Seconds: after a stream that ended sooner, the next one waits."""
HEALTHY_AFTER = 30.0
"""Seconds: a stream that lasted so long resets the delays."""


class Reopening:
    """Delays between the openings of one stream; `restarts` (one label) counts why each was over.

    Call opening() before each try. Call one of the other methods after it: each returns the seconds
    until the next try.
    """

    def __init__(self, restarts: Tally, random: random.Random) -> None:
        self.failures = 0
        """How many streams broke since the last healthy one."""
        self._restarts = restarts
        self._random = random
        self._backoff = Backoff(DELAYS, JITTER, random)
        self._losses = 0
        self._began = 0.0

    def opening(self) -> None:
        """Note that a try begins."""
        self._began = asyncio.get_running_loop().time()

    def ended(self) -> float:
        """After a normal end: the next one begins at once, unless this one was too short."""
        lasted = self._over("ended")
        return 0.0 if lasted >= SHORTEST else self._backoff.next()

    def broke(self, at_least: float = 0.0) -> float:
        """After no answer or a bad one; the server asked for `at_least` so many seconds."""
        self._over("error")
        self.failures += 1
        return max(self._backoff.next(), at_least)

    def gone(self) -> float:
        """After the server forgot our place. It forgot every client's, so the delay is random."""
        self._over("gone")
        longest = SPREAD[min(self._losses, len(SPREAD) - 1)]
        self._losses += 1
        return self._random.uniform(0.0, longest)

    def _over(self, why: str) -> float:
        """Count the end, reset after a healthy stream, and return how many seconds it lasted."""
        self._restarts.add(why)
        lasted = asyncio.get_running_loop().time() - self._began
        if lasted >= HEALTHY_AFTER:
            self._backoff.reset()
            self.failures = self._losses = 0
        return lasted
