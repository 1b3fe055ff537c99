"""What a driver event or a probe means for a GPU: the XID table and judge().

Conclusions only rise by reports and fall by rest: a quiet time and passed probes make a watched or
bad GPU ok again; one that needs a reset stays bad until it was lost and came back, or the node
booted. A GPU that keeps relapsing is given the same quiet time each time.
"""

import dataclasses
import datetime as dt
import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from agent.core.condition import Condition, Health
from agent.core.errors import cap
from agent.core.events import DriverEvent, EventKind, Probe, ProbeOutcome

FELL_OFF_THE_BUS: Final = 79


class XidClass(enum.StrEnum):
    """What an XID says about the GPU, not about the program that ran on it."""

    APPLICATION = "application"
    """A program's fault, or the echo of one: nothing about the GPU."""
    CONTAINED = "contained"
    """An error that the hardware dealt with: watched."""
    FATAL = "fatal"
    """Bad; a quiet time and passed probes show that it is over."""
    NEEDS_RESET = "needs-reset"
    """Bad until the GPU was reset or the node booted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Xid:
    """One row of the table; `name` completes the sentence "XID 79: …"."""

    number: int
    name: str
    kind: XidClass


# Numbers and meanings: NVIDIA's XID catalog. Which are the application's: the ones that NVIDIA's
# k8s-device-plugin skips (internal/rm/health.go) and HAMi after it. What NVIDIA's plugin and HAMi
# treat alike as unhealthy for ever is divided here by the catalog's immediate action.
XIDS: Final[Mapping[int, Xid]] = MappingProxyType(
    {
        row.number: row
        for row in (
            Xid(13, "graphics engine exception", XidClass.APPLICATION),
            Xid(31, "GPU memory page fault", XidClass.APPLICATION),
            Xid(43, "GPU stopped processing", XidClass.APPLICATION),
            Xid(45, "preemptive cleanup after an earlier error", XidClass.APPLICATION),
            Xid(68, "video decoder exception", XidClass.APPLICATION),
            Xid(109, "context switch timeout", XidClass.APPLICATION),
            Xid(63, "row remapping or page retirement was recorded", XidClass.CONTAINED),
            Xid(92, "high rate of single-bit ECC errors", XidClass.CONTAINED),
            Xid(94, "contained memory error", XidClass.CONTAINED),
            Xid(32, "corrupted push buffer stream", XidClass.FATAL),
            Xid(38, "driver firmware error", XidClass.FATAL),
            Xid(69, "graphics engine class error", XidClass.FATAL),
            Xid(48, "double-bit ECC error", XidClass.NEEDS_RESET),
            Xid(62, "internal micro-controller halted", XidClass.NEEDS_RESET),
            Xid(64, "row remapping or page retirement failed", XidClass.NEEDS_RESET),
            Xid(74, "NVLink error", XidClass.NEEDS_RESET),
            Xid(FELL_OFF_THE_BUS, "the GPU has fallen off the bus", XidClass.NEEDS_RESET),
            Xid(95, "uncontained memory error", XidClass.NEEDS_RESET),
            Xid(110, "security fault", XidClass.NEEDS_RESET),
            Xid(119, "GSP did not answer in time", XidClass.NEEDS_RESET),
            Xid(120, "GSP error", XidClass.NEEDS_RESET),
            Xid(136, "link training failed", XidClass.NEEDS_RESET),
            Xid(140, "unrecovered ECC error", XidClass.NEEDS_RESET),
            Xid(143, "GPU initialisation failed", XidClass.NEEDS_RESET),
        )
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class HealthSettings:
    """How GPUs are judged. Durations are seconds."""

    driver_hang: float = 60.0
    """A GPU that does not answer is served for so long."""
    quiet: float = 600.0
    """Time without a bad report before a watched or bad GPU can be ok again."""
    passes: int = 3
    """Probes that must pass since the last bad report, also."""
    probe_interval: float = 10.0
    probe_deadline: float = 2.0
    coalesce: float = 0.01
    """After a verdict, what comes within this time is judged in one go."""
    xids: Mapping[int, XidClass] = dataclasses.field(default_factory=dict)
    """Classes that differ from the table's."""


def xid_class(number: int, settings: HealthSettings | None = None) -> XidClass:
    """The class of an XID; one that the table does not know is fatal, as for NVIDIA's plugin."""
    if settings is not None and number in settings.xids:
        return settings.xids[number]
    return XIDS[number].kind if number in XIDS else XidClass.FATAL


def judge(
    health: Health, report: DriverEvent | Probe, now: dt.datetime, settings: HealthSettings
) -> Health:
    """The health of one GPU after `report`, which concerns it. The same object: nothing new.

    `now` must not go backwards between calls.
    """
    if isinstance(report, Probe):
        return _probed(health, report, now, settings)
    if report.kind is EventKind.XID:
        return _struck(health, report, now, settings)
    if report.kind is EventKind.ECC_DOUBLE:
        verdict = _bad(now, "ecc", "uncorrectable memory error; reset the GPU [H-ECC]")
        return _worse(health, dataclasses.replace(verdict, needs_reset=True))
    return health  # corrected errors and changes of the layout


def aged(health: Health, now: dt.datetime, settings: HealthSettings) -> Health:
    """The health after time alone: a GPU that answers nothing is served only for `driver_hang`."""
    silent = health.condition is Condition.UNMONITORED
    if silent and health.serving and _seconds(health, now) >= settings.driver_hang:
        return dataclasses.replace(health, serving=False)
    return health


def remembered(health: Health, now: dt.datetime, *, boot_changed: bool) -> Health:
    """What a remembered health is worth now. `boot_changed`: the node has booted since.

    A boot resets every GPU. What only needed that is over; a fault of the hardware itself is
    watched for a quiet time.
    """
    since = min(health.since, now)
    if not boot_changed:
        return dataclasses.replace(health, since=since, passed_probes=0)
    hardware = health.cause in {"ecc", "lost", "probe"}
    if health.condition in {Condition.OK, Condition.UNMONITORED} or not hardware:
        return Health(Condition.OK, since=now)
    return Health(Condition.WATCH, now, health.cause, f"before the boot: {health.text}", health.xid)


def _struck(
    health: Health, event: DriverEvent, now: dt.datetime, settings: HealthSettings
) -> Health:
    number = event.xid if event.xid is not None else 0
    kind = xid_class(number, settings)
    if kind is XidClass.APPLICATION:
        return health
    name = XIDS[number].name if number in XIDS else "a driver error"
    if event.uuid is None or kind is XidClass.CONTAINED:
        # An XID of an unknown GPU is a suspicion of all of them; the probes that follow decide.
        doubt = "" if event.uuid is not None else " on a GPU that the driver cannot name"
        text = f"XID {number}: {name}{doubt} [H-{number:03d}]"
        return _worse(health, Health(Condition.WATCH, now, "xid", text, number))
    needs_reset = kind is XidClass.NEEDS_RESET
    mend = "; reset it or reboot the node" if needs_reset else ""
    verdict = _bad(now, "xid", f"XID {number}: {name}{mend} [H-{number:03d}]")
    return _worse(health, dataclasses.replace(verdict, xid=number, needs_reset=needs_reset))


def _probed(health: Health, probe: Probe, now: dt.datetime, settings: HealthSettings) -> Health:
    if probe.outcome is ProbeOutcome.PASSED:
        return _passed(health, now, settings)
    if probe.outcome is ProbeOutcome.FAILED:
        return _failed(health, probe, now)
    if probe.outcome is ProbeOutcome.LOST:
        return _lost(health, probe, now)
    return _silent(health, probe, now, settings)


def _passed(health: Health, now: dt.datetime, settings: HealthSettings) -> Health:
    if health.condition is Condition.OK:
        return health
    if health.condition is Condition.UNMONITORED:
        if health.xid is None:
            return Health(Condition.OK, since=now)
        text = f"XID {health.xid} before it fell silent"
        return Health(Condition.WATCH, now, "xid", text, health.xid)
    if health.condition is Condition.LOST:
        text = "was lost and is back; served again when it stays quiet [H-LOST]"
        return dataclasses.replace(_bad(now, "lost", text), xid=health.xid, passed_probes=1)
    return _rested(health, now, settings)


def _rested(health: Health, now: dt.datetime, settings: HealthSettings) -> Health:
    passed = min(health.passed_probes + 1, settings.passes)
    quiet = _seconds(health, now) >= settings.quiet
    if quiet and passed >= settings.passes and not health.needs_reset:
        return Health(Condition.OK, since=now)
    if passed == health.passed_probes:
        return health
    return dataclasses.replace(health, passed_probes=passed)


def _failed(health: Health, probe: Probe, now: dt.datetime) -> Health:
    """The first failure in a row is watched, the next one is bad."""
    words = cap(probe.text) or "an error"
    first = health.condition is Condition.OK or (
        health.condition is Condition.WATCH and health.passed_probes > 0
    )
    if first:
        text = f"a probe failed: {words} [H-PROBE]"
        return Health(Condition.WATCH, now, "probe", text, health.xid)
    if health.condition in {Condition.BAD, Condition.LOST}:
        return _again(health, now)
    return dataclasses.replace(
        _bad(now, "probe", f"probes fail: {words} [H-PROBE]"), xid=health.xid
    )


def _lost(health: Health, probe: Probe, now: dt.datetime) -> Health:
    if health.condition is Condition.LOST:
        return health
    struck = f"after XID {health.xid}" if health.xid is not None else cap(probe.text)
    text = f"lost: the driver reaches it no longer ({struck or 'no reason given'}) [H-LOST]"
    return Health(
        Condition.LOST,
        now,
        "lost",
        text,
        health.xid,
        needs_reset=health.needs_reset,
        serving=False,
    )


def _silent(health: Health, probe: Probe, now: dt.datetime, settings: HealthSettings) -> Health:
    if health.condition is Condition.UNMONITORED:
        return aged(health, now, settings)
    if health.condition in {Condition.BAD, Condition.LOST}:
        return dataclasses.replace(health, passed_probes=0)
    text = f"does not answer: {cap(probe.text) or 'nothing comes'} [H-SILENT]"
    return Health(Condition.UNMONITORED, now, "driver", text, health.xid)


def _worse(health: Health, verdict: Health) -> Health:
    """`verdict` if it is graver than what is known, else what is known with its rest begun anew.

    The first cause of a grave state stays: what follows in a storm is mostly its echo. A silent
    GPU stays silent, so that reports do not stretch the time for which it is served.
    """
    if _gravity(verdict) > _gravity(health):
        return verdict
    known = health if health.xid is not None else dataclasses.replace(health, xid=verdict.xid)
    return known if health.condition is Condition.UNMONITORED else _again(known, verdict.since)


def _again(health: Health, now: dt.datetime) -> Health:
    """The same state, its quiet time begun anew; within one second it counts as one report."""
    if health.condition is Condition.LOST:
        return health
    if _seconds(health, now) < 1.0 and health.passed_probes == 0:
        return health
    return dataclasses.replace(health, since=now, passed_probes=0)


def _gravity(health: Health) -> int:
    order = (Condition.OK, Condition.WATCH, Condition.UNMONITORED, Condition.BAD, Condition.LOST)
    return 2 * order.index(health.condition) + health.needs_reset


def _bad(now: dt.datetime, cause: str, text: str) -> Health:
    return Health(Condition.BAD, now, cause, text, serving=False)


def _seconds(health: Health, now: dt.datetime) -> float:
    return (now - health.since).total_seconds()
