"""Ticks that all periodic work shares, so that an idle process wakes seldom."""

import asyncio
import math
from typing import Final

TURN: Final = 0.1
"""Seconds. Threads that run at the same time wake each other, because only one has the interpreter
lock. So work for different threads takes turns after a tick."""

EARLY: Final = 0.001
"""Seconds before a tick that count as the tick, because timers can fire a little early."""


def until_tick(period: float, turn: int = 0) -> float:
    """Seconds until the next tick: more than 0, at most `period` and EARLY.

    Ticks are the multiples of `period` on the loop's clock, and `turn` times TURN later. Work whose
    periods are multiples of each other, with the same turn, runs together.
    """
    now, late = asyncio.get_running_loop().time(), turn * TURN
    return (math.floor((now - late + EARLY) / period) + 1) * period + late - now
