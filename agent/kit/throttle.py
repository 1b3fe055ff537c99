"""Limits repeated log lines to one per period, and counts the ones left out."""

import asyncio


class Throttle:
    """Admits one, then none for `period` seconds."""

    def __init__(self, period: float) -> None:
        self._period = period
        self._next = 0.0
        self._left_out = 0

    def admit(self) -> int | None:
        """How many were left out since the last admitted one; None: leave this one out."""
        now = asyncio.get_running_loop().time()
        if now < self._next:
            self._left_out += 1
            return None
        self._next = now + self._period
        left_out, self._left_out = self._left_out, 0
        return left_out
