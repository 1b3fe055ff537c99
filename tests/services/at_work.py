"""Services at work for as long as a test looks at them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path


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


def scenarios(name: str) -> dict[str, str]:
    """Of that file, what happens in each scenario, and what is told after it."""
    lines = Path(__file__).with_name(name).read_text().splitlines()
    return dict(line.split(" => ") for line in lines if " => " in line and line[0] != "#")
