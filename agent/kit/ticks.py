"""Says when work in the background may run.

Periodic work runs at ticks that all of it shares, so that an idle process wakes seldom. Other work
waits until no call has been in progress for a while.
"""

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import Final

TURN: Final = 0.1
"""Seconds. Threads that run at the same time wake each other, because only one has the interpreter
lock. So work for different threads takes turns after a tick."""

EARLY: Final = 0.001
"""Seconds before a tick that count as the tick, because timers can fire a little early."""


def until_tick(period: float, turn: int = 0) -> float:
    """Seconds until the next tick: more than 0, at most `period` and EARLY.

    Ticks are the multiples of `period` on the loop's clock, and `turn` times TURN later. Work whose
    periods are multiples of each other, with the same turn, runs together.
    """
    now, late = asyncio.get_running_loop().time(), turn * TURN
    return (math.floor((now - late + EARLY) / period) + 1) * period + late - now


class Lull:
    """Counts the work in progress. A waiter delays no work."""

    def __init__(self) -> None:
        self._active = 0
        self._ended = -math.inf
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count as work in progress while the block runs."""
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            self._ended = asyncio.get_running_loop().time()
            if not self._active:
                self._idle.set()

    async def come(self, seconds: float) -> None:
        """Return once no work has been in progress for `seconds`."""
        loop = asyncio.get_running_loop()
        while self._active or (left := self._ended + seconds - loop.time()) > 0:
            if self._active:
                await self._idle.wait()
            else:
                await asyncio.sleep(left)
