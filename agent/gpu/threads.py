"""Runs calls to the driver, which may never return, on daemon threads."""

import asyncio
import collections
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from agent.kit.tasks import show_thread_name
from agent.kit.timing import Lag

# Threads that make blocking calls, as few as the calls allow.

PATIENCE: Final = 0.02
"""Seconds that calls wait behind others on one thread. Then each gets a thread of its own."""

RETRY: Final = 0.25
"""Seconds until calls that got no thread try again."""


class Blocking(Protocol):
    """Something that blocks."""

    def make(self) -> None:
        """Do it. Runs on the thread."""
        ...

    def landed(self) -> None:
        """Take note that it is done. Runs on the loop."""
        ...


class SharedThreads:
    """Makes calls on one daemon thread, which wakes the loop once after the last of them.

    - A call that does not return in PATIENCE keeps its thread. Those behind it get others, and
      each is told at once when it is done.
    - A thread ends when it is idle and another one is, too.

    Call all methods on the loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads: set[_SharedThread] = set()
        self._idle: _SharedThread | None = None
        """The thread for the next call: it is idle, or has been busy for less than PATIENCE."""
        self._calls: list[Blocking] = []
        """To be handed over together: beside a running loop the thread would wait at each call."""
        self._relief: asyncio.TimerHandle | None = None

    def make(self, call: Blocking) -> None:
        """Make a call. Raises RuntimeError: there is no thread, and none can be started."""
        self._next()
        if not self._calls:
            self._loop.call_soon(self._hand_over)
        self._calls.append(call)

    def close(self) -> None:
        """End all threads; one that hangs stays until the process ends."""
        if self._calls:
            self._hand_over()
        if self._relief is not None:
            self._relief.cancel()
        for thread in self._threads:
            thread.go_home()

    def _next(self) -> "_SharedThread":
        """The thread for the next call. Raises RuntimeError."""
        if self._idle is None:
            self._idle = self._another()
        return self._idle

    def _hand_over(self) -> None:
        """Hand over the calls of this turn of the loop, which now has nothing more to do."""
        try:
            thread = self._next()
        except RuntimeError:  # it was there when the first call came, and has been kept since
            self._loop.call_later(RETRY, self._hand_over)
            return
        calls, self._calls = self._calls, []
        for call in calls:
            thread.put(call)
        if self._relief is None:
            self._relief = self._loop.call_later(PATIENCE, self._relieve)

    def _another(self) -> "_SharedThread":
        """A new thread. Raises RuntimeError: a limit of the unit or of the machine."""
        thread = _SharedThread(self._loop, self._collect)
        thread.start()
        self._threads.add(thread)
        return thread

    def _relieve(self) -> None:
        """Spread the calls that wait behind a slow one."""
        thread, self._relief = self._idle, None
        if thread is None:
            return
        self._idle, thread.tells = None, True
        waiting = thread.drained()
        self._collect(thread)
        for number, call in enumerate(waiting):
            try:
                thread = self._another()
            except RuntimeError:  # those on the kept thread would wait for what may never return
                if not self._calls:
                    self._loop.call_later(RETRY, self._hand_over)
                self._calls = [*waiting[number:], *self._calls]
                return
            thread.tells = True
            thread.put(call)

    def _collect(self, thread: "_SharedThread") -> None:
        """Tell what a thread has done; use it again or end it if it is idle."""
        if thread not in self._threads:
            return
        done = thread.collected()
        if not thread.left and self._idle is None:
            self._idle, thread.tells = thread, False
        for call in done:
            self._loop.call_soon(call.landed)  # an error of one is not the others'
        if thread.left:
            return
        if thread is not self._idle:
            self._threads.discard(thread)
            thread.go_home()
        elif self._relief is not None:
            self._relief.cancel()
            self._relief = None


class _SharedThread:
    """One thread, and the calls that it makes in order.

    `left`: how many were not collected yet. `tells`: have each collected at once, and otherwise
    all together after the last one.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, collect: "Callable[[_SharedThread], None]"
    ) -> None:
        self.left = 0
        self.tells = False
        self._loop = loop
        self._collect = collect
        self._inbox: queue.SimpleQueue[Blocking | None] = queue.SimpleQueue()
        self._done: collections.deque[Blocking] = collections.deque()

    def start(self) -> None:
        """Start the thread. Raises RuntimeError: a limit of the unit or of the machine."""
        threading.Thread(target=self._serve, name="nvml calls", daemon=True).start()

    def put(self, call: Blocking) -> None:
        """Make a call after the earlier ones."""
        self.left += 1
        self._inbox.put(call)

    def drained(self) -> Sequence[Blocking]:
        """Take back the calls that were not begun."""
        calls: list[Blocking] = []
        with contextlib.suppress(queue.Empty):
            while (call := self._inbox.get_nowait()) is not None:
                calls.append(call)
        self.left -= len(calls)
        return calls

    def collected(self) -> Sequence[Blocking]:
        """Take the calls that are done."""
        calls = [self._done.popleft() for _ in range(len(self._done))]
        self.left -= len(calls)
        return calls

    def go_home(self) -> None:
        """End the thread once its calls have returned."""
        self._inbox.put(None)

    def _serve(self) -> None:
        """Make calls until the thread is ended or its loop is closed. Runs on the thread."""
        show_thread_name(threading.current_thread().name)
        with contextlib.suppress(RuntimeError):
            while (call := self._inbox.get()) is not None:
                call.make()
                self._done.append(call)
                if self.tells or self._inbox.empty():
                    self._loop.call_soon_threadsafe(self._collect, self)
            if self._done:
                self._loop.call_soon_threadsafe(self._collect, self)


# Runs calls to the driver, which may never return, on daemon threads, for each GPU in a line.
#
# One more line is for the whole driver. (The loop's own executor joins its threads at exit.) A call
# that exceeds its deadline is given up. Further calls about that GPU are refused until it returns.
# A line's name is the GPU's UUID, or its index while the UUID is unknown: a GPU that hangs then may
# hold a second thread.

T = TypeVar("T")


class GpuThreads:
    """Runs blocking calls, of each GPU one after the other. Call all methods on the loop.

    `back` is called with the name of a GPU whose stuck call returned.
    """

    def __init__(self, deadline: float, back: Callable[[str], None] = lambda _: None) -> None:
        self._deadline = deadline
        self._back = back
        self._lines: dict[str, _GpuLine] = {}
        self._shared, self._lag = SharedThreads(), Lag()
        self._moved = asyncio.Event()

    @property
    def stuck(self) -> frozenset[str]:
        """The GPUs whose last call exceeded its deadline and has not returned."""
        return frozenset(name for name, line in self._lines.items() if line.stuck)

    async def call(
        self, gpu: str, work: Callable[[], T], late: Callable[[T], None] | None = None
    ) -> T:
        """Run `work` on a thread after earlier calls about that GPU; return or raise its result.

        Raises TimeoutError after the deadline, which starts again once the earlier calls have
        returned; and at once while one of them is stuck or no thread can be started. Cancelling the
        caller does not stop a begun call. `late` gets the result if the caller waits no longer.
        """
        line, call = self._of(gpu), _ThreadCall(work, late)
        line.add(call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            line.leave(call)
            raise

    def post(
        self, gpu: str, work: Callable[[], T], late: Callable[[T], None]
    ) -> "asyncio.Future[T]":
        """Do the same without waiting; read the future in a callback."""
        call = _ThreadCall(work, late)
        self._of(gpu).add(call)
        return call.answer

    def launch(self, gpu: str, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Do the same without a deadline, for work that must outlive its caller.

        Wait for the future with asyncio.wait: a cancelled await would cancel it while the thread
        goes on. Raises TimeoutError at once in the same cases as call().
        """
        call = _ThreadCall(work, timed=False)
        self._of(gpu).add(call)
        return call.answer

    async def empty(self) -> bool:
        """Wait until every call has left or exceeded its deadline. False: one is still inside."""
        loop = asyncio.get_running_loop()
        while ends := [end for each in self._lines.values() if (end := each.end) > loop.time()]:
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(max(ends)):
                    await self._moved.wait()
        return not any(line.busy for line in self._lines.values())

    def keep(self, gpus: Collection[str]) -> None:
        """Forget all other GPUs about which no call runs."""
        for name in self._lines.keys() - gpus:
            if not self._lines[name].busy:
                del self._lines[name]

    def close(self) -> None:
        """End all threads; one that hangs stays until the process ends."""
        self._shared.close()

    def _of(self, gpu: str) -> "_GpuLine":
        if gpu not in self._lines:
            self._lines[gpu] = _GpuLine(
                gpu, self._deadline, self._shared, self._lag, self._moved, self._back
            )
        return self._lines[gpu]


class _GpuLine:
    """The calls about one GPU in a line; the first one is running.

    `moved` is set when a call has left or is stuck.
    """

    def __init__(
        self,
        gpu: str,
        deadline: float,
        threads: SharedThreads,
        lag: Lag,
        moved: asyncio.Event,
        back: Callable[[str], None],
    ) -> None:
        self.stuck = False
        self._gpu = gpu
        self._deadline = deadline
        self._threads = threads
        self._lag = lag
        self._moved = moved
        self._back = back
        self._loop = asyncio.get_running_loop()
        self._line: collections.deque[_ThreadCall[Any]] = collections.deque()
        self._end = 0.0

    @property
    def busy(self) -> bool:
        """True while a call runs or waits."""
        return bool(self._line)

    @property
    def end(self) -> float:
        """The loop time at which the last deadline ends; 0 when there is none to wait for."""
        return self._end if self.busy and not self.stuck else 0.0

    def add(self, call: "_ThreadCall[T]") -> None:
        """Queue a call. Raises TimeoutError: a call is stuck, or no thread can be started."""
        if self.stuck:
            raise self._not_back()
        self._line.append(call)
        if self._line[0] is call:
            try:
                self._threads.make(self)
            except RuntimeError as error:  # a limit of the unit or of the machine
                self._line.popleft()
                raise TimeoutError(f"no thread can be started for the call: {error}") from error
        self._limit(call)

    def leave(self, call: "_ThreadCall[T]") -> None:
        """Drop a call whose caller was cancelled, unless it has begun."""
        if call in self._line and call.made.cancel() and self._line[0] is not call:
            self._line.remove(call)
            call.rest()

    def make(self) -> None:
        """Make the first call. Runs on the thread."""
        self._line[0].make()

    def landed(self) -> None:
        """Take the first call, which has returned or was cancelled, out of the line."""
        was_stuck, self.stuck = self.stuck, False
        call = self._line.popleft()
        if self._line:
            self._next()
        self._moved.set()
        call.settle()
        if was_stuck:
            self._back(self._gpu)

    def _next(self) -> None:
        """Make the next call, or refuse all that wait for want of a thread."""
        try:
            self._threads.make(self)
        except RuntimeError as error:
            while self._line:
                self._line.popleft().refuse(TimeoutError(f"no thread can be started: {error}"))
        else:
            self._limit(self._line[0])

    def _limit(self, call: "_ThreadCall[Any]") -> None:
        """Start the deadline of a call: once when it is queued, and once when it runs."""
        self._end = self._loop.time() + self._deadline
        if call.timed:
            call.limit(self._lag.alarm(self._deadline, lambda _: self._expire(call)))

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

    def _not_back(self) -> TimeoutError:
        return TimeoutError(f"an earlier call about {self._gpu} has not returned")


class _ThreadCall(Generic[T]):
    """One call. The thread and the loop agree by `made` whether the call begins.

    `answer` is the caller's, who may be cancelled or refused before the call begins.
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
        self._end = contextlib.ExitStack()

    def make(self) -> None:
        """Make the call unless it was cancelled. Runs on the thread."""
        if self.made.set_running_or_notify_cancel():
            try:
                self.made.set_result(self._work())
            except BaseException as error:  # noqa: BLE001 -- raised in the caller
                self.made.set_exception(error)

    def limit(self, alarm: contextlib.AbstractContextManager[None]) -> None:
        """Replace the alarm of the deadline."""
        self.rest()
        self._end.enter_context(alarm)

    def refuse(self, error: TimeoutError) -> None:
        """Raise `error` in the caller."""
        self.rest()
        if not self.answer.done():
            self.answer.set_exception(error)

    def settle(self) -> None:
        """Give the result to a caller that still waits, or to `late`."""
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
        """Stop the alarm of the deadline."""
        self._end.close()
