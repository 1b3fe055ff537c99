"""Lets background work wait until no other work has run for a while."""

import asyncio
import contextlib
import math
from collections.abc import Iterator


class Lull:
    """Counts the work in progress. A waiter delays no work."""

    def __init__(self) -> None:
        self._active = 0
        self._ended = -math.inf
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count as work in progress while the block runs."""
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            self._ended = asyncio.get_running_loop().time()
            if not self._active:
                self._idle.set()

    async def come(self, seconds: float) -> None:
        """Return once no work has been in progress for `seconds`."""
        loop = asyncio.get_running_loop()
        while self._active or (left := self._ended + seconds - loop.time()) > 0:
            if self._active:
                await self._idle.wait()
            else:
                await asyncio.sleep(left)
