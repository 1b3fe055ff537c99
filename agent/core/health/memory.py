"""What a remembered health is worth: after a restart, a boot, a clock that was set."""

import dataclasses
import datetime as dt
from typing import Final

from agent.core.health.settings import DEFAULTS, HealthSettings, xid_class
from agent.core.health.verdicts import past
from agent.core.health.xids import XidClass
from agent.core.inventory.condition import Action, Cause, Condition, Health

HARDWARE: Final = frozenset({Cause.ECC, Cause.LOST, Cause.MEMORY, Cause.PROBE, Cause.REFUSED})
"""What a boot alone does not mend for certain."""
BEFORE: Final = "before the boot: "

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


def remembered(
    health: Health, now: dt.datetime, settings: HealthSettings = DEFAULTS, *, boot_changed: bool
) -> Health:
    """What a remembered health is worth now. `boot_changed`: the node has booted since.

    A boot resets every GPU. What only needed that is over; a fault of the hardware itself is
    watched for a quiet time. What the operator has declared harmless since is over as well. The
    time for which a silent GPU is served begins with this process: none of it was asked before.
    """
    harmless = health.cause == Cause.XID and health.xid is not None
    if harmless and xid_class(health.xid or 0, settings) is XidClass.APPLICATION:
        return Health(Condition.OK, since=now)
    if not boot_changed:
        return _restarted(health, now)
    hardware = health.cause in HARDWARE
    if health.condition in {Condition.OK, Condition.UNMONITORED} or not hardware:
        return Health(Condition.OK, since=now)
    return Health(
        Condition.WATCH,
        now,
        health.cause,
        BEFORE + past(health).removeprefix(BEFORE),
        health.xid,
        action=Action.WAIT,
        runbook=health.runbook,
    )


def _restarted(health: Health, now: dt.datetime) -> Health:
    """What it was, with no moment in the future."""
    recovered_at = health.recovered_at
    return dataclasses.replace(
        health,
        since=now if health.silent and health.serving else min(health.since, now),
        passed_probes=0,
        recovered_at=recovered_at and min(recovered_at, now),
        failures=tuple(min(one, now) for one in health.failures),
    )
