"""Clocks for tests: wall time that moves only with the test."""

import asyncio
import datetime as dt
from dataclasses import dataclass

START = dt.datetime(2026, 8, 21, 6, 20, 39, tzinfo=dt.UTC)


@dataclass(slots=True)
class ManualClock:
    """Stands still until it is moved."""

    moment: dt.datetime = START

    def now(self) -> dt.datetime:
        return self.moment

    def advance(self, seconds: float) -> None:
        self.moment += dt.timedelta(seconds=seconds)


class LoopClock:
    """Wall time that passes as the running loop's clock does, and can be set."""

    def __init__(self, start: dt.datetime = START) -> None:
        self._start = start
        self._zero = asyncio.get_running_loop().time()

    def step(self, by: dt.timedelta) -> None:
        """Somebody sets the clock."""
        self._start += by

    def now(self) -> dt.datetime:
        elapsed = asyncio.get_running_loop().time() - self._zero
        return self._start + dt.timedelta(seconds=elapsed)
