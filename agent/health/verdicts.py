"""Verdicts of many GPUs: whose an XID is, releases, and GPUs without a name."""

import datetime as dt
import enum
from collections.abc import Callable, Collection, Iterable
from typing import Final

import msgspec

from agent.errors import cap
from agent.health.xids import FELL_OFF_THE_BUS, XidClass, xid_name
from agent.model import (
    NO_SIGNS,
    Action,
    Cause,
    Condition,
    DriverEvent,
    EventKind,
    FabricState,
    Gpu,
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

# Finds the GPU behind a fault for which the driver gives only an index and no UUID.

NAMELESS: Final = "index "
"""The prefix of GpuFault.gpu if only the index is known."""


def named(scan: Scan, missing: Collection[GpuUuid]) -> Scan:
    """`scan` with UUIDs for its nameless faults.

    `missing` are GPUs that were known before and that `scan` does not describe. If one GPU is
    missing and one fault is nameless, they are the same GPU. Otherwise each missing GPU may be
    behind any of the faults.
    """
    nameless = [fault for fault in scan.faults if fault.gpu.startswith(NAMELESS)]
    if not nameless or not missing:
        return scan
    if len(nameless) == len(missing) == 1:
        (fault,), (uuid,) = nameless, missing
        index = int(fault.gpu.removeprefix(NAMELESS))
        known = msgspec.structs.replace(fault, gpu=uuid, index=index)
        faults = tuple(known if each is fault else each for each in scan.faults)
    else:
        text = "; ".join(f"it may be {fault.gpu}: {fault.text}" for fault in nameless)
        trouble = doubtful(nameless)
        faults = (*scan.faults, *(GpuFault(uuid, text, trouble) for uuid in sorted(missing)))
    return msgspec.structs.replace(scan, faults=faults)


def doubtful(nameless: Iterable[GpuFault]) -> Trouble:
    """The trouble of a GPU that may be behind any of these faults. It is never LOST."""
    is_silent = all(fault.trouble is Trouble.SILENT for fault in nameless)
    return Trouble.SILENT if is_silent else Trouble.FAILED


# Attributes a fault that the driver does not attribute: to the driver itself, or to one GPU.
#
# - If all GPUs fail with the same text, the fault is the driver's.
# - If the driver reports a memory error without a GPU, all GPUs are watched. The error belongs to
#   the GPU whose count of uncorrected errors rose at about that time.

MANY: Final = 2
"""The fewest GPUs for which equal failures are the driver's."""

OF_ALL: Final = "the driver reports the same for all GPUs: "

MAY_PASS: Final = frozenset({Trouble.LOST, Trouble.FAILED})
"""Troubles that the driver also reports for a GPU when the driver itself has a fault."""

Ill = Callable[[GpuUuid], bool]
"""Whether a GPU is known to be bad or lost. Such a GPU can fail for a reason of its own."""


def has_failed(probe: Probe) -> bool:
    """True if the driver answered the probe with an error and without signs of the GPU."""
    return probe.outcome in {ProbeOutcome.FAILED, ProbeOutcome.LOST} and probe.signs == NO_SIGNS


def fail_alike(probes: Iterable[Probe], ill: Ill) -> bool:
    """Whether all GPUs that were healthy, at least one, fail with the same text."""
    texts = {probe.text if has_failed(probe) else None for probe in probes if not ill(probe.uuid)}
    return len(texts) == 1 and None not in texts


def of_the_driver(probes: Iterable[Probe], ill: Ill) -> tuple[Probe, ...]:
    """The same probes. If all healthy GPUs fail alike, their probes become silent instead."""
    probes = tuple(probes)
    well = [probe for probe in probes if not ill(probe.uuid)]
    if len(well) < MANY or not fail_alike(well, ill):
        return probes
    (failure,) = {probe.text for probe in well}
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
        if fault.trouble not in {Trouble.RELEASED, Trouble.UNPLACED} and not ill(GpuUuid(fault.gpu))
    ]
    same = {msgspec.structs.replace(fault, gpu="", index=0) for fault in faults}
    if scan.gpus or len(same) != 1 or faults[0].trouble not in MAY_PASS:
        return None
    return faults[0]


class ErrorCount(msgspec.Struct, frozen=True):
    """The uncorrected errors of one GPU. `rose_at`: when they rose, if no event was made of it."""

    count: int | None = None
    rose_at: dt.datetime | None = None


NOT_COUNTED: Final = ErrorCount()


def compared(
    known: ErrorCount, probe: Probe, health: Health, now: dt.datetime, near: float
) -> tuple[ErrorCount, DriverEvent | None]:
    """The error count after `probe`, and a memory error event if it belongs to this GPU.

    The event is None if nothing attributes the error to this GPU. `health` is the health before
    `probe`. The count must have risen at most `near` seconds before or after the GPU last came
    under suspicion. A first count does not count as a rise.
    """
    count = probe.signs.ecc_uncorrected
    if count is None:
        return known, None
    has_risen = known.count is not None and count > known.count
    rose_at = now if has_risen else known.rose_at
    suspected = health.condition is Condition.WATCH and health.cause == Cause.ECC
    is_near = rose_at is not None and abs((rose_at - health.quiet_from).total_seconds()) <= near
    if not suspected or not is_near:
        return ErrorCount(count, rose_at), None
    return ErrorCount(count), DriverEvent(EventKind.ECC_DOUBLE, probe.uuid)


# Single verdicts about a GPU, their severity, and how a new verdict combines with the old one.

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
    """The end of a health text: what to do, or what happens next.

    `past` removes these ends. The rest of a text may contain the driver's words.
    """

    NOTHING = ""
    RESET = "reset it or reboot the node"
    RESET_NOW = "reset the GPU"
    RESET_FREE = "reset it when it is free"
    RESET_AGAIN = "it has reported an error since, so it needs another reset"
    REBOOT = "reboot the node"
    BOOT = "it needs a reboot of the node"
    REPLACE = "replace the GPU"
    REST = "it is served again after the cool-down"
    RELIEVED = "the driver says that no reset is needed"
    WITHDRAWN = "now it says that none is needed"
    FABRIC = "check that nvidia-fabricmanager runs"
    SAID = "an operator reported that it was reset"


def bad(
    now: dt.datetime, cause: Cause, reason: str, runbook: str, then: NextStep = NextStep.NOTHING
) -> Health:
    """The verdict bad: not served until the cool-down has passed."""
    return Health(
        Condition.BAD,
        now,
        cause,
        _sentence(reason, then, runbook),
        serving=False,
        action=Action.WAIT,
        runbook=runbook,
    )


def needing(verdict: Health, *, reboot: bool) -> Health:
    """The same verdict for a GPU that also needs a reset, or a reboot of the node."""
    action = Action.REBOOT if reboot else Action.RESET
    return msgspec.structs.replace(verdict, needs_reset=True, needs_reboot=reboot, action=action)


def watched(
    now: dt.datetime, cause: str, reason: str, runbook: str, then: NextStep = NextStep.NOTHING
) -> Health:
    """The verdict watch: served, with a reason to look at the GPU."""
    text = _sentence(reason, then, runbook)
    return Health(Condition.WATCH, now, cause, text, action=Action.WAIT, runbook=runbook)


def silenced(health: Health, now: dt.datetime, cause: Cause, reason: str, runbook: str) -> Health:
    """The verdict unmonitored: it does not answer, or its events are missing. Keeps the XID."""
    return Health(
        Condition.UNMONITORED,
        now,
        cause,
        _sentence(reason, NextStep.NOTHING, runbook),
        health.xid,
        action=Action.INSPECT,
        runbook=runbook,
    )


def relieved(health: Health, signs: GpuSigns, now: dt.datetime) -> Health:
    """End the need for a reset if the driver reports that no action is needed.

    The need for a reboot stays.
    """
    if signs.recovery is not RecoveryAction.NONE or not health.needs_reset or health.needs_reboot:
        return health
    happened = _happened(health)
    if health.cause != Cause.ADVICE:
        return _freed(health, now, happened, NextStep.RELIEVED)
    return _freed(
        health, now, happened.replace("driver says", "driver said", 1), NextStep.WITHDRAWN
    )


def answered_again(health: Health, signs: GpuSigns, now: dt.datetime) -> Health:
    """End the need for a reset of a refused GPU that answers: the answer proves a reset.

    The need stays if the driver reports that the GPU needs another reset.
    """
    is_owed = health.cause == Cause.REFUSED and health.needs_reset
    if not is_owed or signs.recovery in REBOOTS | RESETS:
        return health
    return _freed(health, now, "it was reset: the driver answers for it again", NextStep.REST)


def reset_by_word(health: Health, now: dt.datetime) -> Health:
    """End the need for a reset because an operator reports one. The cool-down begins.

    Drivers before 570 do not report that a reset is no longer needed. The need for a reboot stays.
    The next probe can show that the GPU was not reset.
    """
    if not health.needs_reset or health.needs_reboot:
        return health
    if health.condition is Condition.LOST:  # a lost GPU that answers again has been reset
        return msgspec.structs.replace(health, needs_reset=False)
    return _freed(health, now, _happened(health), NextStep.SAID)


def refused(health: Health, now: dt.datetime) -> Health:
    """The verdict when the driver refuses calls until the GPU is reset.

    It replaces an earlier need for a reset, because a later answer proves the reset. It does not
    replace the need for a reboot.
    """
    if health.needs_reboot or (health.cause == Cause.REFUSED and health.needs_reset):
        return again(health, now)
    after = "" if health.xid is None else f" (after XID {health.xid})"
    text = f"the driver refuses calls for it until it is reset{after}"
    verdict = bad(now, Cause.REFUSED, text, incident(health, "H-RESET"), NextStep.RESET)
    return needing(msgspec.structs.replace(verdict, xid=health.xid), reboot=False)


def signed(health: Health, signs: GpuSigns, now: dt.datetime) -> Health:
    """The health after the signs of a probe. A verdict of signs holds while the signs last.

    A fault in the signs outweighs that the GPU was lost or refused and answers again.
    """
    verdict = _sign(signs, now)
    if verdict is None:
        return health
    is_back = health.condition is Condition.BAD and health.cause in {Cause.LOST, Cause.REFUSED}
    if gravity(verdict) > gravity(health) - is_back:
        return msgspec.structs.replace(verdict, xid=health.xid)
    if health.passed_probes and health.cause == verdict.cause:
        return msgspec.structs.replace(health, passed_probes=0)
    return health


def worse(health: Health, verdict: Health) -> Health:
    """`verdict` if it is more severe than `health`, else `health` with its cool-down restarted.

    The first cause of a severe condition stays, because later reports mostly follow from it. A
    silent GPU stays silent, so that reports do not extend the time for which it is served. A
    refused GPU may have been reset meanwhile, so a report that needs a reset replaces its verdict.
    """
    is_new_need = health.cause == Cause.REFUSED and verdict.needs_reset
    if gravity(verdict) > gravity(health) or is_new_need:
        return verdict
    known = health if health.xid is not None else msgspec.structs.replace(health, xid=verdict.xid)
    if health.condition is Condition.LOST and verdict.needs_reset:
        return struck_while_lost(with_action(known, verdict.xid), verdict)
    return known if health.condition is Condition.UNMONITORED else again(known, verdict.since)


def told_of(xid: int) -> str:
    """The number and name of an XID."""
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
    # A GPU off the bus cannot be reset. If it is back without a boot, that was a reset.
    then = NextStep.REBOOT if reboot or xid == FELL_OFF_THE_BUS else NextStep.RESET
    verdict = needing(bad(now, Cause.XID, told, runbook, then), reboot=reboot)
    return with_action(verdict, xid)


def with_action(verdict: Health, xid: int | None) -> Health:
    """The verdict with the strongest action: XID 79 asks for more than a reset."""
    if xid != FELL_OFF_THE_BUS:
        return verdict
    return msgspec.structs.replace(verdict, action=Action.REBOOT)


def incident(health: Health, runbook: str) -> str:
    """The id of what goes on: that of the XID with which it began, else `runbook`."""
    return runbook if health.xid is None else f"H-{health.xid:03d}"


def suspected(health: Health, doubt: Health) -> Health:
    """The health after a report that names no GPU. All GPUs are watched, and the probes decide.

    The cool-down of a bad or lost GPU goes on: otherwise reports about others would keep restarting
    it.
    """
    return health if health.ill else worse(health, doubt)


def struck_while_lost(health: Health, verdict: Health) -> Health:
    """The health of a lost GPU after a report that needs a reset.

    Either the report is a late echo, or the GPU was back already and needs another reset. If the
    next probe still finds the GPU lost, it was an echo.
    """
    reboot = health.needs_reboot or verdict.needs_reboot
    if health.needs_reset and health.needs_reboot == reboot:
        return health
    return msgspec.structs.replace(health, needs_reset=True, needs_reboot=reboot)


def again(health: Health, now: dt.datetime) -> Health:
    """The same health with its cool-down restarted. Reports within 1 s count as one.

    The cool-down of a GPU that needs a reset begins when that need ends.
    """
    if health.condition is Condition.LOST:
        return health
    is_counted = health.needs_reset or seconds(health, now) < 1.0
    if is_counted and health.passed_probes == 0:
        return health
    quiet_since = health.quiet_since if health.needs_reset else now
    return msgspec.structs.replace(health, quiet_since=quiet_since, passed_probes=0)


def gravity(health: Health) -> int:
    """The severity of a health: by condition, then by the need for a reset or reboot."""
    return 3 * _ORDER.index(health.condition) + health.needs_reset + health.needs_reboot


def seconds(health: Health, now: dt.datetime) -> float:
    """Seconds since the cool-down began."""
    return (now - health.quiet_from).total_seconds()


def past(health: Health) -> str:
    """The text of a health without its end (NextStep)."""
    return _sentence(_happened(health), NextStep.NOTHING, health.runbook)


def _happened(health: Health) -> str:
    text = health.text.removesuffix(f" [{health.runbook}]")
    ends = (f"; {then}" for then in NextStep if then is not NextStep.NOTHING)
    return text.removesuffix(next(filter(text.endswith, ends), ""))


def _freed(health: Health, now: dt.datetime, reason: str, then: NextStep) -> Health:
    """The health after the need for a reset has ended: its cool-down begins now."""
    return msgspec.structs.replace(
        health,
        quiet_since=now,
        needs_reset=False,
        passed_probes=0,
        action=Action.WAIT,
        text=_sentence(reason, then, health.runbook),
    )


def _sentence(reason: str, then: NextStep, runbook: str) -> str:
    """Join what happened, the next step and the runbook id."""
    text = f"{reason}; {then}" if then else reason
    return f"{text} [{runbook}]" if runbook else text


def _sign(signs: GpuSigns, now: dt.datetime) -> Health | None:
    if signs.recovery in REBOOTS | RESETS:
        reboot = signs.recovery in REBOOTS
        need = "a reboot of the node" if reboot else "a reset"
        text = f"the driver says that it needs {need} ({signs.recovery})"
        return needing(bad(now, Cause.ADVICE, text, "H-ADVICE"), reboot=reboot)
    if not has_joined(signs):
        text = f"it has not joined the fabric of its NVSwitches ({signs.fabric}), so no program "
        text += "runs on it"
        verdict = bad(now, Cause.FABRIC, text, "H-FABRIC", NextStep.FABRIC)
        return msgspec.structs.replace(verdict, action=Action.INSPECT)
    if signs.rows_failed:
        text = "memory rows could not be remapped: no spare rows are left"
        verdict = bad(now, Cause.MEMORY, text, "H-ROWS", NextStep.REPLACE)
        return msgspec.structs.replace(verdict, action=Action.REPLACE)
    if signs.rows_pending or signs.pages_pending:
        text = "memory rows or pages wait for a reset to be replaced"
        verdict = watched(now, Cause.MEMORY, text, "H-ROWS", NextStep.RESET_FREE)
        return msgspec.structs.replace(verdict, action=Action.RESET)
    return None


def has_joined(signs: GpuSigns) -> bool:
    """Whether the GPU has joined its fabric, or has none, as far as the driver reports."""
    return signs.fabric in {None, FabricState.COMPLETED}


def as_told(health: Health) -> tuple[Condition, bool, bool]:
    """The part of health that is logged. A lost GPU's need for a reset shows when it is back."""
    needs_reset = health.needs_reset and health.condition is not Condition.LOST
    return health.condition, health.serving, needs_reset


# An operator's actions on a GPU: release it for work, take it back, probe it now.

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
