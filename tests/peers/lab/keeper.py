"""Something that is open while tests of one module or session run, whichever task they are in."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

T = TypeVar("T")


class Keeper(Generic[T]):
    """Opens a context and closes it in one and the same task.

    A test framework runs a fixture's beginning and end in two tasks, and a TaskGroup must end in
    the one where it began.
    """

    def __init__(self, context: AbstractAsyncContextManager[T]) -> None:
        self._context = context
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> T:
        """Open it. Raises what it raises."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[T] = loop.create_future()
        self._task = loop.create_task(self._keep(opened))
        await asyncio.wait((self._task, opened), return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        return opened.result()

    async def close(self) -> None:
        """Close it. Raises what that raises, or what broke it meanwhile."""
        self._over.set()
        if self._task is not None:
            await self._task

    async def _keep(self, opened: asyncio.Future[T]) -> None:
        async with self._context as value:
            opened.set_result(value)
            await self._over.wait()


@contextlib.asynccontextmanager
async def kept(context: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """The context's value, in a task of its own."""
    keeper = Keeper(context)
    value = await keeper.open()
    try:
        yield value
    finally:
        await keeper.close()
