"""Runs blocking work in order on one daemon thread, with a bounded queue.

The loop's own executor joins its threads at exit: one disk that does not answer would keep the
process from ever ending.
"""

import asyncio
import functools
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar, TypeVarTuple

import structlog

from agent.core.errors import StateError
from agent.kit.offload import show_thread_name

log = structlog.get_logger(__name__)

Step = Callable[[], Callable[[], None]]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Worker:
    """An Offload (agent.kit.offload) with a queue of at most `limit`; further callers wait.

    Use it as an async context manager. Leaving it finishes the queued work, for at most `patience`
    seconds. Then the thread is abandoned, which does not keep the process from ending.
    """

    def __init__(self, name: str, limit: int, patience: float = 2.0) -> None:
        self._name = name
        self._patience = patience
        self._slots = asyncio.Semaphore(limit)
        self._queue: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._closed = True

    async def __aenter__(self) -> Self:
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        self._queue.put(None)
        try:
            async with asyncio.timeout(self._patience):
                await self._ended.wait()
        except TimeoutError:
            log.warning("worker.abandoned", worker=self._name, after=self._patience)
        finally:
            self._abandoned.set()

    async def call(self, work: Callable[[*Ts], R], *args: *Ts) -> R:
        """Run `work(*args)` on the thread and return its result, or raise its error.

        If the caller is cancelled, queued work is dropped and begun work goes on. Both keep their
        place in the queue until the thread has passed them.

        Raises:
            StateError: the worker is not running.
        """
        await self._slots.acquire()
        if self._closed:
            self._slots.release()
            raise StateError(f"Thread {self._name} is not running: the agent is about to end.")
        future: asyncio.Future[R] = self._loop.create_future()

        def step() -> Callable[[], None]:
            """Do the work, on the thread; return what tells the caller, on the loop."""
            if future.cancelled():
                return lambda: None
            tell: Callable[[], None]
            try:
                if self._abandoned.is_set():
                    raise StateError("The agent ended before this was begun.")  # noqa: TRY301 -- as the work's
                result = work(*args)
            except BaseException as error:  # noqa: BLE001 -- raised in the caller
                tell = functools.partial(future.set_exception, error)
            else:
                tell = functools.partial(future.set_result, result)
            return lambda: None if future.done() else tell()

        self._queue.put(step)
        return await future

    def _work(self) -> None:
        show_thread_name(self._name)
        while (step := self._queue.get()) is not None:
            self._tell(functools.partial(self._finish, step()))
        self._tell(self._ended.set)

    def _finish(self, tell: Callable[[], None]) -> None:
        # One call on the loop: each wake-up costs more than a small piece of work.
        self._slots.release()
        tell()

    def _tell(self, callback: Callable[[], object]) -> None:
        """Call back on the loop; a closed loop is ignored."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            log.debug("worker.loop_gone", worker=self._name)
