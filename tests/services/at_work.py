"""Services at work for as long as a test looks at them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine


@contextlib.asynccontextmanager
async def at_work(*runs: Callable[[], Coroutine[object, object, None]]) -> AsyncIterator[None]:
    """Each of them runs, and is cancelled at the end; what one raises is raised here."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run()) for run in runs]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
