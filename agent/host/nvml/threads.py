"""Daemon threads for calls that may never come back.

The loop's own executor is no place for them: its threads are joined when the process ends. Here a
call that passes its deadline is given up, its thread replaced, and its key (a GPU) skipped until
the thread comes back. Calls with one key run one after the other, so that a GPU holds at most one
thread, whatever is asked about it.
"""

import asyncio
import collections
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

THREADS: Final = 4
MOST_THREADS: Final = 64
PATIENCE: Final = 0.2
"""A call that has waited so long for a thread gets one of its own: the others are slow."""
FAREWELL: Final = 0.6


class CallPool:
    """Runs blocking calls on THREADS threads, and on more for as long as some are stuck or slow.

    Not even with every thread stuck are there more than MOST_THREADS; then calls time out in the
    queue. All methods are called on the loop.
    """

    def __init__(self, name: str, deadline: float) -> None:
        self._name = name
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._lines: dict[str, collections.deque[_Job[object]]] = {}
        self._stuck: set[str] = set()
        self._latest = 0.0
        """The loop's time of the latest call."""
        self._flying = 0
        self._threads = 0
        self._leaving = 0
        self._moved = asyncio.Event()
        """Set when a call or a thread has left."""

    @property
    def stuck(self) -> frozenset[str]:
        """The keys whose last call has not come back."""
        return frozenset(self._stuck)

    @property
    def threads(self) -> int:
        """Threads that live: those at work, those at rest, and one for each stuck key."""
        return self._threads

    async def call(self, key: str, work: Callable[[], T]) -> T:
        """The result of `work`, run on a thread, after earlier calls with the same key.

        Raises TimeoutError past the pool's deadline, and at once while an earlier call with
        the same key is stuck. What `work` raises is raised here.
        """
        job = self._begin(key, work)
        try:
            async with asyncio.timeout(self._deadline):
                return await job.future
        finally:
            if not job.landed:
                self._give_up(job)  # type: ignore[arg-type]

    def launch(self, key: str, work: Callable[[], T]) -> "asyncio.Future[T]":
        """The same without a deadline, for work that must outlive whoever waits for it.

        Look at the future with asyncio.wait: to await it is to cancel it with oneself, while the
        thread goes on. Raises TimeoutError while an earlier call with the same key is stuck.
        """
        return self._begin(key, work).future

    async def empty(self) -> bool:
        """Wait until every call has left. False: one is inside although its time is up.

        Each has until its deadline, whether or not somebody waits for it. Nobody waits here for
        what hangs longer, however often this is asked.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._latest + self._deadline):
                await self._moves(lambda: not self._lines)
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

    def _begin(self, key: str, work: Callable[[], T]) -> "_Job[T]":
        """Raises TimeoutError while an earlier call with that key is stuck."""
        if key in self._stuck:
            raise _not_back(key)
        job: _Job[T] = _Job(key, work, self._loop.create_future())
        self._line_up(job)  # type: ignore[arg-type] # its result goes to the job's own future
        return job

    def _line_up(self, job: "_Job[object]") -> None:
        self._latest = self._loop.time()
        line = self._lines.setdefault(job.key, collections.deque())
        line.append(job)
        if len(line) == 1:
            self._dispatch(job)

    def _dispatch(self, job: "_Job[object]") -> None:
        self._flying += 1
        self._jobs.put(job)
        if self._threads - self._leaving < min(self._wanted(), self._flying):
            self._hire()
        job.timer = self._loop.call_later(PATIENCE, self._hurry, job)

    def _hurry(self, job: "_Job[object]") -> None:
        if not job.begun:
            self._hire()

    def _give_up(self, job: "_Job[object]") -> None:
        line = self._lines[job.key]
        if line[0] is not job:
            line.remove(job)
        elif job.give_up():
            self._stuck.add(job.key)
            while len(line) > 1:
                line.pop().refuse(_not_back(job.key))
            self._lend()

    def _landed(self, job: "_Job[object]", given_up: bool) -> None:  # noqa: FBT001 -- a callback
        self._flying -= 1
        self._stuck.discard(job.key)
        job.settle()
        line = self._lines[job.key]
        line.popleft()
        if line:
            self._dispatch(line[0])
        else:
            del self._lines[job.key]
        self._moved.set()
        if not given_up:
            self._dismiss()

    # Threads come and go.

    def _wanted(self) -> int:
        return THREADS + len(self._stuck)

    def _lend(self) -> None:
        """A thread has got stuck: what waits for it gets another."""
        if self._threads - self._leaving < min(self._wanted(), self._flying):
            self._hire()

    def _hire(self) -> None:
        if self._threads < MOST_THREADS:
            self._threads += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

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

    def __init__(self, key: str, work: Callable[[], T], future: "asyncio.Future[T]") -> None:
        self.key = key
        self.future = future
        self.timer: asyncio.TimerHandle | None = None
        self.landed = False
        self.begun = False
        self._work = work
        self._lock = threading.Lock()
        self._ended = False
        self._given_up = False
        self._result: list[T] = []
        self._error: BaseException | None = None

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
            self._ended = True
            return self._given_up

    def give_up(self) -> bool:
        """On the loop: want it no longer. True when a thread is in it."""
        with self._lock:
            self._given_up = not self._ended
            return self.begun and not self._ended

    def refuse(self, error: TimeoutError) -> None:
        """On the loop: it will not be done."""
        self.landed = True
        if not self.future.done():
            self.future.set_exception(error)

    def settle(self) -> None:
        """On the loop: give the outcome to a caller who still waits."""
        self.landed = True
        if self.timer is not None:
            self.timer.cancel()
        if self.future.done():
            return
        if self._error is not None:
            self.future.set_exception(self._error)
        elif self._result:
            self.future.set_result(self._result[0])
