"""Asking again whoever says: not now."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def again(ask: Callable[[], Awaitable[T]], refused: type[Exception], pause: float) -> T:
    """The first answer that is no `refused`, every `pause` seconds; the deadline is the caller's.

    Another client that asks in bursts at fixed times would else meet all tries of one who comes
    again after whole seconds.
    """
    while True:
        try:
            return await ask()
        except refused:
            await asyncio.sleep(pause)
