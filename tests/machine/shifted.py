"""Another machine's clock."""

import dataclasses
import datetime as dt

from agent.ports import Clock


@dataclasses.dataclass
class ShiftedClock:
    """The clock of this machine, and so many seconds more."""

    clock: Clock
    ahead: float = 0.0

    def now(self) -> dt.datetime:
        """Its wall time."""
        return self.clock.now() + dt.timedelta(seconds=self.ahead)

    def jump(self) -> None:
        """Five minutes and more: whatever the scheduler locked has run out."""
        self.ahead += 310.0
