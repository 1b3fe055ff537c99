"""Runs calls to the driver, which may never return, on daemon threads."""

import asyncio
import collections
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Collection
from typing import Any, Final, Generic, TypeVar

import msgspec

from agent.kit.tasks import show_thread_name
from agent.kit.timing import Lag

PATIENCE: Final = 0.02
"""Seconds that calls wait behind others on one thread. Then each gets a thread of its own."""

RETRY: Final = 0.25
"""Seconds until the next try to start a thread for calls that wait."""

T = TypeVar("T")


class GpuThreads:
    """Runs blocking calls, of each GPU one after the other. Call all methods on the loop.

    - At rest one thread makes all calls, and wakes the loop once after the last of them. A call
      that does not return in PATIENCE keeps its thread, and those behind it get others.
    - A call that exceeds its deadline is given up. Further calls about that GPU are refused until
      it returns; then `back` is called with the name of the GPU.
    - A GPU's name is its UUID, or its index while the UUID is unknown: a GPU that hangs then may
      hold a second thread. One more name is for the whole driver.
    """

    def __init__(self, deadline: float, back: Callable[[str], None] = lambda _: None) -> None:
        self._deadline = deadline
        self._back = back
        self._loop = asyncio.get_running_loop()
        self._lag = Lag()
        self._lines: dict[str, _GpuLine] = {}
        self._moved = asyncio.Event()
        """Set when a call has left or is stuck."""
        # The loop's own executor joins its threads at exit, and one that hangs would hold it.
        self._queue: queue.SimpleQueue[_GpuLine | None] = queue.SimpleQueue()
        """The lines whose first call is to be made; None ends one thread."""
        self._returned: collections.deque[_GpuLine] = collections.deque()
        self._threads = 0
        self._inside: set[_GpuLine] = set()
        """The lines whose first call is in the queue, on a thread, or not collected yet."""
        self._slow: set[_GpuLine] = set()
        """Those of them that hold a thread for longer than PATIENCE."""
        self._relief: asyncio.TimerHandle | None = None

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
        line, call = self._add(gpu, _ThreadCall(work, late))
        try:
            return await call.answer
        except asyncio.CancelledError:
            if call in line.calls and call.made.cancel() and line.calls[0] is not call:
                line.calls.remove(call)
                call.alarm.close()
            raise

    def launch(
        self,
        gpu: str,
        work: Callable[[], T],
        late: Callable[[T], None] | None = None,
        *,
        timed: bool = False,
    ) -> "asyncio.Future[T]":
        """Do the same without waiting, and unless `timed` without a deadline.

        Wait for the future with asyncio.wait, or read it in a callback: a cancelled await would
        cancel it while the thread goes on. Raises TimeoutError at once in the same cases as call().
        """
        return self._add(gpu, _ThreadCall(work, late, timed=timed))[1].answer

    async def empty(self) -> bool:
        """Wait until every call has left or exceeded its deadline. False: one is still inside."""
        while True:
            busy = [line for line in self._lines.values() if line.calls]
            ends = [line.end for line in busy if not line.stuck and line.end > self._loop.time()]
            if not ends:
                return not busy
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(max(ends)):
                    await self._moved.wait()

    def keep(self, gpus: Collection[str]) -> None:
        """Forget all other GPUs about which no call runs."""
        for name in self._lines.keys() - gpus:
            if not self._lines[name].calls:
                del self._lines[name]

    def close(self) -> None:
        """End all threads; one that hangs stays until the process ends."""
        if self._relief is not None:
            self._relief.cancel()
        for _ in range(self._threads):
            self._loop.call_soon(self._queue.put, None)
        self._threads = 0

    # The calls about one GPU.

    def _add(self, gpu: str, call: "_ThreadCall[T]") -> "tuple[_GpuLine, _ThreadCall[T]]":
        """Queue a call. Raises TimeoutError: a call is stuck, or no thread can be started."""
        line = self._lines.setdefault(gpu, _GpuLine(gpu))
        if line.stuck:
            raise _not_back(gpu)
        if not line.calls:
            try:
                self._make_first_of(line)
            except RuntimeError as error:  # a limit of the unit or of the machine
                raise TimeoutError(f"no thread can be started for the call: {error}") from error
        line.calls.append(call)
        self._limit(line, call)
        return line, call

    def _limit(self, line: "_GpuLine", call: "_ThreadCall[Any]") -> None:
        """Start the deadline of a call: once when it is queued, and once when it runs."""
        line.end = self._loop.time() + self._deadline
        if call.timed:
            call.alarm.close()
            ring = self._lag.alarm(self._deadline, lambda _: self._expire(line, call))
            call.alarm.enter_context(ring)

    def _expire(self, line: "_GpuLine", call: "_ThreadCall[Any]") -> None:
        if call.made.cancel():
            if line.calls[0] is call:
                call.refuse(TimeoutError())
            else:
                call.refuse(TimeoutError(f"earlier calls about {line.gpu} take too long"))
                line.calls.remove(call)
        elif call.made.running():
            line.stuck = True
            call.refuse(TimeoutError())
            while len(line.calls) > 1:
                line.calls.pop().refuse(_not_back(line.gpu))
            self._moved.set()

    def _landed(self, line: "_GpuLine") -> None:
        """Take the first call, which has returned or was cancelled, out of its line."""
        was_stuck, line.stuck = line.stuck, False
        call = line.calls.popleft()
        if line.calls:
            try:
                self._make_first_of(line)
            except RuntimeError as error:
                while line.calls:
                    line.calls.popleft().refuse(TimeoutError(f"no thread can be started: {error}"))
            else:
                self._limit(line, line.calls[0])
        self._moved.set()
        call.settle()
        if was_stuck:
            self._back(line.gpu)

    # The threads.

    def _make_first_of(self, line: "_GpuLine") -> None:
        """Make the line's first call. Raises RuntimeError: no thread is left, and none starts."""
        if len(self._slow) >= self._threads:
            self._start_thread()
        self._inside.add(line)
        # Not before this turn of the loop has ended: beside a running loop, the thread would wait
        # for the interpreter at each call.
        self._loop.call_soon(self._queue.put, line)
        if self._relief is None:
            self._relief = self._loop.call_later(PATIENCE, self._relieve)

    def _start_thread(self) -> None:
        """Start a thread. Raises RuntimeError: a limit of the unit or of the machine."""
        threading.Thread(target=self._serve, name="nvml calls", daemon=True).start()
        self._threads += 1

    def _relieve(self) -> None:
        """Start a thread for each call that waits behind a slow one."""
        self._relief = None
        self._slow = set(self._inside)  # from now on each thread tells at once
        self._collect()
        try:
            while self._threads < len(self._slow):
                self._start_thread()
        except RuntimeError:
            self._relief = self._loop.call_later(RETRY, self._relieve)

    def _collect(self) -> None:
        """Tell what the threads have done. End those that are idle beside another idle one."""
        lines = [self._returned.popleft() for _ in range(len(self._returned))]
        self._inside.difference_update(lines)
        self._slow.difference_update(lines)
        for line in lines:
            self._loop.call_soon(self._landed, line)  # an error of one is not the others'
        while self._threads > len(self._slow) + 1:
            self._threads -= 1
            self._queue.put(None)
        if not self._inside and self._relief is not None:
            self._relief.cancel()
            self._relief = None

    def _serve(self) -> None:
        """Make calls until the thread is ended or its loop is closed. Runs on the thread."""
        show_thread_name(threading.current_thread().name)
        with contextlib.suppress(RuntimeError):
            while (line := self._queue.get()) is not None:
                line.calls[0].make()
                self._returned.append(line)
                if self._slow or self._queue.empty():
                    self._loop.call_soon_threadsafe(self._collect)
            if self._returned:  # another thread may have seen the None in the queue, and waited
                self._loop.call_soon_threadsafe(self._collect)


def _not_back(gpu: str) -> TimeoutError:
    return TimeoutError(f"an earlier call about {gpu} has not returned")


class _ThreadCall(Generic[T]):
    """One call. The thread and the loop agree by `made` whether the call begins.

    `answer` is the caller's, who may be cancelled or refused before the call begins. `alarm` holds
    the alarm of the deadline.
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
        self.alarm = contextlib.ExitStack()
        self.timed = timed
        self._work = work
        self._late = late

    def make(self) -> None:
        """Make the call unless it was cancelled. Runs on the thread."""
        if self.made.set_running_or_notify_cancel():
            try:
                self.made.set_result(self._work())
            except BaseException as error:  # noqa: BLE001 -- raised in the caller
                self.made.set_exception(error)

    def refuse(self, error: TimeoutError) -> None:
        """Raise `error` in the caller."""
        self.alarm.close()
        if not self.answer.done():
            self.answer.set_exception(error)

    def settle(self) -> None:
        """Give the result to a caller that still waits, or to `late`."""
        self.alarm.close()
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


class _GpuLine(msgspec.Struct, eq=False):
    """The calls about one GPU in a line; the first one is running. `end`: of the last deadline."""

    gpu: str
    calls: collections.deque[_ThreadCall[Any]] = msgspec.field(default_factory=collections.deque)
    stuck: bool = False
    end: float = 0.0
