"""Waiting for the world: a condition that is looked at often, with a deadline and a reason."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

_STEP: Final = 0.005
_QUESTION_STEP: Final = 0.05


async def until(holds: Callable[[], bool], within: float, why: Callable[[], str]) -> None:
    """Return once `holds()` is true.

    Raises:
        TimeoutError: it was not within so many seconds; `why()` is the text.
    """

    async def look() -> bool:
        return holds()

    await _until(look, within, why, _STEP)


async def until_answer(
    ask: Callable[[], Awaitable[bool]], within: float, why: Callable[[], str]
) -> None:
    """Return once `ask()` answers true; asked less often, for others have to answer it.

    Raises:
        TimeoutError: it did not within so many seconds; `why()` is the text.
    """
    await _until(ask, within, why, _QUESTION_STEP)


async def _until(
    ask: Callable[[], Awaitable[bool]], within: float, why: Callable[[], str], step: float
) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while not await ask():
        if loop.time() > end:
            raise TimeoutError(f"{why()} (waited {within:g} s)")
        await asyncio.sleep(step)
