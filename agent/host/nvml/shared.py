"""Threads that make blocking calls, as few as the calls allow."""

import asyncio
import collections
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from agent.kit.offload import show_thread_name

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
