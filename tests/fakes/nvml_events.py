"""Whoever listens to the events of a driver."""

import asyncio
from contextlib import asynccontextmanager

from agent.errors import DriverError
from agent.model import DriverEvent
from agent.ports import Driver


@asynccontextmanager
async def listening(driver: Driver):
    """A queue of what the driver reports; an error ends it, but a set that failed is made anew."""
    heard: asyncio.Queue[DriverEvent | DriverError] = asyncio.Queue()

    async def listen() -> None:
        is_over = False
        while not is_over:
            try:
                async for event in driver.events():
                    heard.put_nowait(event)
            except DriverError as error:
                heard.put_nowait(error)
                is_over = "waiting for events failed" not in str(error)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(listen())
        yield heard
        task.cancel()


async def hear(heard, count: int) -> list:
    async with asyncio.timeout(30):
        return [await heard.get() for _ in range(count)]
