"""Time, and what happens over time: ticks, running time, the order of calls, counters."""

import asyncio
import contextlib
import datetime as dt
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from agent.kit.cell import Cell

# When work in the background may run. Periodic work shares its ticks, so that an idle process wakes
# seldom. Other work waits until no call has been in progress for a while.

TURN: Final = 0.1
"""Seconds. Threads that run at the same time wake each other, so they take turns after a tick."""

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
    """Seconds until the next multiple of `period` on the loop's clock, and `turn` times TURN."""
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
# blames the peer. So the clock is read every 10 ms while a deadline is open; what is beyond that
# is lag. Lag extends the open deadlines, up to a limit.

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
        """Until then, answers that came during the last lag are being read."""

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


# Orders the turns of a client that starts several at once and can use only the last one granted: a
# grant to an earlier turn breaks it. A turn is a question and then a request for the ids in its
# answer. The ids tell which question a request belongs to.

BOOKING: Final = 0.1
"""Seconds that the client has after an answer to record it."""

CLOSE: Final = 0.01
"""Seconds: two turns that begin within this time can arrive in the other order."""

BEGUN: Final = 5.0
"""Seconds after which a question is forgotten: a client requests at once."""

MOST_QUESTIONS: Final = 64


class Turn(msgspec.Struct, eq=False):
    """One turn of `client`; `at` is the loop time of its beginning.

    - `ids`: those that it heard or requests.
    - `overtaken`: a later turn began, so this one must not be granted. `may_be_stale`: it began so
      soon after another that it may be overtaken too.
    - `overlapped`: another request was open at the same time. `yields`: then this one is refused.
    - `there`: whether what the question looked for was there. `all_there`: all that was there then.
    - `beside`: the turns that were open when this one began, until a later one begins.
    - `over`: set when its answer is being sent.
    """

    at: float
    client: object
    ids: frozenset[str] = frozenset()
    overtaken: bool = False
    may_be_stale: bool = False
    overlapped: bool = False
    yields: bool = False
    there: Mapping[tuple[str, str], bool] = msgspec.field(default_factory=dict)
    all_there: frozenset[tuple[str, str]] | None = None
    beside: tuple["Turn", ...] = ()
    over: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    @property
    def is_lost(self) -> bool:
        """Whether it must not be granted: another one overtook it, or may have."""
        return self.overtaken or (self.yields and self.overlapped)


class CallOrder:
    """The open turns: questions without a request yet, and requests. `client`: the present one."""

    def __init__(self, client: Callable[[], object]) -> None:
        self._client = client
        self._questions: deque[Turn] = deque(maxlen=MOST_QUESTIONS)
        self._requests: list[Turn] = []

    def begin(self) -> Turn:
        """Begin a turn with a question; the caller sets `ids` to those in its answer."""
        turn = self._begin()
        self._questions.append(turn)
        return turn

    def offered(self) -> frozenset[str]:
        """The ids in the answers of turns whose request has not come."""
        return frozenset(text for question in self._recent() for text in question.ids)

    @contextlib.contextmanager
    def asked(self, ids: Collection[str]) -> Iterator[Turn]:
        """The turn of a request for these ids, open while the block runs."""
        wanted = frozenset(ids)
        same = [question for question in self._recent() if question.ids == wanted]
        if same:
            turn = same[-1]
            self._questions.remove(turn)
            for earlier in same[:-1]:  # it cannot be known which of them it belongs to
                earlier.overtaken = turn.overtaken = True
        else:
            turn = self._begin()
            turn.ids = wanted
        self._requests.append(turn)
        if len(self._requests) > 1:
            for other in self._requests:
                other.overlapped = True
        try:
            yield turn
        finally:
            self._requests.remove(turn)
            turn.over.set()

    async def until_alone(self, turn: Turn) -> None:
        """Return once no other request that may be granted is open and all are recorded."""
        while True:
            for other in self._others(turn):
                await other.over.wait()
            await asyncio.sleep(BOOKING)
            if not self._others(turn):
                return

    def _others(self, turn: Turn) -> list[Turn]:
        others = (other for other in self._requests if other is not turn)
        return [other for other in others if not (other.yields or other.overtaken)]

    def _begin(self) -> Turn:
        turn = Turn(loop_time(), self._client())
        turn.beside = (*self._requests, *self._recent())
        for earlier in (*self._requests, *self._questions):
            earlier.overtaken, earlier.beside = True, ()  # no turn keeps all before it alive
            turn.may_be_stale |= turn.at - earlier.at < CLOSE and earlier.client == turn.client
        return turn

    def _recent(self) -> list[Turn]:
        """The questions whose request may still come, in their order."""
        since, client = loop_time() - BEGUN, self._client()
        return [turn for turn in self._questions if turn.at > since and turn.client == client]


# Numbers over time.


class Tally:
    """A counter with labels. `name` (without prefix) and `help` stand on the metrics page.

    `expected`: label values that the page shows with 0 from the start, so that the first one
    counted is an increase.
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
