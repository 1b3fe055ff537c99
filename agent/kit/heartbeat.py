"""Measures for how long the event loop has been blocked."""

import asyncio
from typing import NoReturn

from agent.kit.ticks import until_tick


class Heartbeat:
    """Notes the time at each tick of `interval` seconds while the loop is not blocked."""

    def __init__(self, interval: float = 5.0) -> None:
        self._interval = interval
        self._last: float | None = None

    async def run(self) -> NoReturn:
        """Beat until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._last = loop.time()
            await asyncio.sleep(until_tick(self._interval))

    def age(self) -> float:
        """Seconds since the last beat; infinite before the first one."""
        if self._last is None:
            return float("inf")
        return asyncio.get_running_loop().time() - self._last
