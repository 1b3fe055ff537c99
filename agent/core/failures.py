"""Probes that fail: which of them count, and when they are too many. A driver may hiccup."""

import dataclasses
import datetime as dt
from typing import Final

from agent.core.condition import Health
from agent.core.events import Probe, ProbeOutcome

SAME_HICCUP: Final = 4.0
"""Seconds: probes that fail so soon after one that counted are the same mishap."""

LATELY: Final = 600.0
"""Seconds for which a failed probe counts."""

IN_A_ROW: Final = 2
"""So many, with none between them that passed, are no hiccup."""

MOST_LATELY: Final = 5
"""Nor are so many, whatever passed between them."""


def counted(health: Health, probe: Probe, now: dt.datetime) -> Health:
    """`health` with what `probe` adds to its failures. The same object: nothing."""
    if probe.outcome is ProbeOutcome.PASSED and health.failed_in_row:
        return dataclasses.replace(health, failed_in_row=0)
    if probe.outcome is not ProbeOutcome.FAILED or health.ill or _is_echo(health, now):
        return health
    return dataclasses.replace(
        health,
        failures=(*lately(health, now), now)[-MOST_LATELY:],
        failed_in_row=min(health.failed_in_row + 1, IN_A_ROW),
    )


def lately(health: Health, now: dt.datetime) -> tuple[dt.datetime, ...]:
    """The failed probes that still count."""
    return tuple(one for one in health.failures if (now - one).total_seconds() < LATELY)


def is_failing(health: Health, now: dt.datetime) -> bool:
    """Whether its failed probes are too many to serve it."""
    return health.failed_in_row >= IN_A_ROW or len(lately(health, now)) >= MOST_LATELY


def _is_echo(health: Health, now: dt.datetime) -> bool:
    return bool(health.failures) and (now - health.failures[-1]).total_seconds() < SAME_HICCUP
