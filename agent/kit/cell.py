"""An observable value: it publishes its state, not events.

Each follower sees the newest value at its own pace. A busy follower sees two changes as one. A cell
has one writer by convention, any number of readers and no lock: everything runs on one loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Cell(Generic[T]):
    """A value that can be followed. Values are immutable and comparable."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._version = 0
        self._news = asyncio.Event()

    @property
    def value(self) -> T:
        """The newest value."""
        return self._value

    def set(self, value: T) -> bool:
        """Publish `value` if it differs from the present one; return whether it did."""
        if value == self._value:
            return False
        self._value = value
        self._version += 1
        news, self._news = self._news, asyncio.Event()
        news.set()
        return True

    def follow(self) -> AsyncIterator[T]:
        """Yield the present value, then the newest one after each change, for ever."""
        return _Follower(self)

    async def until(self, predicate: Callable[[T], bool]) -> T:
        """Wait for the first value for which `predicate` holds; the present one counts."""
        while not predicate(value := self._value):
            await self._news.wait()
        return value

    async def _newer(self, seen: int) -> int:
        """The version after `seen`, as soon as there is one."""
        while self._version == seen:
            await self._news.wait()
        return self._version


class _Follower(Generic[T]):
    """One reader's cursor. It is no generator, so a reader need not close it."""

    def __init__(self, cell: Cell[T]) -> None:
        self._cell = cell
        self._seen = -1

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        self._seen = await self._cell._newer(self._seen)  # noqa: SLF001 -- two halves of one thing
        return self._cell.value


class News:
    """A cursor over several cells. It misses no change between two waits."""

    def __init__(self, *cells: Cell[Any]) -> None:
        self._cells = cells
        self._seen = [cell.value for cell in cells]

    async def wait(self, within: float | None = None) -> bool:
        """Wait until a cell differs from its value at the end of the last wait, or at the start.

        False: none did within `within` seconds.
        """
        pairs = list(zip(self._cells, self._seen, strict=True))
        try:
            async with asyncio.timeout(within), asyncio.TaskGroup() as group:
                if not any(cell.value is not seen for cell, seen in pairs):
                    tasks = [group.create_task(_changed(cell, seen)) for cell, seen in pairs]
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in tasks:
                        task.cancel()
        except TimeoutError:
            return False
        self._seen = [cell.value for cell in self._cells]
        return True


async def _changed(cell: Cell[Any], seen: object) -> None:
    await cell.until(lambda value: value is not seen)
