"""Waiting for whichever of several cells changes first."""

import asyncio
from typing import Any

from agent.kit.cell import Cell


async def news(*cells: Cell[Any], within: float | None = None) -> bool:
    """Wait until one of `cells` gets another value than it has now; True when one did.

    False: `within` seconds passed. A cell that closes counts as no news from it.
    """

    async def changed(cell: Cell[Any]) -> None:
        before = cell.value
        await cell.until(lambda value: value is not before)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(changed(cell)) for cell in cells]
        done, pending = await asyncio.wait(
            tasks, timeout=within, return_when=asyncio.FIRST_COMPLETED
        )
        for task in pending:
            task.cancel()
    return bool(done)
