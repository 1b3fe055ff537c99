"""Whether something is going on, and since when nothing is: for work that keeps out of the way."""

import asyncio
import contextlib
import math
from collections.abc import Iterator


class Lull:
    """Counts what is under way. Whoever wants quiet waits for it, and holds nobody up."""

    def __init__(self) -> None:
        self._active = 0
        self._ended = -math.inf
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Something is going on while the block runs."""
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
        """Return once nothing has been going on for `seconds`, at once if so before."""
        loop = asyncio.get_running_loop()
        while self._active or (left := self._ended + seconds - loop.time()) > 0:
            if self._active:
                await self._idle.wait()
            else:
                await asyncio.sleep(left)
