"""Single conclusions about a GPU: how grave each is, and what follows from one after another."""

import dataclasses
import datetime as dt
import enum
from typing import Final

from agent.core.health.reports import FabricState, GpuSigns, RecoveryAction
from agent.core.health.xids import XidClass, xid_name
from agent.core.inventory.condition import Action, Cause, Condition, Health

REBOOTS: Final = frozenset({RecoveryAction.NODE_REBOOT, RecoveryAction.SYSTEM_REBOOT})
RESETS: Final = frozenset(
    {
        RecoveryAction.GPU_RESET,
        RecoveryAction.DRAIN_AND_RESET,
        RecoveryAction.BUS_RESET,
        RecoveryAction.OTHER,
    }
)
_ORDER: Final = (
    Condition.OK,
    Condition.WATCH,
    Condition.UNMONITORED,
    Condition.BAD,
    Condition.LOST,
)


class NextStep(enum.StrEnum):
    """What is to be done about what happened, or what comes next: how a text ends for people.

    Whatever else a text holds may be the driver's words; only these are told apart from it.
    """

    NOTHING = ""
    RESET = "reset it or reboot the node"
    RESET_NOW = "reset the GPU"
    RESET_FREE = "reset it when it is free"
    RESET_AGAIN = "it reported an error since, so that it needs another reset"
    REBOOT = "reboot the node"
    BOOT = "it needs a reboot of the node"
    REPLACE = "replace the GPU"
    REST = "it is served again when it stays quiet"
    RELIEVED = "the driver says that no reset is needed"
    WITHDRAWN = "now it says that none is needed"
    FABRIC = "see that nvidia-fabricmanager runs"
    SAID = "it was reset, as an operator says"


def bad(
    now: dt.datetime, cause: Cause, told: str, runbook: str, then: NextStep = NextStep.NOTHING
) -> Health:
    """Not served until it rests."""
    return Health(
        Condition.BAD,
        now,
        cause,
        _sentence(told, then, runbook),
        serving=False,
        action=Action.WAIT,
        runbook=runbook,
    )


def needing(verdict: Health, *, reboot: bool) -> Health:
    """The same, and rest is not enough."""
    action = Action.REBOOT if reboot else Action.RESET
    return dataclasses.replace(verdict, needs_reset=True, needs_reboot=reboot, action=action)


def watched(
    now: dt.datetime, cause: str, told: str, runbook: str, then: NextStep = NextStep.NOTHING
) -> Health:
    """Served, with a reason to look at it."""
    text = _sentence(told, then, runbook)
    return Health(Condition.WATCH, now, cause, text, action=Action.WAIT, runbook=runbook)


def silenced(health: Health, now: dt.datetime, cause: Cause, told: str, runbook: str) -> Health:
    """Nothing, or not everything, is heard of it. The XID of `health` is kept."""
    return Health(
        Condition.UNMONITORED,
        now,
        cause,
        _sentence(told, NextStep.NOTHING, runbook),
        health.xid,
        action=Action.INSPECT,
        runbook=runbook,
    )


def relieved(health: Health, signs: GpuSigns, now: dt.datetime) -> Health:
    """The driver may say that a GPU needs no reset (any more). A boot it cannot talk away."""
    if signs.recovery is not RecoveryAction.NONE or not health.needs_reset or health.needs_reboot:
        return health
    happened = _happened(health)
    if health.cause != Cause.ADVICE:
        return _freed(health, now, happened, NextStep.RELIEVED)
    return _freed(
        health, now, happened.replace("driver says", "driver said", 1), NextStep.WITHDRAWN
    )


def answered_again(health: Health, signs: GpuSigns, now: dt.datetime) -> Health:
    """It refused what it was asked until a reset, and answers: there was one.

    Not where the driver says besides that it needs another.
    """
    is_owed = health.cause == Cause.REFUSED and health.needs_reset
    if not is_owed or signs.recovery in REBOOTS | RESETS:
        return health
    told = "it was reset, for the driver answers for it again"
    return _freed(health, now, told, NextStep.REST)


def reset_by_word(health: Health, now: dt.datetime) -> Health:
    """An operator says that it was reset, as drivers before 570 do not: then it rests.

    Nobody's word stands for a boot, and what the next probe shows goes against it.
    """
    if not health.needs_reset or health.needs_reboot:
        return health
    if health.condition is Condition.LOST:  # it comes back reset
        return dataclasses.replace(health, needs_reset=False)
    return _freed(health, now, _happened(health), NextStep.SAID)


def refused(health: Health, now: dt.datetime) -> Health:
    """The driver answers for it only after a reset: that it does so later is the proof of one.

    So this takes the place of what needed a reset before. A reboot it cannot stand for.
    """
    if health.needs_reboot or (health.cause == Cause.REFUSED and health.needs_reset):
        return again(health, now)
    struck = "" if health.xid is None else f" (after XID {health.xid})"
    told = f"the driver refuses to answer for it until it is reset{struck}"
    verdict = bad(now, Cause.REFUSED, told, "H-RESET", NextStep.RESET)
    return needing(dataclasses.replace(verdict, xid=health.xid), reboot=False)


def signed(health: Health, signs: GpuSigns, now: dt.datetime) -> Health:
    """What a GPU says of its memory, and the driver of its need, holds as long as they say it.

    It is more than that it was lost, or refused, and answers.
    """
    found = _sign(signs, now)
    if found is None:
        return health
    has_come = health.condition is Condition.BAD and health.cause in {Cause.LOST, Cause.REFUSED}
    if gravity(found) > gravity(health) - has_come:
        return dataclasses.replace(found, xid=health.xid)
    if health.passed_probes and health.cause == found.cause:
        return dataclasses.replace(health, passed_probes=0)
    return health


def worse(health: Health, verdict: Health) -> Health:
    """`verdict` if it is graver than what is known, else what is known with its rest begun anew.

    The first cause of a grave state stays: what follows in a storm is mostly its echo. A silent
    GPU stays silent, so that reports do not stretch the time for which it is served. One that
    refused to answer may have been reset meanwhile: a report that needs a reset needs another.
    """
    is_anew = health.cause == Cause.REFUSED and verdict.needs_reset
    if gravity(verdict) > gravity(health) or is_anew:
        return verdict
    known = health if health.xid is not None else dataclasses.replace(health, xid=verdict.xid)
    if health.condition is Condition.LOST and verdict.needs_reset:
        return struck_while_lost(known, verdict)
    return known if health.condition is Condition.UNMONITORED else again(known, verdict.since)


def told_of(xid: int) -> str:
    """What is said of an XID."""
    return f"XID {xid}: {xid_name(xid)}"


def of_xid(xid: int, kind: XidClass, now: dt.datetime) -> Health | None:
    """What an XID of that class says of the GPU; None: nothing."""
    told, runbook = told_of(xid), f"H-{xid:03d}"
    if kind.condition is Condition.OK:
        return None
    if kind.condition is Condition.WATCH:
        return watched(now, Cause.XID, told, runbook)
    if kind.action is Action.WAIT:
        return bad(now, Cause.XID, told, runbook)
    reboot = kind.action is Action.REBOOT
    then = NextStep.REBOOT if reboot else NextStep.RESET
    return needing(bad(now, Cause.XID, told, runbook, then), reboot=reboot)


def suspected(health: Health, doubt: Health) -> Health:
    """`doubt` of a report that names no GPU: all are under suspicion, and the probes decide.

    One that is ill already rests on: others' mishaps would keep it out for ever.
    """
    return health if health.ill else worse(health, doubt)


def struck_while_lost(health: Health, verdict: Health) -> Health:
    """A lost GPU reported something: an echo, or it was back already and needs another reset.

    The next probe tells: one that still finds it lost says that it was an echo.
    """
    reboot = health.needs_reboot or verdict.needs_reboot
    if health.needs_reset and health.needs_reboot == reboot:
        return health
    return dataclasses.replace(health, needs_reset=True, needs_reboot=reboot)


def again(health: Health, now: dt.datetime) -> Health:
    """The same state, its quiet time begun anew; within one second it counts as one report."""
    if health.condition is Condition.LOST:
        return health
    if seconds(health, now) < 1.0 and health.passed_probes == 0:
        return health
    return dataclasses.replace(health, since=now, passed_probes=0)


def gravity(health: Health) -> int:
    """How grave it is: the condition, then what it needs."""
    return 3 * _ORDER.index(health.condition) + health.needs_reset + health.needs_reboot


def seconds(health: Health, now: dt.datetime) -> float:
    """For how long it is so."""
    return (now - health.since).total_seconds()


def past(health: Health) -> str:
    """What its text says, without what is to be done about it."""
    return _sentence(_happened(health), NextStep.NOTHING, health.runbook)


def _happened(health: Health) -> str:
    text = health.text.removesuffix(f" [{health.runbook}]")
    ends = (f"; {then}" for then in NextStep if then is not NextStep.NOTHING)
    return text.removesuffix(next(filter(text.endswith, ends), ""))


def _freed(health: Health, now: dt.datetime, told: str, then: NextStep) -> Health:
    """It needs no reset any more: its rest begins, whenever the last bad report was."""
    return dataclasses.replace(
        health,
        since=now,
        needs_reset=False,
        passed_probes=0,
        action=Action.WAIT,
        text=_sentence(told, then, health.runbook),
    )


def _sentence(told: str, then: NextStep, runbook: str) -> str:
    """The one place where what happened, what comes of it and where to read on are joined."""
    text = f"{told}; {then}" if then else told
    return f"{text} [{runbook}]" if runbook else text


def _sign(signs: GpuSigns, now: dt.datetime) -> Health | None:
    if signs.recovery in REBOOTS | RESETS:
        reboot = signs.recovery in REBOOTS
        need = "a reboot of the node" if reboot else "a reset"
        told = f"the driver says that it needs {need} ({signs.recovery})"
        return needing(bad(now, Cause.ADVICE, told, "H-ADVICE"), reboot=reboot)
    if not has_joined(signs):
        told = f"it has not joined the fabric of its NVSwitches ({signs.fabric}), without which no "
        told += "program runs on it"
        verdict = bad(now, Cause.FABRIC, told, "H-FABRIC", NextStep.FABRIC)
        return dataclasses.replace(verdict, action=Action.INSPECT)
    if signs.rows_failed:
        told = "memory rows could not be remapped, for no spare ones are left"
        verdict = bad(now, Cause.MEMORY, told, "H-ROWS", NextStep.REPLACE)
        return dataclasses.replace(verdict, action=Action.REPLACE)
    if signs.rows_pending or signs.pages_pending:
        told = "memory rows or pages wait for a reset to be replaced"
        verdict = watched(now, Cause.MEMORY, told, "H-ROWS", NextStep.RESET_FREE)
        return dataclasses.replace(verdict, action=Action.RESET)
    return None


def has_joined(signs: GpuSigns) -> bool:
    """Whether no NVSwitch keeps it from running programs, as far as the driver tells."""
    return signs.fabric in {None, FabricState.COMPLETED}


def as_told(health: Health) -> tuple[Condition, bool, bool]:
    """What people are told of; whether a lost GPU was struck again shows when it is back."""
    needs_reset = health.needs_reset and health.condition is not Condition.LOST
    return health.condition, health.serving, needs_reset
