"""Daemon threads for calls that may never come back.

The loop's own executor is no place for them: its threads are joined when the process ends. Here a
call that passes its deadline is given up, its thread replaced, and its key (a GPU) skipped until
the thread comes back.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

THREADS: Final = 4
MOST_THREADS: Final = 64
FAREWELL: Final = 0.6


class CallPool:
    """Runs blocking calls on at most THREADS threads, plus one for each that is stuck.

    Not even with every thread stuck are there more than MOST_THREADS; then calls time out in the
    queue. All methods are called on the loop.
    """

    def __init__(self, name: str, deadline: float) -> None:
        self._name = name
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._stuck: dict[str, int] = {}
        self._flying = 0
        self._threads = 0
        self._quiet = asyncio.Event()

    @property
    def stuck(self) -> frozenset[str]:
        """The keys whose last call has not come back."""
        return frozenset(self._stuck)

    async def call(self, key: str, work: Callable[[], T], deadline: float | None = None) -> T:
        """The result of `work`, run on a thread.

        Raises TimeoutError past the deadline (seconds), and at once while an earlier call with
        the same key is stuck. What `work` raises is raised here.
        """
        if key in self._stuck:
            raise TimeoutError(f"an earlier call about {key} has not come back")
        job: _Job[T] = _Job(key, work, self._loop.create_future())
        self._jobs.put(job)  # type: ignore[arg-type] # its result goes to the job's own future
        self._flying += 1
        self._staff()
        try:
            async with asyncio.timeout(self._deadline if deadline is None else deadline):
                return await job.future
        finally:
            if job.give_up():
                self._stuck[key] = self._stuck.get(key, 0) + 1
                self._staff()

    async def close(self) -> None:
        """Send the threads home; wait a moment for those that can go."""
        self._quiet.clear()
        for _ in range(self._threads):
            self._jobs.put(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL):
                while self._threads > sum(self._stuck.values()):
                    await self._quiet.wait()
                    self._quiet.clear()

    def _staff(self) -> None:
        """Start a thread if there is work for it."""
        limit = min(THREADS + sum(self._stuck.values()), MOST_THREADS)
        if self._threads < min(limit, self._flying):
            self._threads += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _serve(self) -> None:
        """A thread's life: until it is sent home or has been given up once."""
        given_up = False
        while not given_up and (job := self._jobs.get()) is not None:
            given_up = job.run()
            self._tell(self._landed, job, given_up)
        self._tell(self._gone)

    def _landed(self, job: "_Job[object]", given_up: bool) -> None:  # noqa: FBT001 -- a callback
        self._flying -= 1
        if given_up:
            self._stuck[job.key] -= 1
            self._stuck = {key: count for key, count in self._stuck.items() if count}
        job.settle()

    def _gone(self) -> None:
        self._threads -= 1
        self._quiet.set()
        self._staff()

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        """Call back on the loop; a loop that is gone needs no news."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)


class _Job(Generic[T]):
    """One call: waiting, begun, done, or given up. The lock orders the two sides."""

    def __init__(self, key: str, work: Callable[[], T], future: "asyncio.Future[T]") -> None:
        self.key = key
        self.future = future
        self._work = work
        self._lock = threading.Lock()
        self._begun = False
        self._ended = False
        self._given_up = False
        self._result: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> bool:
        """On a thread: do it, unless given up before. True when it was given up meanwhile."""
        with self._lock:
            if self._given_up:
                return False
            self._begun = True
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
            return self._begun and not self._ended

    def settle(self) -> None:
        """On the loop: hand over the outcome to a caller who still waits."""
        if self.future.done():
            return
        if self._error is not None:
            self.future.set_exception(self._error)
        elif self._result:
            self.future.set_result(self._result[0])
