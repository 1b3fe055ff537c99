"""Deadlines that count only the time in which the event loop ran.

A process that gets too little of the processor reads an answer long after it came, and a deadline
by the clock blames the peer for it. So the clock is read every 10 ms while a deadline is open. What
passes between two readings beyond that is lag: the loop waited for the processor, or a callback
held it. Lag extends the open deadlines, up to a limit.
"""

import asyncio
import contextlib
import math
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
        self._read = 0.0
        self._measured = 0.0
        self._granted = 0.0
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
        if self._open:
            self._look()
        self._read = began = loop.time()
        self._open += 1
        granted, measured = self._granted, self._measured
        timer: asyncio.TimerHandle | None = None
        is_last = False

        def check() -> None:
            nonlocal timer, is_last
            self._look()
            now, due = loop.time(), began + seconds + self._granted - granted
            if now < due - NOISE:
                timer = loop.call_at(min(due, now + TICK), check)
            elif now < self._settled and not is_last:
                is_last, timer = True, loop.call_at(self._settled, check)
            else:
                close()
                ring(2 * (self._measured - measured) > now - began)

        def close() -> None:
            nonlocal timer
            if timer is not None:
                timer.cancel()
                timer = None
                self._open -= 1

        timer = loop.call_at(min(began + seconds, began + TICK), check)
        try:
            yield
        finally:
            self._look()
            close()

    @contextlib.asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Bound the block to `seconds` of running time. Raises TimeoutError, Starved."""
        loop, deadline, starved = asyncio.get_running_loop(), asyncio.timeout(None), False

        def end(is_starved: bool) -> None:  # noqa: FBT001 -- as alarm() calls it
            nonlocal starved
            starved = is_starved
            deadline.reschedule(loop.time())

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
        """Measure the lag since the last reading and grant what the limit leaves."""
        now = asyncio.get_running_loop().time()
        late, self._read = now - self._read - TICK, now
        if not self._open or late < NOISE:
            return
        while self._grants and self._grants[0][0] <= now - WINDOW:
            self._left += self._grants.popleft()[1]
        self._measured += late
        grant = min(late, self._left)
        if grant > 0:
            self._left -= grant
            self._granted += grant
            self._grants.append((now, grant))
            if late > TICK:
                self._settled = now + TICK


class Budget:
    """Seconds of running time for several waits together."""

    def __init__(self, lag: Lag, seconds: float) -> None:
        self._lag = lag
        self._left = seconds

    @contextlib.asynccontextmanager
    async def within(self, most: float = math.inf, *, spare: float = 0.0) -> AsyncIterator[None]:
        """Bound the block to `most` seconds, and to what is left beyond `spare` seconds.

        Raises TimeoutError, Starved.
        """
        began = self._lag.clock()
        try:
            async with self._lag.within(min(most, self._left - spare)):
                yield
        finally:
            self._left -= self._lag.clock() - began
