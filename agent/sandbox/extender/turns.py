"""Only one at a time may do something about the same pod."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator


class Turns:
    """One lock for each key, for as long as somebody holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._locks)

    @contextlib.asynccontextmanager
    async def of(self, key: str) -> AsyncIterator[None]:
        """Wait for those who came before for the same key; the block is this one's turn."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            yield
