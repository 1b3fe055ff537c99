"""Daemon threads for calls that may never come back.

The loop's own executor is no place for them: its threads are joined when the process ends. Here a
call that passes its deadline is given up, its thread replaced, and its key (a GPU) skipped until
the thread comes back. Calls with one key run one after the other, so that a key holds at most one
thread, whatever is asked about it. A GPU has one key, its UUID, but while it is not known whose an
index is, the index is another: a GPU that hangs as its index is in doubt may hold a second thread.
"""

import asyncio
import collections
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import structlog

T = TypeVar("T")

THREADS: Final = 4
MOST_THREADS: Final = 32
"""Half of what the unit allows to the process (TasksMax): others need threads, too."""

PATIENCE: Final = 0.2
"""A call that has waited so long for a thread gets one of its own: the others are slow."""
FAREWELL: Final = 0.6

log = structlog.get_logger(__name__)


class CallPool:
    """Runs blocking calls on THREADS threads, and on more for as long as some are stuck or slow.

    Not even with every thread stuck are there more than MOST_THREADS; then calls time out in the
    queue, as they do when the machine gives no thread; it is asked again. `back` is called with a
    key that was stuck and is so no more. All methods are called on the loop.
    """

    def __init__(
        self, name: str, deadline: float, back: Callable[[str], None] = lambda _: None
    ) -> None:
        self._name = name
        self._deadline = deadline
        self._back = back
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._lines: dict[str, collections.deque[_Job[object]]] = {}
        self._stuck: set[str] = set()
        self._until = 0.0
        """The loop's time at which the time of every call is up."""
        self._flying = 0
        self._threads = 0
        self._leaving = 0
        self._refused = False
        """The machine gave no thread when it was last asked for one."""
        self._moved = asyncio.Event()
        """Set when a call or a thread has left, or got stuck."""

    @property
    def stuck(self) -> frozenset[str]:
        """The keys whose last call has not come back."""
        return frozenset(self._stuck)

    @property
    def threads(self) -> int:
        """Threads that live: those at work, those at rest, and one for each stuck key."""
        return self._threads

    async def call(
        self, key: str, work: Callable[[], T], late: Callable[[T], None] | None = None
    ) -> T:
        """The result of `work`, run on a thread, after earlier calls with the same key.

        Raises TimeoutError past the pool's deadline, which begins anew when the earlier calls
        have come back, and at once while one of them is stuck. What `work` raises is raised here.
        When the caller leaves early, what has begun has its time all the same.
        `late` is given the result for which nobody waits any more.
        """
        job = self._begin(key, work, late, timed=True)
        try:
            return await job.future
        finally:
            if not job.landed and not job.begun:
                self._give_up(job)  # type: ignore[arg-type]

    def post(
        self, key: str, work: Callable[[], T], late: Callable[[T], None]
    ) -> "asyncio.Future[T]":
        """The same for whoever does not wait; look at the future in a callback."""
        return self._begin(key, work, late, timed=True).future

    def launch(self, key: str, work: Callable[[], T]) -> "asyncio.Future[T]":
        """The same without a deadline, for work that must outlive whoever waits for it.

        Look at the future with asyncio.wait: to await it is to cancel it with oneself, while the
        thread goes on. Raises TimeoutError while an earlier call with the same key is stuck.
        """
        return self._begin(key, work, None, timed=False).future

    async def empty(self) -> bool:
        """Wait until every call has left. False: one is inside although its time is up.

        Each has until its deadline, whether or not somebody waits for it. Nobody waits here for
        what hangs longer, however often this is asked.
        """
        while self._lines.keys() - self._stuck and self._loop.time() < self._until:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._until):
                    await self._moves(lambda: not self._lines.keys() - self._stuck)
        return not self._lines

    async def close(self) -> None:
        """Send the threads home; wait a moment for those that can go."""
        for _ in range(self._threads):
            self._jobs.put(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL):
                await self._moves(lambda: self._threads <= len(self._stuck))

    async def _moves(self, holds: Callable[[], bool]) -> None:
        """Wait until it holds."""
        while not holds():
            self._moved.clear()
            await self._moved.wait()

    # Calls with one key stand in line; the first of a line is on the way.

    def _begin(
        self, key: str, work: Callable[[], T], late: Callable[[T], None] | None, *, timed: bool
    ) -> "_Job[T]":
        """Raises TimeoutError while an earlier call with that key is stuck."""
        self._lend()  # a thread that could not be had before
        if key in self._stuck:
            raise _not_back(key)
        job: _Job[T] = _Job(key, work, self._loop.create_future(), late, timed=timed)
        self._line_up(job)  # type: ignore[arg-type] # its result goes to the job's own future
        return job

    def _line_up(self, job: "_Job[object]") -> None:
        line = self._lines.setdefault(job.key, collections.deque())
        line.append(job)
        if len(line) == 1:
            self._dispatch(job)
        else:
            self._limit(job)

    def _limit(self, job: "_Job[object]") -> None:
        """Its time begins: once for the line, and once for the call itself."""
        self._until = self._loop.time() + self._deadline
        if job.timed:
            job.limit(self._loop.call_at(self._until, self._expire, job))

    def _expire(self, job: "_Job[object]") -> None:
        if job.ended or job.landed:
            return  # it is on its way back, or given up already
        first = self._lines[job.key][0] is job
        self._give_up(job)
        text = "" if job.begun else "no thread was free for the call in time"
        job.refuse(TimeoutError(text if first else f"earlier calls about {job.key} take too long"))

    def _dispatch(self, job: "_Job[object]") -> None:
        self._flying += 1
        self._limit(job)
        self._jobs.put(job)
        self._lend()
        job.timer = self._loop.call_later(PATIENCE, self._hurry, job)

    def _hurry(self, job: "_Job[object]") -> None:
        """Again and again: the machine may have had no thread to give."""
        if not job.begun and not job.landed:
            self._hire()
            job.timer = self._loop.call_later(PATIENCE, self._hurry, job)

    def _give_up(self, job: "_Job[object]") -> None:
        line = self._lines[job.key]
        if line[0] is not job:
            line.remove(job)
        elif job.give_up():
            self._stuck.add(job.key)
            self._moved.set()
            while len(line) > 1:
                line.pop().refuse(_not_back(job.key))
            self._lend()
        job.landed = True

    def _landed(self, job: "_Job[object]", given_up: bool) -> None:  # noqa: FBT001 -- a callback
        self._flying -= 1
        was_stuck = job.key in self._stuck
        self._stuck.discard(job.key)
        line = self._lines[job.key]
        line.popleft()
        job.settle()
        if line:
            self._dispatch(line[0])
        else:
            del self._lines[job.key]
        self._moved.set()
        if not given_up:
            self._dismiss()
        if was_stuck:
            self._back(job.key)

    # Threads come and go.

    def _wanted(self) -> int:
        return THREADS + len(self._stuck)

    def _lend(self) -> None:
        """What waits for a thread gets one, if the others are stuck or too few."""
        if self._threads - self._leaving < min(self._wanted(), self._flying):
            self._hire()

    def _hire(self) -> None:
        if self._threads >= MOST_THREADS:
            return
        try:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        except RuntimeError as error:  # a limit of the unit or of the machine
            if not self._refused:
                log.warning("driver.no_thread", threads=self._threads, err=str(error))
            self._refused = True
        else:
            self._threads += 1
            self._refused = False

    def _dismiss(self) -> None:
        """Send a thread home that was hired while others were slow or stuck."""
        if self._jobs.empty() and self._threads - self._leaving > self._wanted():
            self._leaving += 1
            self._jobs.put(None)

    def _serve(self) -> None:
        """A thread's life: until it is sent home or has been given up once."""
        given_up = False
        while not given_up and (job := self._jobs.get()) is not None:
            given_up = job.run()
            self._tell(self._landed, job, given_up)
        self._tell(self._gone, given_up)

    def _gone(self, given_up: bool) -> None:  # noqa: FBT001 -- a callback
        self._threads -= 1
        if not given_up:
            self._leaving = max(0, self._leaving - 1)
        self._moved.set()
        self._lend()

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        """Call back on the loop; a loop that is gone needs no news."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)


def _not_back(key: str) -> TimeoutError:
    return TimeoutError(f"an earlier call about {key} has not come back")


class _Job(Generic[T]):
    """One call: waiting, begun, done, or given up. The lock orders the two sides."""

    def __init__(
        self,
        key: str,
        work: Callable[[], T],
        future: "asyncio.Future[T]",
        late: Callable[[T], None] | None,
        *,
        timed: bool,
    ) -> None:
        self.key = key
        self.future = future
        self.timed = timed
        self.timer: asyncio.TimerHandle | None = None
        self.landed = False
        """There is no more to do for its caller."""
        self.begun = False
        self.ended = False
        self._work = work
        self._late = late
        self._end: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()
        self._given_up = False
        self._result: list[T] = []
        self._error: BaseException | None = None

    def limit(self, end: asyncio.TimerHandle) -> None:
        """On the loop: its time ends with this timer, and not with an earlier one."""
        if self._end is not None:
            self._end.cancel()
        self._end = end

    def run(self) -> bool:
        """On a thread: do it, unless given up before. True when it was given up meanwhile."""
        with self._lock:
            if self._given_up:
                return False
            self.begun = True
        try:
            self._result.append(self._work())
        except BaseException as error:  # noqa: BLE001 -- handed on to the caller, whatever it is
            self._error = error
        with self._lock:
            self.ended = True
            return self._given_up

    def give_up(self) -> bool:
        """On the loop: want it no longer. True when a thread is in it."""
        with self._lock:
            self._given_up = not self.ended
            return self.begun and not self.ended

    def refuse(self, error: TimeoutError) -> None:
        """On the loop: whoever waits for it gets nothing."""
        self._rest()
        if not self.future.done():
            self.future.set_exception(error)

    def settle(self) -> None:
        """On the loop: give the outcome to a caller who still waits."""
        self._rest()
        if not self.future.done():
            if self._error is not None:
                self.future.set_exception(self._error)
            elif self._result:
                self.future.set_result(self._result[0])
        elif self._result and self._late is not None:
            self._late(self._result[0])

    def _rest(self) -> None:
        self.landed = True
        for timer in (self.timer, self._end):
            if timer is not None:
                timer.cancel()
