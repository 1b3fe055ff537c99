"""What an operator is told who changed the limits of a running container."""

import msgspec

from agent.core.state.ledger import Decider, Row
from agent.core.usage.region import RegionLayout

_BY_LAUNCH = frozenset({RegionLayout.V0, RegionLayout.V1_1})
"""HAMi-core up to 2.8.0 reads the core limit with each launch, and only that of the first GPU."""


class LimitAnswer(msgspec.Struct, frozen=True):
    """A wish that was granted.

    - `before`, `after`: the row; the same row: nothing changed.
    - `obstacle`: why HAMi-core's region was not written now; empty: it was, or needed no write.
    - `layout`: of the region; None: there is none yet.
    """

    before: Row
    after: Row
    obstacle: str = ""
    layout: RegionLayout | None = None

    @property
    def changed(self) -> bool:
        """Whether the limits are others than before."""
        return self.before.limits != self.after.limits

    @property
    def notes(self) -> tuple[str, ...]:
        """When the limits act, and what HAMi's scheduler counts; one sentence each."""
        if not self.changed:
            return ()
        return tuple(filter(None, (self._written, self._memory, self._cores, *self._scheduler)))

    @property
    def _written(self) -> str:
        if not self.obstacle:
            return ""
        return f"HAMi-core's region was not written yet; the agent tries every 5 s: {self.obstacle}"

    @property
    def _memory(self) -> str:
        pairs = zip(self.before.limits, self.after.limits, strict=True)
        is_other = any(old.memory_mib != new.memory_mib for old, new in pairs)
        return "The memory limit acts on the next allocation." if is_other else ""

    @property
    def _cores(self) -> str:
        pairs = zip(self.before.limits, self.after.limits, strict=True)
        if all(old.core_percent == new.core_percent for old, new in pairs):
            return ""
        if self.layout in _BY_LAUNCH:
            return "The core limit acts on the next kernel, on the container's first GPU alone."
        return "The core limit acts on processes that start from now on."

    @property
    def _scheduler(self) -> tuple[str, ...]:
        if self.after.decided_by is not Decider.SCHEDULER:
            return ()
        room = (
            "Until then freed room stays empty, and pods that it places in taken room are refused "
            "with HA-4003 or HA-4004."
        )
        return (
            "HAMi's scheduler 2.5 to 2.9 counts the new limits within seconds.",
            "Releases 2.4 and 2.10 count the old ones until the scheduler restarts.",
            room,
        )
