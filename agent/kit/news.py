"""Waits until any of several cells changes."""

import asyncio
from typing import Any

from agent.kit.cell import Cell, CellClosed


class News:
    """A cursor over several cells. It misses no change between two waits."""

    def __init__(self, *cells: Cell[Any]) -> None:
        self._cells = cells
        self._seen = [cell.value for cell in cells]

    async def wait(self, within: float | None = None) -> bool:
        """Wait until a cell differs from its value at the end of the last wait, or at the start.

        False: none did within `within` seconds. A closed cell never ends the wait.
        """
        try:
            async with asyncio.timeout(within):
                await self._changed()
        except TimeoutError:
            return False
        self._seen = [cell.value for cell in self._cells]
        return True

    async def _changed(self) -> None:
        pairs = list(zip(self._cells, self._seen, strict=True))
        if any(cell.value is not seen for cell, seen in pairs):
            return
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_newer(cell, seen)) for cell, seen in pairs]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()


async def news(*cells: Cell[Any], within: float | None = None) -> bool:
    """Wait until one of `cells` differs from its value now; False: none did in `within` seconds.

    A caller that works between two waits needs News.
    """
    return await News(*cells).wait(within)


async def _newer(cell: Cell[Any], seen: object) -> None:
    try:
        await cell.until(lambda value: value is not seen)
    except CellClosed:
        await asyncio.Event().wait()
