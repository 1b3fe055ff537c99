"""A rate limit: a burst first, then one per period."""

import msgspec


class Allowance(msgspec.Struct):
    """A token bucket: `burst` at once, then one every `refill` seconds.

    `spent` tokens were missing at `since` (loop time).
    """

    burst: int
    refill: float
    spent: float = 0.0
    since: float = 0.0

    def allows(self, now: float) -> bool:
        """Whether one more is allowed now."""
        return self.wait(now) == 0

    def wait(self, now: float) -> float:
        """Seconds until one more is allowed."""
        return max(0.0, (self._at(now) + 1 - self.burst) * self.refill)

    def spend(self, now: float) -> None:
        """Take one."""
        self.spent, self.since = self._at(now) + 1, now

    def _at(self, now: float) -> float:
        return max(0.0, self.spent - (now - self.since) / self.refill)
