"""When to open a stream again that ended, broke, or lost its place."""

import asyncio
import random

from agent.kit.backoff import Backoff
from agent.kit.tally import Tally

DELAYS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
JITTER = 0.5
SPREAD = (1.0, 30.0)
"""A lost place is looked up within 1 s; lost again, within 30 s of each."""
SHORTEST = 1.0
"""A stream that ended sooner is no good one: the next waits its turn."""
HEALTHY_AFTER = 30.0
"""A stream that lasted so long clears the memory of earlier failures."""


class Reopening:
    """Delays between the openings of one stream; `restarts` (one label) counts why it was over.

    Call `opening` before each try, and one of the others when it is over: each gives the seconds
    to wait until the next one.
    """

    def __init__(self, restarts: Tally, random: random.Random) -> None:
        self.failures = 0
        """Streams that broke since the last healthy one."""
        self._restarts = restarts
        self._random = random
        self._backoff = Backoff(DELAYS, JITTER, random)
        self._losses = 0
        self._began = 0.0

    def opening(self) -> None:
        """A try begins now."""
        self._began = asyncio.get_running_loop().time()

    def ended(self) -> float:
        """It ended as agreed: the next one may begin at once, unless this one was too short."""
        lasted = self._over("ended")
        return 0.0 if lasted >= SHORTEST else self._backoff.next()

    def broke(self, at_least: float = 0.0) -> float:
        """No answer, or a bad one; `at_least` so many seconds were asked for."""
        self._over("error")
        self.failures += 1
        return max(self._backoff.next(), at_least)

    def gone(self) -> float:
        """The other side forgot our place; everybody's place, so the return is spread by chance."""
        self._over("gone")
        longest = SPREAD[min(self._losses, len(SPREAD) - 1)]
        self._losses += 1
        return self._random.uniform(0.0, longest)

    def _over(self, why: str) -> float:
        """Count it, and forget earlier failures after a healthy one: seconds that it lasted."""
        self._restarts.add(why)
        lasted = asyncio.get_running_loop().time() - self._began
        if lasted >= HEALTHY_AFTER:
            self._backoff.reset()
            self.failures = self._losses = 0
        return lasted
