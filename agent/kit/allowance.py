"""How many of something there may be: some at once, and then one now and then."""

import dataclasses


@dataclasses.dataclass(slots=True)
class Allowance:
    """`burst` at once, then one every `refill` seconds; `spent` at `since`, in loop time."""

    burst: int
    refill: float
    spent: float = 0.0
    since: float = 0.0

    def allows(self, now: float) -> bool:
        """Whether one more may be."""
        return self.wait(now) == 0

    def wait(self, now: float) -> float:
        """Seconds until one more may be."""
        return max(0.0, (self._at(now) + 1 - self.burst) * self.refill)

    def spend(self, now: float) -> None:
        """There was one more."""
        self.spent, self.since = self._at(now) + 1, now

    def _at(self, now: float) -> float:
        return max(0.0, self.spent - (now - self.since) / self.refill)
