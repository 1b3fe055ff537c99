"""How often the same thing is said: at most once in a period, with how many were left out."""

import asyncio


class Throttle:
    """Lets one through, then none for `period` seconds."""

    def __init__(self, period: float) -> None:
        self._period = period
        self._next = 0.0
        self._left_out = 0

    def admit(self) -> int | None:
        """How many were left out since the last one, or None: leave this one out, too."""
        now = asyncio.get_running_loop().time()
        if now < self._next:
            self._left_out += 1
            return None
        self._next = now + self._period
        left_out, self._left_out = self._left_out, 0
        return left_out
