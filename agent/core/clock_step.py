"""A clock that was set while nobody looked: remembered moments, told by the clock as it is now."""

import dataclasses
import datetime as dt
from typing import Final

from agent.core.condition import Health

STEP: Final = dt.timedelta(seconds=1)
"""What is less is no step: the clock is never exactly what it was."""


def stepped(health: Health, before: dt.datetime | None, now: dt.datetime | None) -> Health:
    """`health` by the clock of `now`. Both are what a clock gives for the moment of the boot.

    So its rest is as long as it was, wherever the clock went. None: not known, nothing is changed.
    """
    if before is None or now is None or abs(now - before) < STEP:
        return health
    by = now - before
    return dataclasses.replace(
        health,
        since=health.since + by,
        recovered_at=health.recovered_at and health.recovered_at + by,
        failures=tuple(one + by for one in health.failures),
    )
