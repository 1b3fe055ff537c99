"""Deadlines that count only the time in which the event loop ran.

A process that gets too little CPU reads an answer long after it came, and a deadline by the clock
blames the peer for it. So the clock is read every 10 ms while a deadline is open. What passes
beyond that is lag: the loop waited for the processor, or a callback held it. Lag extends the
deadlines that are open, up to a limit.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

TICK: Final = 0.01
"""Seconds between two readings of the clock."""

NOISE: Final = 0.001
"""Seconds by which any timer may be early or late."""

MOST: Final = 10.0
WINDOW: Final = 60.0
"""Seconds of lag that extend deadlines, at most, in any WINDOW seconds."""


class Starved(TimeoutError):  # noqa: N818 -- names what happened
    """The deadline passed, and for most of the time the loop did not run."""


class Lag:
    """Measures the lag while a deadline is open. Deadlines that share it share its limit."""

    def __init__(self) -> None:
        self._open = 0
        self._read = self._measured = self._granted = 0.0
        self._left = MOST
        self._grants: deque[tuple[float, float]] = deque()
        """The time and the seconds of each grant of the last WINDOW seconds."""
        self._settled = 0.0
        """Until then the answers that lie there since the last lag are being read."""

    @contextlib.contextmanager
    def alarm(self, seconds: float, ring: Callable[[bool], None]) -> Iterator[None]:
        """Call `ring` once if the block takes longer than `seconds` of running time.

        Its argument: whether the loop did not run for most of the time that passed.
        """
        loop = asyncio.get_running_loop()
        self._look()
        began, granted, measured = self._read, self._granted, self._measured
        is_last = is_over = False
        timer: asyncio.TimerHandle

        def check() -> None:
            nonlocal timer, is_last, is_over
            self._look()
            due = began + seconds + self._granted - granted
            if self._read < due - NOISE:
                timer = loop.call_at(min(due, self._read + TICK), check)
            elif self._read < self._settled and not is_last:
                is_last, timer = True, loop.call_at(self._settled, check)
            else:
                is_over = True
                self._open -= 1
                ring(2 * (self._measured - measured) > self._read - began)

        timer = loop.call_at(began, check)
        self._open += 1
        try:
            yield
        finally:
            self._look()
            self._open -= not is_over
            timer.cancel()

    @contextlib.asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Bound the block to `seconds` of running time. Raises TimeoutError, Starved."""
        deadline, starved = asyncio.timeout(None), False

        def end(is_starved: bool) -> None:  # noqa: FBT001 -- as alarm() calls it
            nonlocal starved
            starved = is_starved
            deadline.reschedule(self._read)

        try:
            async with deadline:
                with self.alarm(seconds, end):
                    yield
        except TimeoutError as error:
            if starved and deadline.expired():
                raise Starved from error
            raise

    def clock(self) -> float:
        """The loop's time without the lag that was granted."""
        return asyncio.get_running_loop().time() - self._granted

    def _look(self) -> None:
        """Read the clock, measure the lag since the last reading and grant what is left for it."""
        now = asyncio.get_running_loop().time()
        late, self._read = now - self._read - TICK, now
        if not self._open or late < NOISE:
            return
        self._measured += late
        while self._grants and self._grants[0][0] <= now - WINDOW:
            self._left += self._grants.popleft()[1]
        grant = min(late, self._left)
        if grant > 0:
            self._left -= grant
            self._granted += grant
            self._grants.append((now, grant))
            self._settled = now + TICK if late > TICK else self._settled


class Budget:
    """Seconds of running time for several waits together."""

    def __init__(self, lag: Lag, seconds: float) -> None:
        self._lag = lag
        self.left = seconds

    @contextlib.asynccontextmanager
    async def within(self, most: float | None = None) -> AsyncIterator[None]:
        """Bound the block to what is left, and to `most` seconds. Raises TimeoutError, Starved."""
        began = self._lag.clock()
        try:
            async with self._lag.within(self.left if most is None else min(most, self.left)):
                yield
        finally:
            self.left -= self._lag.clock() - began
