"""Delays before a stream is opened again after it ended, broke or lost its place."""

import asyncio
import random

from agent.kit.backoff import Backoff
from agent.kit.tally import Tally

DELAYS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
JITTER = 0.5
SPREAD = (4.0, 30.0)
"""Seconds: the longest random delay after what every client of a server meets at the same moment.
That is a break, an early end or a lost place; the second holds for each further lost place."""
SHORTEST = 1.0
"""Seconds: after a stream that ended sooner, the delays grow."""
LASTING = 300.0
"""Seconds for which a stream is asked for at least. The server ended a shorter one with all others,
as when it stops."""
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
        """After a normal end: the next one begins at once, unless the server ended all of them."""
        lasted = self._over("ended")
        if lasted < SHORTEST:
            return self._backoff.next()
        return 0.0 if lasted >= LASTING else self._spread(0)

    def broke(self, at_least: float = 0.0) -> float:
        """After no answer or a bad one; the server asked for `at_least` so many seconds.

        It asked all its clients, so they must not come back in the same moment.
        """
        self._over("error")
        self.failures += 1
        delay = self._spread(0) if self.failures == 1 else self._backoff.next()
        return max(delay, at_least + self._spread(0)) if at_least else delay

    def gone(self) -> float:
        """After the server forgot our place."""
        self._over("gone")
        self._losses += 1
        return self._spread(self._losses - 1)

    def _spread(self, times: int) -> float:
        return self._random.uniform(0.0, SPREAD[min(times, len(SPREAD) - 1)])

    def _over(self, why: str) -> float:
        """Count the end, reset after a healthy stream, and return how many seconds it lasted."""
        self._restarts.add(why)
        lasted = asyncio.get_running_loop().time() - self._began
        if lasted >= HEALTHY_AFTER:
            self._backoff.reset()
            self.failures = self._losses = 0
        return lasted
