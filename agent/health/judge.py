"""The health of a GPU: a report and what was known make what is known.

Reports make a condition worse. A cool-down with passed probes makes a watched or bad GPU ok again.
A GPU that needs a reset stays bad until it was reset. If a GPU becomes bad again soon after it
recovered, its cool-down doubles, up to a bound. The action is the strongest that any report asks
for.
"""

import datetime as dt
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Final

from msgspec.structs import replace

from agent.errors import cap
from agent.health.xids import (
    CONSEQUENCES,
    DEFAULTS,
    FELL_OFF_THE_BUS,
    HealthSettings,
    XidClass,
    xid_class,
    xid_name,
)
from agent.model import (
    Action,
    Cause,
    Condition,
    DriverEvent,
    EventKind,
    FabricState,
    GpuFault,
    GpuSigns,
    GpuUuid,
    Health,
    Probe,
    ProbeOutcome,
    RecoveryAction,
    Scan,
    Trouble,
)

SAME_HICCUP: Final = 4.0
"""Seconds. A probe that fails within this time after a counted failure is the same failure."""

MOST_DOUBLINGS: Final = 32
STEP: Final = dt.timedelta(seconds=1)
"""Smaller differences are not a step of the clock: two readings differ a little."""

WANTS: Final = {
    RecoveryAction.NODE_REBOOT: ("reboot of the node", Action.REBOOT),
    RecoveryAction.SYSTEM_REBOOT: ("reboot of the node", Action.REBOOT),
    RecoveryAction.GPU_RESET: ("reset", Action.RESET),
    RecoveryAction.DRAIN_AND_RESET: ("reset", Action.RESET),
    RecoveryAction.BUS_RESET: ("reset", Action.RESET),
    RecoveryAction.OTHER: ("reset", Action.RESET),
}
"""What the GPU needs by the driver's recovery action. All others concern no GPU alone."""

HARDWARE: Final = frozenset({Cause.ECC, Cause.LOST, Cause.MEMORY, Cause.PROBE, Cause.REFUSED})
"""Causes that a boot does not certainly remove."""

_ORDER: Final = (
    Condition.OK,
    Condition.WATCH,
    Condition.UNMONITORED,
    Condition.BAD,
    Condition.LOST,
)
"""From the least severe to the most severe."""

_ENDS: Final[dict[str, str]] = {
    Cause.RELEASED: "`hami-agent recheck` has to take it back",
    Cause.FABRIC: "it has to join the fabric of its NVSwitches: check that nvidia-fabricmanager "
    "runs",
    Condition.LOST: "the driver has to reach it again: reboot the node",
    Condition.UNMONITORED: "it has to answer, and the agent has to receive its events",
}
"""What ends these two causes, or else a condition, that no cool-down ends."""

UNNAMED: Final = " on a GPU that the driver cannot name"
BEFORE: Final = "before the boot: "


_STEPS: Final[dict[str, str]] = {
    Condition.LOST: "if this lasts, reboot the node",
    Action.RESET: "reset it or reboot the node",
    Action.REBOOT: "reboot the node",
    Action.REPLACE: "replace the GPU",
}
"""The end of a health text: what to do, by the condition or else by the action."""
COOLING: Final = "it is served again after its cool-down"
RELIEVED: Final = "it needs no reset any more and is served again after its cool-down"


def verdict(
    condition: Condition,
    now: dt.datetime,
    cause: str,
    runbook: str,
    reason: str,
    *,
    xid: int | None = None,
    needs: Action = Action.NONE,
    action: Action = Action.WAIT,
) -> Health:
    """The health of a GPU after one report. Bad and lost GPUs are not served, all others are.

    `needs`: RESET or REBOOT if the GPU cannot be ok before that. `action`: what else a person
    should do. The stronger of the two is told; WAIT: the condition clears by itself.
    """
    action = max(needs, action, key=[*Action].index)
    step = _STEPS.get(condition) or _STEPS.get(action, "")
    return Health(
        condition,
        now,
        cause,
        _sentence(reason, step, runbook),
        xid,
        needs_reset=needs in {Action.RESET, Action.REBOOT},
        serving=condition not in {Condition.BAD, Condition.LOST},
        action=action,
        runbook=runbook,
        needs_reboot=needs is Action.REBOOT,
    )


def judge(
    health: Health, report: DriverEvent | Probe, now: dt.datetime, settings: HealthSettings
) -> Health:
    """The health of one GPU after a report about it. Returns `health` itself if nothing changes.

    `now` must not go backwards between calls.
    """
    if health.cause == Cause.RELEASED:
        return health  # work on the GPU can cause any report

    if isinstance(report, DriverEvent):
        fresh = _on_event(health, report, now, settings)
    else:
        fresh = _on_probe(health, report, now, settings)

    # A verdict alone does not carry the count of bouts.
    bouts, recovered_at = health.bouts, health.recovered_at
    if fresh.ill and not health.ill:
        # A GPU that fails every hour would otherwise be served for most of the hour, and take the
        # pods of each time with it.
        soon = recovered_at is not None and (
            (now - recovered_at).total_seconds() < max(settings.quiet, settings.longest_quiet)
        )
        bouts, recovered_at = (bouts + 1 if soon else 1), None
    elif health.ill and not fresh.ill:
        recovered_at = now

    fresh = replace(fresh, bouts=bouts, recovered_at=recovered_at)
    return health if fresh == health else fresh


def aged(health: Health, now: dt.datetime, settings: HealthSettings) -> Health:
    """The health after time alone: a silent GPU is served only for `driver_hang` seconds."""
    is_over = health.silent and health.serving and seconds(health, now) >= settings.driver_hang
    return replace(health, serving=False) if is_over else health


def switched_off(now: dt.datetime) -> Health:
    """The health of every GPU when health checks are switched off."""
    text = "health checks are switched off in the settings"
    return verdict(Condition.UNMONITORED, now, Cause.OFF, "H-OFF", text, action=Action.NONE)


def quiet_time(health: Health, settings: HealthSettings) -> float:
    """The cool-down of this GPU: seconds without a bad report."""
    doublings = min(max(health.bouts, 1) - 1, MOST_DOUBLINGS) if health.ill else 0
    return min(settings.quiet * 2.0**doublings, max(settings.quiet, settings.longest_quiet))


def missing(health: Health, now: dt.datetime, settings: HealthSettings) -> tuple[str, ...]:
    """What still has to happen until the GPU is ok, in words. Empty if it is ok."""
    if health.condition is Condition.OK or health.cause == Cause.OFF:
        return ()

    # The cause of a GPU that was lost and is back is spelled as the condition LOST.
    has_own_end = health.cause in {Cause.RELEASED, Cause.FABRIC}
    end = _ENDS.get(health.cause if has_own_end else health.condition)
    if end or health.needs_reboot:
        return (end or "a reboot of the node",)

    needs = ["a reset of the GPU, or a reboot of the node"] if health.needs_reset else []
    rested = 0.0 if health.needs_reset else seconds(health, now)  # it begins with the reset
    if (rest := quiet_time(health, settings) - rested) > 0:
        needs.append(f"{rest:.0f} s more without a bad report")

    if (probes := settings.passes - health.passed_probes) > 0:
        needs.append(f"{probes} more passed probe{'s' if probes > 1 else ''}")

    return tuple(needs)


def past(health: Health) -> str:
    """The text of a health without what is to be done."""
    return _sentence(_happened(health), "", health.runbook)


def _happened(health: Health) -> str:
    text = health.text.removesuffix(f" [{health.runbook}]")
    ends = (f"; {step}" for step in (*_STEPS.values(), COOLING, RELIEVED))
    return text.removesuffix(next(filter(text.endswith, ends), ""))


def _sentence(reason: str, step: str, runbook: str) -> str:
    text = f"{reason}; {step}" if step else reason
    return f"{text} [{runbook}]" if runbook else text


def gravity(health: Health) -> int:
    """The severity of a health: by condition, then by the need for a reset or reboot."""
    return 3 * _ORDER.index(health.condition) + health.needs_reset + health.needs_reboot


def seconds(health: Health, now: dt.datetime) -> float:
    """Seconds since the cool-down began."""
    return (now - (health.quiet_since or health.since)).total_seconds()


# Events of the driver.


def _on_event(
    health: Health, event: DriverEvent, now: dt.datetime, settings: HealthSettings
) -> Health:
    xid = event.xid or 0
    kind = xid_class(xid, settings) if event.kind is EventKind.XID else XidClass.NEEDS_RESET

    # CHANGED is about no GPU's health. An XID of an application is the fault of a program in a
    # container, the echo of another error or a notice, by NVIDIA's catalog (IGNORE, RESTART_APP).
    # The next container may well run here.
    if event.kind is EventKind.CHANGED or kind is XidClass.APPLICATION:
        return health

    if event.kind is EventKind.ECC_DOUBLE:
        text, needs = "uncorrectable memory error", Action.RESET
        found = verdict(Condition.BAD, now, Cause.ECC, "H-ECC", text, needs=needs)
    else:
        # A GPU off the bus cannot be reset. If it is back without a boot, that was a reset.
        is_off = xid == FELL_OFF_THE_BUS and kind is XidClass.NEEDS_RESET
        action = Action.REBOOT if is_off else Action.WAIT
        condition, needs = CONSEQUENCES[kind]
        text = f"XID {xid}: {xid_name(xid)}"
        found = verdict(
            condition, now, Cause.XID, f"H-{xid:03d}", text, xid=xid, needs=needs, action=action
        )

    if event.uuid is None:
        # NVIDIA's and HAMi's plugin mark all GPUs unhealthy then (rm/health.go), which empties the
        # node for one error. Here all are watched, and the probes decide. The cool-down of a bad or
        # lost GPU goes on: otherwise reports about others would keep restarting it.
        if health.ill:
            return health
        text = _happened(found) + UNNAMED
        found = verdict(Condition.WATCH, now, found.cause, found.runbook, text, xid=found.xid)

    return worse(health, found)


def worse(health: Health, fresh: Health) -> Health:
    """`fresh` if it is more severe than `health`, else `health` with its cool-down restarted.

    The first cause of a severe condition stays, because later reports mostly follow from it. A
    silent GPU stays silent, so that reports do not extend the time for which it is served. A
    refused GPU may have been reset meanwhile, so a report that needs a reset replaces its verdict.
    """
    is_new_need = health.cause == Cause.REFUSED and fresh.needs_reset
    if gravity(fresh) > gravity(health) or is_new_need:
        return fresh

    known = health if health.xid is not None else replace(health, xid=fresh.xid)
    if health.condition is Condition.LOST and fresh.needs_reset:
        # Either the report is a late echo, or the GPU was back already and needs another reset. If
        # the next probe still finds the GPU lost, it was an echo.
        return replace(
            known, needs_reset=True, needs_reboot=health.needs_reboot or fresh.needs_reboot
        )

    return known if health.condition is Condition.UNMONITORED else again(known, fresh.since)


def again(health: Health, now: dt.datetime) -> Health:
    """The same health with its cool-down restarted. Reports within 1 s count as one.

    The cool-down of a GPU that needs a reset begins when that need ends.
    """
    is_counted = health.needs_reset or seconds(health, now) < 1.0
    if health.condition is Condition.LOST or (is_counted and health.passed_probes == 0):
        return health

    return replace(
        health, quiet_since=health.quiet_since if health.needs_reset else now, passed_probes=0
    )


# Probes.


def _on_probe(health: Health, probe: Probe, now: dt.datetime, settings: HealthSettings) -> Health:
    told = partial(verdict, Condition.UNMONITORED, now, action=Action.INSPECT)
    match probe.outcome:
        case ProbeOutcome.PASSED:
            is_deaf = health.cause == Cause.MONITOR and bool(probe.unmonitored)
            fresh = health if is_deaf else _on_passed(health, probe.signs, now, settings)
            fresh = signed(fresh, probe.signs, now)
            if not probe.unmonitored or fresh.condition not in {Condition.OK, Condition.WATCH}:
                return fresh
            text = f"the agent does not receive its events: {cap(probe.unmonitored)}"
            return told(Cause.MONITOR, "H-DEAF", text, xid=fresh.xid)
        case ProbeOutcome.FAILED:
            return signed(_on_failed(health, probe, now, settings), probe.signs, now)
        case ProbeOutcome.REFUSED:
            return _on_refused(health, now)
        case ProbeOutcome.LOST:
            return _on_lost(health, probe, now)
        case _:  # it is silent
            if health.silent:
                # Further silence does not extend the time for which it is served.
                return aged(health, now, settings)
            if health.ill:
                # Silence is no recovery: the count of passed probes begins again.
                return replace(health, passed_probes=0)
            text = f"it does not answer ({cap(probe.text) or 'no reply'})"
            return told(Cause.DRIVER, "H-SILENT", text, xid=health.xid)


def _on_passed(
    health: Health, signs: GpuSigns, now: dt.datetime, settings: HealthSettings
) -> Health:
    is_joining = health.cause == Cause.FABRIC  # it has no fault, so it needs no cool-down
    if health.condition is Condition.OK or (is_joining and not has_joined(signs)):
        return health

    if is_joining or health.condition is Condition.UNMONITORED:
        if health.xid is None:
            return Health(Condition.OK, since=now)
        # What was reported before it fell silent, or left its fabric, still counts.
        said = f"it reported XID {health.xid} before"
        return verdict(Condition.WATCH, now, Cause.XID, f"H-{health.xid:03d}", said, xid=health.xid)

    if health.condition is Condition.LOST:
        return _on_recovered(health, now)

    known = relieved(health, signs, now)
    passed = min(known.passed_probes + 1, settings.passes)
    # Neither plugin takes a GPU back: "there is no way to recover from the Unhealthy state"
    # (server.go of NVIDIA's plugin). One passed probe proves little, since a broken GPU answers
    # between errors.
    has_rested = seconds(known, now) >= quiet_time(known, settings)
    if has_rested and passed >= settings.passes and not known.needs_reset:
        return Health(Condition.OK, since=now)

    return replace(known, passed_probes=passed)


def _on_failed(health: Health, probe: Probe, now: dt.datetime, settings: HealthSettings) -> Health:
    """A failed probe makes a GPU watched, and another one within its cool-down makes it bad."""
    if health.ill:
        return again(health, now)
    # The probes of all services meet the same hiccup of the driver within one round.
    is_echo = seconds(health, now) < SAME_HICCUP
    # A driver that comes back answers for one GPU after the other. A GPU that is taken back is not
    # served yet, and its next failure decides.
    if health.silent and (is_echo or health.runbook != RUNBOOK):
        return aged(health, now, settings)
    if health.cause == Cause.PROBE and is_echo:
        return health

    error = cap(probe.text) or "an error"
    found = partial(verdict, now=now, cause=Cause.PROBE, runbook="H-PROBE", xid=health.xid)
    if is_failing(health):
        return found(Condition.BAD, reason=f"probes fail: {error}", action=Action.INSPECT)

    return found(Condition.WATCH, reason=f"a probe failed: {error}")


def is_failing(health: Health) -> bool:
    """Whether another failed probe is one too many to serve the GPU."""
    return health.cause == Cause.PROBE or health.runbook == RUNBOOK


def _on_refused(health: Health, now: dt.datetime) -> Health:
    """The driver refuses calls until the GPU is reset.

    That replaces an earlier need for a reset, because a later answer proves one, but no reboot.
    """
    if health.needs_reboot or (health.cause == Cause.REFUSED and health.needs_reset):
        is_lost = health.condition is Condition.LOST
        return again(_on_recovered(health, now) if is_lost else health, now)

    after = "" if health.xid is None else f" (after XID {health.xid})"
    text = f"the driver refused calls for it{after}"
    runbook, needs = _incident(health, "H-RESET"), Action.RESET
    return verdict(Condition.BAD, now, Cause.REFUSED, runbook, text, xid=health.xid, needs=needs)


def _on_lost(health: Health, probe: Probe, now: dt.datetime) -> Health:
    if health.condition is Condition.LOST:
        # A reset that was asked for meanwhile was an echo.
        return replace(health, needs_reset=health.needs_reset and health.needs_reboot)

    reason = f"after XID {health.xid}" if health.xid is not None else cap(probe.text)
    return verdict(
        Condition.LOST,
        now,
        Cause.LOST,
        # The id of what needed a reset stays, so that its return is told as that reset.
        health.runbook if health.needs_reset else _incident(health, "H-LOST"),
        f"the driver no longer reaches it ({reason or 'no reason given'})",
        xid=health.xid,
        # Being back implies a reset, but nobody can reset what the driver does not reach: "GPU is
        # lost. Reboot the system to recover this GPU" (nvidia-smi).
        needs=Action.REBOOT if health.needs_reboot else Action.NONE,
        action=Action.REBOOT,
    )


def _on_recovered(health: Health, now: dt.datetime) -> Health:
    """The GPU was lost and answers. That implies a reset, unless it reported an error since."""
    said, needs = "it was lost and is back", _need(health)
    back = verdict(
        Condition.BAD, now, Cause.LOST, health.runbook, said, xid=health.xid, needs=needs
    )
    # Its last text asked for a reboot: the new one has to say that nothing is to be done.
    text = _sentence(said, COOLING, back.runbook) if needs is Action.NONE else back.text
    return replace(back, passed_probes=1, text=text)


def _need(health: Health) -> Action:
    """What the GPU needs before it can be ok: NONE, RESET or REBOOT."""
    need = Action.RESET if health.needs_reset else Action.NONE
    return Action.REBOOT if health.needs_reboot else need


def _incident(health: Health, runbook: str) -> str:
    """The id of what goes on: that of the XID with which it began, else `runbook`."""
    return runbook if health.xid is None else f"H-{health.xid:03d}"


# What a GPU tells of itself.


def signed(health: Health, signs: GpuSigns, now: dt.datetime) -> Health:
    """The health after the signs of a probe. A verdict of signs holds while the signs last.

    A fault in the signs outweighs that the GPU was lost or refused and answers again.
    """
    found = _of_signs(signs, now, health.xid)
    if found is None:
        return health

    # "It was lost and is back" clears by itself, and what the GPU tells now does not.
    is_back = health.condition is Condition.BAD and health.cause in {Cause.LOST, Cause.REFUSED}
    if gravity(found) > gravity(health) - is_back:
        return found

    is_same = health.passed_probes and health.cause == found.cause
    return replace(health, passed_probes=0) if is_same else health


def _of_signs(signs: GpuSigns, now: dt.datetime, xid: int | None) -> Health | None:
    """The verdict about the most severe fault that a GPU tells of itself, or None."""
    ill = partial(verdict, Condition.BAD, now, xid=xid)

    # It holds until the driver wants none any more: no other sign says more.
    if signs.recovery in WANTS:
        words, needs = WANTS[signs.recovery]
        text = f"the driver asked for a {words} ({signs.recovery})"
        return ill(Cause.ADVICE, "H-ADVICE", text, needs=needs)

    if not has_joined(signs):
        text = f"it has not joined the fabric of its NVSwitches ({signs.fabric}); check that "
        text += "nvidia-fabricmanager runs"
        return ill(Cause.FABRIC, "H-FABRIC", text, action=Action.INSPECT)

    if signs.rows_failed:
        text = "memory rows could not be remapped: no spare rows are left"
        return ill(Cause.MEMORY, "H-ROWS", text, action=Action.REPLACE)

    if not (signs.rows_pending or signs.pages_pending):
        return None

    # It runs without them, so it is served until somebody has time to reset it.
    text, action = "memory rows or pages wait for a reset once the GPU is free", Action.RESET
    return verdict(Condition.WATCH, now, Cause.MEMORY, "H-ROWS", text, xid=xid, action=action)


def has_joined(signs: GpuSigns) -> bool:
    """Whether the GPU has joined its fabric, or has none, as far as the driver reports."""
    return signs.fabric in {None, FabricState.COMPLETED}


# The ends of the need for a reset. The need for a reboot stays.


def relieved(health: Health, signs: GpuSigns, now: dt.datetime) -> Health:
    """End the need for a reset if the driver says that no action is needed.

    Also if the driver refused calls for the GPU and answers again, which proves a reset, unless it
    says that the GPU needs another one.
    """
    # GPU_REQUIRES_RESET (16) is the driver's answer to each call until nvidia-smi --gpu-reset or a
    # boot.
    was_refused = health.cause == Cause.REFUSED and signs.recovery not in WANTS
    if was_refused or signs.recovery is RecoveryAction.NONE:
        return reset_by_word(health, now)
    return health


def reset_by_word(health: Health, now: dt.datetime) -> Health:
    """End the need for a reset, as when an operator reports one. The cool-down begins."""
    if not health.needs_reset or health.needs_reboot:
        return health
    if health.condition is Condition.LOST:  # a lost GPU that answers again has been reset
        return replace(health, needs_reset=False)

    return replace(
        health,
        quiet_since=now,
        needs_reset=False,
        passed_probes=0,
        action=Action.WAIT,
        text=_sentence(_happened(health), RELIEVED, health.runbook),
    )


# An operator's work on a GPU.

RUNBOOK: Final = "H-RELEASED"


def released(health: Health, now: dt.datetime) -> Health:
    """The health of a released GPU: not served. The need for a reset or reboot is kept."""
    if health.cause == Cause.RELEASED:
        return health

    return replace(
        health,
        condition=Condition.UNMONITORED,
        since=now,
        quiet_since=None,
        cause=Cause.RELEASED,
        text=f"an operator released it; `hami-agent recheck` takes it back [{RUNBOOK}]",
        serving=False,
        passed_probes=0,
        action=Action.NONE,
        runbook=RUNBOOK,
    )


def taken_back(health: Health, now: dt.datetime) -> Health:
    """The health of a GPU that is taken back after a release.

    One that was bad or lost starts a new cool-down, or still needs its reset. Any other is served
    as soon as it answers, and not before: the work may have broken it.
    """
    if health.cause != Cause.RELEASED:
        return health

    if not health.bouts or health.recovered_at is not None:  # it was neither bad nor lost
        return replace(
            health,
            since=now,
            cause=Cause.DRIVER,
            text=f"it is taken back; it is served when it answers [{RUNBOOK}]",
            xid=None,
        )

    back = verdict(
        Condition.BAD,
        now,
        Cause.XID if health.xid is not None else Cause.PROBE,
        _incident(health, RUNBOOK),
        "it was unhealthy before it was released",
        xid=health.xid,
        needs=_need(health),
    )
    return replace(back, bouts=health.bouts)


# Over a restart of the agent, a boot, and a step of the clock.


def stepped(health: Health, before: dt.datetime | None, now: dt.datetime | None) -> Health:
    """Shift the times in `health` by the step of the clock, so that the cool-down keeps its length.

    `before` and `now` are the time of one boot before and after the step; None: not known.
    """
    if before is None or now is None or abs(now - before) < STEP:
        return health

    return _with_times(health, lambda at: at + (now - before))


def _with_times(health: Health, change: Callable[[dt.datetime], dt.datetime]) -> Health:
    return replace(
        health,
        since=change(health.since),
        quiet_since=health.quiet_since and change(health.quiet_since),
        recovered_at=health.recovered_at and change(health.recovered_at),
    )


def remembered(
    health: Health, now: dt.datetime, settings: HealthSettings = DEFAULTS, *, boot_changed: bool
) -> Health:
    """The health with which a GPU starts, from its health in the checkpoint.

    - After a boot (`boot_changed`), which resets every GPU: a GPU with a hardware fault is watched
      for one cool-down, any other is ok.
    - A GPU whose XID the operator has since declared harmless is ok.
    - The time for which a silent GPU is served begins again: this process has not probed it yet.
    - No time is in the future.
    """
    is_harmless = (
        health.cause == Cause.XID
        and health.xid is not None
        and xid_class(health.xid, settings) is XidClass.APPLICATION
    )
    is_fine = health.condition in {Condition.OK, Condition.UNMONITORED}
    if is_harmless or (boot_changed and (is_fine or health.cause not in HARDWARE)):
        return Health(Condition.OK, since=now)

    # A boot resets every GPU, and a container of the agent that starts again resets none.
    if not boot_changed:
        known = _with_times(health, lambda at: min(at, now))
        since = now if health.silent and health.serving else known.since
        return replace(known, since=since, passed_probes=0)

    reason = BEFORE + _happened(health).removeprefix(BEFORE)
    return verdict(Condition.WATCH, now, health.cause, health.runbook, reason, xid=health.xid)


# Attribution: if all GPUs fail with the same text, the fault is the driver's.

MANY: Final = 2
"""The fewest GPUs for which equal failures are the driver's."""

OF_ALL: Final = "the driver reports the same for all GPUs: "

MAY_PASS: Final = frozenset({Trouble.LOST, Trouble.FAILED})
"""Troubles that the driver also reports for a GPU when the driver itself has a fault."""

Ill = Callable[[GpuUuid], bool]
"""Whether a GPU is known to be bad or lost. Such a GPU can fail for a reason of its own."""


def has_failed(probe: Probe) -> bool:
    """True if the driver answered the probe with an error, which may be the driver's own."""
    return probe.outcome in {ProbeOutcome.FAILED, ProbeOutcome.LOST}


def common_failure(probes: Iterable[Probe], ill: Ill) -> str | None:
    """The text with which all GPUs fail that were healthy, at least one; None: they do not."""
    texts = {probe.text if has_failed(probe) else None for probe in probes if not ill(probe.uuid)}
    return texts.pop() if len(texts) == 1 else None


def blame_driver(probes: Collection[Probe], ill: Ill) -> tuple[Probe, ...]:
    """The same probes. If all healthy GPUs fail alike, their probes become silent instead."""
    failure = common_failure(probes, ill)
    if failure is None or sum(not ill(probe.uuid) for probe in probes) < MANY:
        return tuple(probes)

    text = OF_ALL + (cap(failure) or "an error")
    return tuple(
        Probe(probe.uuid, ProbeOutcome.SILENT, text) if probe.text == failure else probe
        for probe in probes
    )


def same_fault(scan: Scan, ill: Ill) -> GpuFault | None:
    """The common fault if the scan describes no GPU and all healthy GPUs fail alike, else None."""
    faults = [
        fault
        for fault in scan.faults
        if fault.trouble is not Trouble.RELEASED and not ill(GpuUuid(fault.gpu))
    ]
    same = {(fault.text, fault.trouble) for fault in faults}
    is_common = not scan.gpus and len(same) == 1 and faults[0].trouble in MAY_PASS
    return faults[0] if is_common else None
