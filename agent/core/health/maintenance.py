"""An operator's actions on a GPU: release it for work, take it back, probe it now."""

import datetime as dt

import msgspec

from agent.core.health.reports import Probe
from agent.core.health.verdicts import NextStep, bad, needing
from agent.core.inventory.condition import Action, Cause, Condition, Health
from agent.core.inventory.gpu import Gpu, GpuUuid

ALL = "all"
"""Stands for all GPUs of the node, in place of one GPU's name."""
RUNBOOK = "H-RELEASED"
TEXT = f"it is released; `hami-agent recheck` takes it back [{RUNBOOK}]"
UNASKED = f"it is taken back; it is served when it answers [{RUNBOOK}]"


class GpuRelease(msgspec.Struct, frozen=True):
    """The result of a release. `held_by`: pods with slices of these GPUs, as namespace/name.

    `obstacle`: why the agent still holds the GPUs open; empty if it does not.
    """

    gpus: tuple[GpuUuid, ...]
    held_by: tuple[str, ...] = ()
    obstacle: str = ""


def released(health: Health, now: dt.datetime) -> Health:
    """The health of a released GPU: not served. The need for a reset or reboot is kept."""
    if health.cause == Cause.RELEASED:
        return health
    return msgspec.structs.replace(
        health,
        condition=Condition.UNMONITORED,
        since=now,
        quiet_since=None,
        cause=Cause.RELEASED,
        text=TEXT,
        serving=False,
        passed_probes=0,
        action=Action.NONE,
        runbook=RUNBOOK,
        failures=(),
        failed_in_row=0,
    )


def taken_back(health: Health, now: dt.datetime) -> Health:
    """The health of a GPU that is taken back after a release.

    A GPU that was bad or lost before starts a new cool-down, or still needs its reset. Any other
    GPU is ok as soon as it answers. It is not served before that: the work may have broken it.
    """
    if health.cause != Cause.RELEASED:
        return health
    was_ill = health.bouts > 0 and health.recovered_at is None
    if not was_ill:
        return msgspec.structs.replace(
            health, since=now, cause=Cause.DRIVER, text=UNASKED, xid=None
        )
    text = "it was unhealthy before it was released"
    needs = health.needs_reset or health.needs_reboot
    then = NextStep.RESET if needs else NextStep.NOTHING  # it may be lost still, or fail again
    then = NextStep.REBOOT if health.needs_reboot else then
    cause = Cause.XID if health.xid is not None else Cause.PROBE
    runbook = f"H-{health.xid:03d}" if health.xid is not None else RUNBOOK
    verdict = msgspec.structs.replace(bad(now, cause, text, runbook, then), xid=health.xid)
    verdict = needing(verdict, reboot=health.needs_reboot) if needs else verdict
    return msgspec.structs.replace(verdict, bouts=health.bouts)


class Recheck(msgspec.Struct, frozen=True):
    """The result of probing one GPU now: its health before and after the probe.

    `serving`: new containers may get it. `missing`: what still has to happen until it is ok.
    """

    gpu: Gpu
    probe: Probe
    before: Health
    after: Health
    serving: bool
    missing: tuple[str, ...] = ()
