"""An event loop without sockets, pipes or waits: when nothing is ready, its clock jumps."""

import asyncio
import contextlib
import datetime as dt
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from tests.builders import NOON

_TURN = 1e-6
"""Seconds for one turn of the loop: a wait for less than a clock can show would have no end."""


class StandstillError(Exception):
    """Everybody waits, and nothing will ever happen again."""


class _Skip:
    """In the place of a selector: a wait is a jump of the clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None) -> Sequence[object]:
        """No file is ever ready."""
        if timeout is None:
            raise StandstillError
        self.now += max(timeout, _TURN)
        return ()


class VirtualLoop(asyncio.BaseEventLoop):
    """Seconds cost nothing here, and the same program takes the same steps every time."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Skip()

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._selector.now

    def stall(self, seconds: float) -> None:
        """The process gets no processor for so long: nothing runs, and the clock goes on."""
        self._selector.now += seconds

    def _process_events(self, events: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """No other thread has to wake it."""


def stall(seconds: float) -> None:
    """Let the running loop, a VirtualLoop, get no processor for so long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.stall(seconds)


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test, on a loop whose clock it can stall."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(**given))

    return run


@contextlib.asynccontextmanager
async def starved(share: float, period: float = 0.1) -> AsyncIterator[None]:
    """During the block the loop runs for that share of each period only, as under a CPU quota."""

    async def starve() -> None:
        while True:
            await asyncio.sleep(share * period)
            stall((1 - share) * period)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(starve())
        try:
            yield
        finally:
            task.cancel()


class VirtualClock:
    """Wall time that passes as a loop's clock does; it can be looked at from outside."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> dt.datetime:
        """Noon, and the loop's seconds since."""
        return NOON + dt.timedelta(seconds=self._loop.time())
