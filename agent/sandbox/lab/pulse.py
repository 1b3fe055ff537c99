"""Waits for a condition in the sandbox without polling."""

import asyncio
from collections.abc import Callable


class Pulse:
    """Wakes all waiters after every change."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def beat(self) -> None:
        """Note a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()`. The caller sets the deadline."""
        while not holds():
            await self._changed.wait()
