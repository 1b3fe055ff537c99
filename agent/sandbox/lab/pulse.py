"""Waiting for anything in the sandbox to become true, without asking in intervals."""

import asyncio
from collections.abc import Callable


class Pulse:
    """Beats after every change anywhere; whoever waits looks again then."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def beat(self) -> None:
        """Something has changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return as soon as `holds()`. The deadline is the caller's."""
        while not holds():
            await self._changed.wait()
