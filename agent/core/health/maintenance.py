"""What an operator does about a GPU: release it for work, take it back, have it asked now."""

import dataclasses
import datetime as dt

from agent.core.health.reports import Probe
from agent.core.health.verdicts import NextStep, bad, needing
from agent.core.inventory.condition import Action, Cause, Condition, Health
from agent.core.inventory.gpu import Gpu, GpuUuid

ALL = "all"
"""The name of all GPUs of the node, where one can be named."""
RUNBOOK = "H-RELEASED"
TEXT = f"it is released; `hami-agent recheck` takes it back [{RUNBOOK}]"
UNASKED = f"it is taken back, and served when it answers [{RUNBOOK}]"


@dataclasses.dataclass(frozen=True, slots=True)
class GpuRelease:
    """What came of it. `held_by`: containers that have slices of these GPUs, as namespace/pod.

    `obstacle`: why the agent holds them open yet; empty: it does not.
    """

    gpus: tuple[GpuUuid, ...]
    held_by: tuple[str, ...] = ()
    obstacle: str = ""


def released(health: Health, now: dt.datetime) -> Health:
    """Not served, whatever it was; what it needs is kept."""
    if health.cause == Cause.RELEASED:
        return health
    return dataclasses.replace(
        health,
        condition=Condition.UNMONITORED,
        since=now,
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
    """As it was before: in a rest that begins anew, or in need of a reset, or well if it answers.

    Nobody knows what the work has left of it, so none is served on its word of before.
    """
    if health.cause != Cause.RELEASED:
        return health
    was_ill = health.bouts > 0 and health.recovered_at is None
    if not was_ill:
        return dataclasses.replace(health, since=now, cause=Cause.DRIVER, text=UNASKED, xid=None)
    told = "it was not well before it was released"
    needs = health.needs_reset or health.needs_reboot
    then = (NextStep.REBOOT if health.needs_reboot else NextStep.RESET) if needs else NextStep.REST
    cause = Cause.XID if health.xid is not None else Cause.PROBE
    runbook = f"H-{health.xid:03d}" if health.xid is not None else RUNBOOK
    ill = dataclasses.replace(bad(now, cause, told, runbook, then), xid=health.xid)
    ill = needing(ill, reboot=health.needs_reboot) if needs else ill
    return dataclasses.replace(ill, bouts=health.bouts)


@dataclasses.dataclass(frozen=True, slots=True)
class Recheck:
    """One GPU, asked now: its health before and after, and what is `missing` until it is served.

    `serving`: new containers may be given it.
    """

    gpu: Gpu
    probe: Probe
    before: Health
    after: Health
    serving: bool
    missing: tuple[str, ...] = ()
