"""Time and numbers over time: running time, ticks, counters."""

import asyncio
import bisect
import contextlib
import datetime as dt
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Final

from agent.kit.cell import Cell

# When work in the background may run. Periodic work runs at ticks that all of it shares, so that
# an idle process wakes seldom. Other work waits until no call has been in progress for a while.

TURN: Final = 0.1
"""Seconds. Threads that run at the same time wake each other, because only one has the interpreter
lock. So work for different threads takes turns after a tick."""

EARLY: Final = 0.001
"""Seconds before a tick that count as the tick, because timers can fire a little early."""


class SystemClock:
    """Wall time, for display and for stamps that other programs read."""

    def now(self) -> dt.datetime:
        """The current time, aware, in UTC."""
        return dt.datetime.now(dt.UTC)


def loop_time() -> float:
    """The time of the running loop."""
    return asyncio.get_running_loop().time()


def until_tick(period: float, turn: int = 0) -> float:
    """Seconds until the next tick: more than 0, at most `period` and EARLY.

    Ticks are the multiples of `period` on the loop's clock, and `turn` times TURN later. Work whose
    periods are multiples of each other, with the same turn, runs together.
    """
    now, late = asyncio.get_running_loop().time(), turn * TURN
    return (math.floor((now - late + EARLY) / period) + 1) * period + late - now


async def await_event(event: asyncio.Event, within: float | None) -> bool:
    """Wait until the event is set, at most `within` seconds. Returns whether it is."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within):
            await event.wait()
    return event.is_set()


class IdleWaiter:
    """Counts the work in progress. A waiter delays no work."""

    def __init__(self) -> None:
        self._lag = Lag()
        self._active = Cell(0)
        self._ended = -math.inf

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count as work in progress while the block runs."""
        self._active.set(self._active.value + 1)
        try:
            yield
        finally:
            self._ended = loop_time()
            self._active.set(self._active.value - 1)

    async def idle_for(self, seconds: float) -> None:
        """Return once no work has been in progress for `seconds`."""
        while True:
            await self._active.until(lambda count: count == 0)
            left = self._ended + seconds - loop_time()
            if left <= 0:
                return
            # After a stall of the loop, work that came meanwhile is counted first.
            with contextlib.suppress(TimeoutError):
                async with self._lag.within(left):
                    await asyncio.Event().wait()


# Deadlines that count only the time in which the event loop ran.
#
# A process that gets too little CPU reads an answer long after it came, and a deadline by the clock
# blames the peer for it. So the clock is read every 10 ms while a deadline is open. What passes
# beyond that is lag: the loop waited for the processor, or a callback held it. Lag extends the
# deadlines that are open, up to a limit.

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


class Tally:
    """A counter with labels. `name` (without prefix) and `help` stand on the metrics page.

    `expected`: label values that the page shows from the start, with 0. Without that, the first
    one that is counted is no increase to who reads the page.
    """

    def __init__(
        self,
        name: str,
        help: str,  # noqa: A002 -- Prometheus' word
        labels: tuple[str, ...] = (),
        expected: Iterable[tuple[str, ...]] = (),
    ) -> None:
        self.expected = tuple(expected) if labels else ((),)
        self.name = name
        self.help = help
        self.labels = labels
        self._counts: dict[tuple[str, ...], int] = {}

    def add(self, *label_values: str, amount: int = 1) -> int:
        """Count `amount` more for these label values (one per label). Returns their count."""
        count = self._counts[label_values] = self._counts.get(label_values, 0) + amount
        return count

    def items(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        """Label values and count, sorted by label values."""
        return tuple(sorted(self._counts.items()))


class Durations:
    """A histogram of seconds with labels. `buckets`: ascending upper bounds, without infinity."""

    def __init__(
        self,
        name: str,
        help: str,  # noqa: A002 -- Prometheus' word
        labels: tuple[str, ...],
        buckets: tuple[float, ...],
    ) -> None:
        self.name = name
        self.help = help
        self.labels = labels
        self.buckets = buckets
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._totals: dict[tuple[str, ...], float] = {}

    def observe(self, seconds: float, *label_values: str) -> None:
        """Add one duration for these label values (one per label)."""
        counts = self._counts.setdefault(label_values, [0] * (len(self.buckets) + 1))
        counts[bisect.bisect_left(self.buckets, seconds)] += 1
        self._totals[label_values] = self._totals.get(label_values, 0.0) + seconds

    def rows(self) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], float]]:
        """Label values, sorted, with the observations up to each bound, and their sum in seconds.

        The last number of observations counts all.
        """
        for labels, counts in sorted(self._counts.items()):
            yield labels, tuple(itertools.accumulate(counts)), self._totals[labels]
