"""Keeps the driver's stream of events open, and knows whether the agent receives events."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import structlog

from agent.core.errors import DriverError
from agent.core.health.reports import DriverEvent
from agent.core.ports import Driver

SETTLED: Final = 5.0
"""Seconds that a stream must be open without an error before the agent relies on it."""

OPENING: Final = 15.0
"""Seconds for the first stream to open, before GPUs count as unmonitored."""

FIRST_RETRY: Final = 0.5
LAST_RETRY: Final = 30.0

log = structlog.get_logger(__name__)


class Hearing:
    """Passes events to `take`. Calls `lost` whenever a stream has ended."""

    def __init__(
        self, driver: Driver, take: Callable[[DriverEvent], None], lost: Callable[[], None]
    ) -> None:
        self._driver = driver
        self._take = take
        self._lost = lost
        self._begun_at = _loop_time()
        self._opened_at: float | None = None
        self._deaf = ""
        self._wanted = asyncio.Event()
        self._opened = asyncio.Event()

    async def run(self) -> None:
        """Receive events for ever, and open the stream again when it ends."""
        self._begun_at, self._opened_at = _loop_time(), None
        delay = FIRST_RETRY
        while True:
            reason = "the stream of events ended"
            try:
                async for event in self._driver.events(self._note_open):
                    self._take(event)
                    delay = FIRST_RETRY
            except DriverError as error:
                reason = str(error)
            if self._has_settled():
                delay = FIRST_RETRY
            self._opened_at = None
            self._opened.clear()
            self._wanted.clear()
            self._note_deaf(reason or "no reason given")
            self._lost()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._wanted.wait()
            delay = FIRST_RETRY if self._wanted.is_set() else min(2 * delay, LAST_RETRY)

    def reopen(self) -> None:
        """Open the stream at once: what had ended it may be over."""
        self._wanted.set()

    async def heard(self, within: float) -> bool:
        """Reopen the stream if it has ended, and wait for it. Returns whether it had."""
        if self._opened.is_set():
            return False
        self.reopen()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._opened.wait()
                self._note_heard()
        return True

    def obstacle(self) -> str:
        """Why the agent does not receive events; empty if it does.

        During the first OPENING seconds a stream that is not open yet is no obstacle.
        """
        if self._has_settled():
            self._note_heard()
        began = _loop_time() - self._begun_at
        if not self._deaf and self._opened_at is None and began >= OPENING:
            self._note_deaf("the stream of events does not open")
        return self._deaf

    def _has_settled(self) -> bool:
        return self._opened_at is not None and _loop_time() - self._opened_at >= SETTLED

    def _note_open(self) -> None:
        self._opened_at = _loop_time()
        self._opened.set()

    def _note_heard(self) -> None:
        if self._deaf:
            self._deaf = ""
            log.info("driver.events_back")

    def _note_deaf(self, reason: str) -> None:
        if not self._deaf:
            log.warning("driver.events_lost", err=reason)
        self._deaf = reason


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
