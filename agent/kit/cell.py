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
        self.changed = asyncio.Event()
        """Set by the next change, which puts another event in its place."""

    @property
    def value(self) -> T:
        """The newest value."""
        return self._value

    def set(self, value: T) -> bool:
        """Publish `value` if it differs from the present one; return whether it did."""
        if value == self._value:
            return False
        self._value = value
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
        return True

    def follow(self) -> AsyncIterator[T]:
        """Yield the present value, then the newest one after each change, for ever."""
        return _Follower(self)

    async def until(self, predicate: Callable[[T], bool]) -> T:
        """Wait for the first value for which `predicate` holds; the present one counts."""
        while not predicate(value := self._value):
            await self.changed.wait()
        return value


class _Follower(Generic[T]):
    """One reader's cursor. It is no generator, so a reader need not close it."""

    def __init__(self, cell: Cell[T]) -> None:
        self._cell = cell
        self._changed: asyncio.Event | None = None

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        if self._changed is not None:
            await self._changed.wait()
        self._changed = self._cell.changed
        return self._cell.value


class News:
    """A cursor over several cells. It misses no change between two waits."""

    def __init__(self, *cells: Cell[Any]) -> None:
        self._cells = cells
        self._changed = [cell.changed for cell in cells]

    async def wait(self, within: float | None = None) -> bool:
        """Wait until a cell has changed since the end of the last wait, or since the start.

        False: none did within `within` seconds.
        """
        try:
            async with asyncio.timeout(within), asyncio.TaskGroup() as group:
                if not any(changed.is_set() for changed in self._changed):
                    tasks = [group.create_task(changed.wait()) for changed in self._changed]
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in tasks:
                        task.cancel()
        except TimeoutError:
            return False
        self._changed = [cell.changed for cell in self._cells]
        return True
