"""Repeats a call for as long as it is refused."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def again(ask: Callable[[], Awaitable[T]], refused: type[Exception], pause: float) -> T:
    """Call `ask` every `pause` seconds until it does not raise `refused`; return its answer.

    The caller sets the deadline. A `pause` of whole seconds can collide every time with another
    client that calls in bursts at fixed times.
    """
    while True:
        try:
            return await ask()
        except refused:
            await asyncio.sleep(pause)
