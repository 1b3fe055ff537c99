"""An observable value. Each follower sees the newest one at its own pace.

A cell has one writer by convention, and no lock: everything runs on one loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Cell(Generic[T]):
    """A value that can be followed. Values are immutable and comparable."""

    def __init__(self, value: T) -> None:
        self._value = value
        self.version = 0
        """How often the value has changed."""
        self.waiting: dict[asyncio.Event, None] = {}
        """The events of those who wait for a change, in their order: for News alone."""

    @property
    def value(self) -> T:
        """The newest value."""
        return self._value

    def set(self, value: T) -> bool:
        """Publish `value` if it differs from the present one; return whether it did."""
        if value == self._value:
            return False
        self._value = value
        self.version += 1
        for event in self.waiting:
            event.set()
        return True

    async def follow(self) -> AsyncIterator[T]:
        """Yield the present value, then the newest one after each change, for ever."""
        news = News(self)
        while True:
            yield self._value
            await news.wait()

    async def until(self, predicate: Callable[[T], bool]) -> T:
        """Wait for the first value for which `predicate` holds; the present one counts."""
        news = News(self)
        while not predicate(value := self._value):
            await news.wait()
        return value


class News:
    """A cursor over several cells. It misses no change between two waits."""

    def __init__(self, *cells: Cell[Any]) -> None:
        self._cells = cells
        self._seen = [cell.version for cell in cells]

    async def wait(self, within: float | None = None) -> bool:
        """Wait until a cell has changed since the end of the last wait, or since the start.

        False: none did within `within` seconds.
        """
        # No task waits for each cell: its turns of the loop would let everybody else run first, and
        # the kubelet must hear of a lost GPU before the report and the Events are made.
        event = asyncio.Event()
        for cell in self._cells:
            cell.waiting[event] = None
        try:
            if self._seen == [cell.version for cell in self._cells]:
                async with asyncio.timeout(within):
                    await event.wait()
        except TimeoutError:
            return False
        finally:
            for cell in self._cells:
                del cell.waiting[event]
        self._seen = [cell.version for cell in self._cells]
        return True
