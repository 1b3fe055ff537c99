"""One daemon thread for each GPU, and one for the driver as a whole: a call may never come back.

The loop's own executor is no place for them: its threads are joined when the process ends. Here a
call that passes its deadline is given up, and further ones about that GPU are refused until it
comes back; the other GPUs have threads of their own. A GPU's name is its UUID, but while it is not
known whose an index is, the index: one that hangs then may hold a second thread.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Collection
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class GpuThreads:
    """Runs blocking calls, each on the thread of its GPU. All methods are called on the loop.

    `back` is called with the name of a GPU that was stuck and is so no more.
    """

    def __init__(self, deadline: float, back: Callable[[str], None] = lambda _: None) -> None:
        self._deadline = deadline
        self._back = back
        self._threads: dict[str, _GpuThread] = {}
        self._moved = asyncio.Event()

    @property
    def stuck(self) -> frozenset[str]:
        """The GPUs whose last call has not come back."""
        return frozenset(name for name, thread in self._threads.items() if thread.stuck)

    async def call(
        self, gpu: str, work: Callable[[], T], late: Callable[[T], None] | None = None
    ) -> T:
        """The result of `work`, run on that GPU's thread, after earlier calls about it.

        Raises TimeoutError past the deadline, which begins anew when the earlier calls have come
        back, and at once while one of them is stuck or the machine gives no thread. What `work`
        raises is raised here. When the caller leaves early, what has begun has its time all the
        same. `late` is given the result for which nobody waits any more.
        """
        thread, call = self._of(gpu), _ThreadCall(work, late)
        thread.add(call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            thread.leave(call)
            raise

    def post(
        self, gpu: str, work: Callable[[], T], late: Callable[[T], None]
    ) -> "asyncio.Future[T]":
        """The same for whoever does not wait; look at the future in a callback."""
        call = _ThreadCall(work, late)
        self._of(gpu).add(call)
        return call.answer

    def launch(self, gpu: str, work: Callable[[], T]) -> "asyncio.Future[T]":
        """The same without a deadline, for work that must outlive whoever waits for it.

        Look at the future with asyncio.wait: to await it is to cancel it with oneself, while the
        thread goes on. Raises TimeoutError as `call` does at once.
        """
        call = _ThreadCall(work, timed=False)
        self._of(gpu).add(call)
        return call.answer

    async def empty(self) -> bool:
        """Wait until every call has left. False: one is inside although its time is up.

        Each has until its deadline, whether or not somebody waits for it. Nobody waits here for
        what hangs longer, however often this is asked.
        """
        loop = asyncio.get_running_loop()
        while ends := [end for one in self._threads.values() if (end := one.end) > loop.time()]:
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(max(ends)):
                    await self._moved.wait()
        return not any(thread.busy for thread in self._threads.values())

    def keep(self, gpus: Collection[str]) -> None:
        """The threads of all others go home, unless they are at work."""
        for name in self._threads.keys() - gpus:
            if not self._threads[name].busy:
                self._threads.pop(name).go_home()

    def close(self) -> None:
        """Send all threads home; one that hangs is left to the end of the process."""
        for thread in self._threads.values():
            thread.go_home()

    def _of(self, gpu: str) -> "_GpuThread":
        if gpu not in self._threads:
            self._threads[gpu] = _GpuThread(gpu, self._deadline, self._moved, self._back)
        return self._threads[gpu]


class _GpuThread:
    """One thread, and the calls that stand in line for it: the first one is on its way.

    `moved` is set when a call has left, or got stuck.
    """

    def __init__(
        self, gpu: str, deadline: float, moved: asyncio.Event, back: Callable[[str], None]
    ) -> None:
        self.stuck = False
        self._gpu = gpu
        self._deadline = deadline
        self._moved = moved
        self._back = back
        self._loop = asyncio.get_running_loop()
        self._line: collections.deque[_ThreadCall[Any]] = collections.deque()
        self._inbox: queue.SimpleQueue[_ThreadCall[Any] | None] = queue.SimpleQueue()
        self._is_alive = False
        self._end = 0.0

    @property
    def busy(self) -> bool:
        """True while a call is inside, or waits."""
        return bool(self._line)

    @property
    def end(self) -> float:
        """The loop's time at which the time of every call is up; 0 where there is none to await."""
        return self._end if self.busy and not self.stuck else 0.0

    def add(self, call: "_ThreadCall[T]") -> None:
        """Raises TimeoutError while a call is stuck, or where the machine gives no thread."""
        if self.stuck:
            raise self._not_back()
        if not self._is_alive:
            thread = threading.Thread(target=self._serve, name=f"nvml {self._gpu}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # a limit of the unit or of the machine
                raise TimeoutError(f"there is no thread for the call: {error}") from error
            self._is_alive = True
        self._line.append(call)
        if self._line[0] is call:
            self._inbox.put(call)
        self._limit(call)

    def leave(self, call: "_ThreadCall[T]") -> None:
        """Its caller has left: what has not begun is never made."""
        if call in self._line and call.made.cancel() and self._line[0] is not call:
            self._line.remove(call)
            call.rest()

    def go_home(self) -> None:
        """End the thread, once it has come back."""
        self._inbox.put(None)

    def _limit(self, call: "_ThreadCall[Any]") -> None:
        """Its time begins: once for the line, and once for the call itself."""
        self._end = self._loop.time() + self._deadline
        if call.timed:
            call.limit(self._loop.call_at(self._end, self._expire, call))

    def _expire(self, call: "_ThreadCall[Any]") -> None:
        if call.made.cancel():
            is_first = self._line[0] is call
            text = "" if is_first else f"earlier calls about {self._gpu} take too long"
            call.refuse(TimeoutError(text))
            if not is_first:
                self._line.remove(call)
        elif call.made.running():
            self.stuck = True
            call.refuse(TimeoutError())
            while len(self._line) > 1:
                self._line.pop().refuse(self._not_back())
            self._moved.set()

    def _landed(self) -> None:
        """The first call is back, or was never made."""
        was_stuck, self.stuck = self.stuck, False
        self._line.popleft().settle()
        if self._line:
            self._inbox.put(self._line[0])
            self._limit(self._line[0])
        self._moved.set()
        if was_stuck:
            self._back(self._gpu)

    def _not_back(self) -> TimeoutError:
        return TimeoutError(f"an earlier call about {self._gpu} has not come back")

    def _serve(self) -> None:
        """The thread's life: until it is sent home, or its loop is gone and needs no news."""
        with contextlib.suppress(RuntimeError):
            while (call := self._inbox.get()) is not None:
                call.make()
                self._loop.call_soon_threadsafe(self._landed)


class _ThreadCall(Generic[T]):
    """`made` orders the thread that makes it and the loop that may want it no longer.

    `answer` is for the caller, who may leave, or be refused, before it is made.
    """

    def __init__(
        self,
        work: Callable[[], T],
        late: Callable[[T], None] | None = None,
        *,
        timed: bool = True,
    ) -> None:
        self.made: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.timed = timed
        self._work = work
        self._late = late
        self._end: asyncio.TimerHandle | None = None

    def make(self) -> None:
        """On the thread: do it, unless nobody wants it any more."""
        if self.made.set_running_or_notify_cancel():
            try:
                self.made.set_result(self._work())
            except BaseException as error:  # noqa: BLE001 -- handed on to the caller, whatever it is
                self.made.set_exception(error)

    def limit(self, end: asyncio.TimerHandle) -> None:
        """Its time ends with this timer, and not with an earlier one."""
        self.rest()
        self._end = end

    def refuse(self, error: TimeoutError) -> None:
        """Whoever waits for it gets nothing."""
        self.rest()
        if not self.answer.done():
            self.answer.set_exception(error)

    def settle(self) -> None:
        """Give what was made to a caller who still waits."""
        self.rest()
        if self.made.cancelled():
            return
        error = self.made.exception()
        if not self.answer.done():
            if error is not None:
                self.answer.set_exception(error)
            else:
                self.answer.set_result(self.made.result())
        elif error is None and self._late is not None:
            self._late(self.made.result())

    def rest(self) -> None:
        """Its time ends no more."""
        if self._end is not None:
            self._end.cancel()
