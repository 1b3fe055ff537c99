"""Carries the health of GPUs over a restart of the agent, a boot, and a step of the clock."""

import datetime as dt
from typing import Final

import msgspec

from agent.core.health.settings import DEFAULTS, HealthSettings, xid_class
from agent.core.health.verdicts import past
from agent.core.health.xids import XidClass
from agent.core.inventory.condition import Action, Cause, Condition, Health

HARDWARE: Final = frozenset({Cause.ECC, Cause.LOST, Cause.MEMORY, Cause.PROBE, Cause.REFUSED})
"""Causes that a boot does not certainly remove."""
BEFORE: Final = "before the boot: "

STEP: Final = dt.timedelta(seconds=1)
"""Smaller differences are not a step: two readings of a clock differ a little."""


def stepped(health: Health, before: dt.datetime | None, now: dt.datetime | None) -> Health:
    """Shift the times in `health` by the step of the clock, so that the cool-down keeps its length.

    `before` and `now` are the time of the same boot by the clock before and after the step. If one
    of them is None, nothing changes.
    """
    if before is None or now is None or abs(now - before) < STEP:
        return health
    by = now - before
    return msgspec.structs.replace(
        health,
        since=health.since + by,
        quiet_since=health.quiet_since and health.quiet_since + by,
        recovered_at=health.recovered_at and health.recovered_at + by,
        failures=tuple(at + by for at in health.failures),
    )


def remembered(
    health: Health, now: dt.datetime, settings: HealthSettings = DEFAULTS, *, boot_changed: bool
) -> Health:
    """The health with which a GPU starts, from its health in the checkpoint.

    - After a boot (`boot_changed`), which resets every GPU: a GPU with a hardware fault is watched
      for one cool-down, any other is ok.
    - A GPU whose XID the operator has since declared harmless is ok.
    - The time for which a silent GPU is served begins again: this process has not probed it yet.
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
    """The same health without passed probes and with no time in the future."""
    recovered_at, quiet_since = health.recovered_at, health.quiet_since
    return msgspec.structs.replace(
        health,
        since=now if health.silent and health.serving else min(health.since, now),
        quiet_since=quiet_since and min(quiet_since, now),
        passed_probes=0,
        recovered_at=recovered_at and min(recovered_at, now),
        failures=tuple(min(at, now) for at in health.failures),
    )
