"""The health of a GPU: a report and what was known make what is known.

Reports make a condition worse. A cool-down with passed probes makes a watched or bad GPU ok again.
A GPU that needs a reset stays bad until it was reset. If a GPU becomes bad again soon after it
recovered, its cool-down doubles, up to a bound. The action is the strongest that any report asks
for.
"""

import datetime as dt
import enum
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from agent.errors import cap
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
from agent.setting import HOW, Field, ValueType, WrongValue, duration, text, texts

# The XIDs of NVIDIA's catalog. Source: docs.nvidia.com/deploy/xid-errors (1 to 172, of R590).


class XidClass(enum.StrEnum):
    """What an XID says about the GPU, not about the program that ran on it, as in settings.

    - `APPLICATION`: nothing. It is a fault of a program, the echo of another error, or a notice.
    - `CONTAINED`: the hardware handled the error, or the driver decides about it. It is served.
    - `FATAL`: a quiet period and passed probes show that the error is over.
    - `NEEDS_RESET`: until a reset or a boot, or until the driver wants no reset any more.
    - `NEEDS_REBOOT`: until the node boots.
    """

    APPLICATION = "application"
    CONTAINED = "contained"
    FATAL = "fatal"
    NEEDS_RESET = "needs-reset"
    NEEDS_REBOOT = "needs-reboot"


CONSEQUENCES: Final = {
    XidClass.CONTAINED: (Condition.WATCH, Action.WAIT),
    XidClass.FATAL: (Condition.BAD, Action.WAIT),
    XidClass.NEEDS_RESET: (Condition.BAD, Action.RESET),
    XidClass.NEEDS_REBOOT: (Condition.BAD, Action.REBOOT),
}
"""The condition of the GPU after an XID of the class, and what makes it ok again."""

UNKNOWN: Final = (XidClass.FATAL, "a driver error")
"""What is not in the table: as in NVIDIA's plugin it is fatal."""

# By class: the agent's name of each error, and its XIDs.
_TABLE: Final[Mapping[XidClass, Mapping[str, tuple[int, ...]]]] = {
    # The catalog ignores them or restarts the application. 162 to 165 inform of power
    # smoothing, which does not affect computing.
    XidClass.APPLICATION: {
        "GPU stopped processing": (8, 43),
        "graphics engine exception": (13,),
        "GPU memory page fault": (31,),
        "copy engine error": (39, 40, 41, *range(70, 73), *range(75, 78), 85, *range(126, 136)),
        "preemptive cleanup after an earlier error": (45,),
        "video decoder exception": (68, 83, 84, 88, 89, 96, 97, 98),
        "JPEG decoder error": (82, *range(99, 106)),
        "optical flow engine error": (86, 139),
        "power smoothing has changed": (162, 163, 164, 165),
        "an error of a program, or a notice": (
            *(11, 14, 25, 32, 37, 38, 44, 60, 66, 67, 69, 80, 93, 106, 107, 108, 121, 137, 141),
            *(147, 148, 152, 153, 157, 160, 161),
        ),
    },
    # 63 and 92 are signs of wear. After 94 the GPU needs a reset at a convenient time. Of 144
    # to 149 the subcode decides, but NVML does not report it. Every driver of these GPUs
    # reports a recovery action that includes it, and 154 is its change: the probe reads it.
    XidClass.CONTAINED: {
        "row remapping or page retirement was recorded": (63,),
        "high rate of single-bit ECC errors": (92,),
        "contained memory error": (94,),
        "NVLink 5 error": (144, 145, 146, 149),
        "the driver wants another recovery action": (154,),
    },
    # 79 ends as soon as the GPU is back on the bus, which is a reset; see STRONGER.
    XidClass.NEEDS_RESET: {
        "GPU stopped processing": (46,),
        "double-bit ECC error": (48,),
        "internal micro-controller halted": (62,),
        "row remapping or page retirement failed": (64,),
        "NVLink error": (74,),
        "the GPU has fallen off the bus": (79,),
        "uncontained memory error": (95,),
        "context switch timeout": (109,),
        "security fault": (110,),
        "GSP did not answer in time": (119,),
        "GSP error": (120,),
        "link training failed": (136,),
        "unrecovered ECC error": (140,),
        "GPU initialisation failed": (143,),
        "NVLink 5 error": (150,),
        "NVLink software error": (155,),
        "resource retirement was recorded": (156,),
        "GPU fatal timeout": (158,),
        "security micro-controller halted": (169,),
    },
    XidClass.NEEDS_REBOOT: {"key rotation error": (151,)},
    # The catalog has another action for them, such as to contact the support, or none.
    XidClass.FATAL: {
        "video encoder error": (47, 65, 73, 142),
        "auxiliary power is not connected": (54,),
        "framebuffer error": (57, 58),
        "internal micro-controller error": (59, 61),
        "L2 cache error": (90,),
        "firmware flash error": (122, 123, 124),
        "InfoROM file system error": (125,),
        "error on the coherent link to the CPU": (159,),
        "error of the encrypted NVLink": (166, 170),
        "PCIe fatal timeout": (167,),
        "uncorrectable memory error": (168, 171, 172),
    },
}

STRONGER: Final = {79: Action.REBOOT}
"""What a person should do, where that is more than the class needs: only a restart of the machine
brings a GPU back on the bus."""

_XIDS: Final = {
    number: (kind, name)
    for kind, names in _TABLE.items()
    for name, numbers in names.items()
    for number in numbers
}


def xid_name(number: int) -> str:
    """The name of the XID."""
    return _XIDS.get(number, UNKNOWN)[1]


# Settings for health: the agent's own, and the XID variables of HAMi's and NVIDIA's plugin.

_ALL: Final = frozenset({"all", "xids"})
_EVERY_XID: Final = 0
PLUGINS_SKIP: Final = (13, 31, 43, 45, 68, 109)
"""The XIDs that both plugins ignore by default. Source: k8s-device-plugin internal/rm/health.go."""


@functools.lru_cache(maxsize=8)
def read_switches(disable: str, enable: str) -> Mapping[int, bool]:
    """By XID whether it is ignored, and by 0 whether all are. The second text wins.

    These are DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS of NVIDIA's plugin (from 0.18) and
    HAMi's (from 2.8). Items other than a number, `all` or `xids` are ignored. Source:
    getDisabledHealthCheckXids of both plugins.
    """
    if not disable.strip() and not enable.strip():
        return {}
    skipped = dict.fromkeys((*_items(disable), *PLUGINS_SKIP), True)
    return skipped | dict.fromkeys(_items(enable), False)


def _items(text: str) -> Iterable[int]:
    """The XIDs in the list. `all` or `xids` overrides the others."""
    items = {item.strip() for item in text.lower().split(",")}
    # A number of 20 digits may not fit into the 64 bits of the plugins.
    numbers = (item for item in items if item.isascii() and item.isdigit() and len(item) < 20)
    return [_EVERY_XID] if _ALL & items else map(int, numbers)


_CLASS: Final = f"[1-9][0-9]{{0,4}} *= *({'|'.join(XidClass)})"


def _class_of(item: str) -> tuple[int, XidClass]:
    xid, _, name = item.partition("=")
    if not re.fullmatch(_CLASS, item.strip()) or int(xid) > 65535:
        raise WrongValue(f"expected XID=CLASS with one of {', '.join(XidClass)}")
    return int(xid), XidClass(name.strip())


def _xid_classes(value: object) -> tuple[str, ...]:
    items: tuple[str, ...] = texts(value)
    named = [_class_of(item)[0] for item in items]
    if twice := sorted({xid for xid in named if named.count(xid) > 1}):
        raise WrongValue(f"expected one class for XID {twice[0]}")
    return items


xid_classes: Final = ValueType(
    _xid_classes, {"type": "array", "items": {"type": "string", "pattern": f"^{_CLASS}$"}}
)
"""A list of texts like `94=fatal`; in variables and flags separated by commas."""


class HealthSettings(msgspec.Struct, frozen=True):
    """How GPUs are judged. Durations are seconds."""

    # fmt: off
    driver_hang: Annotated[float, Field("health.driverHang", duration(1, 3600),
        "Time without an answer of the driver after which new pods get none of its GPUs. "
        f"{HOW}")] = 60.0
    quiet: Annotated[float, Field("health.quietPeriod", duration(1, 86400),
        "Cool-down: a GPU is ok after this time without a bad report and 3 passed probes. "
        f"{HOW}")] = 600.0
    passes: int = 3  # how many probes must pass since the last bad report
    probe_interval: Annotated[float, Field("health.probePeriod", duration(0.1, 3600),
        f"Time between probes of a GPU. {HOW}")] = 10.0
    longest_quiet: Annotated[float, Field("health.longestQuietPeriod", duration(1, 604800),
        "Longest cool-down. The cool-down of a GPU doubles each time that the GPU becomes bad "
        f"again soon after it recovered. {HOW}")] = 7200.0
    probe_deadline: float = 2.0
    gather: float = 0.005  # how long a report waits for others of the same failure
    coalesce: float = 0.05  # changes within this time after a list are one list
    xids: Annotated[Mapping[int, XidClass], Field("health.xids", xid_classes,
        "Classes of XIDs that differ from the agent's table, such as 94=fatal: "
        f"{', '.join([*XidClass][:-1])} or {[*XidClass][-1]}.",
        convert=lambda items: dict(map(_class_of, items)))] = msgspec.field(default_factory=dict)
    disabled_xids: Annotated[str, Field("health.disabledXids", text,
        "XIDs to ignore, separated by commas. all or xids: no health checks at all, as in "
        "NVIDIA's plugin. Then a GPU that hangs or fails stays on offer; a lost GPU stays until "
        "the next scan, at most 1 minute.", env=("DP_DISABLE_HEALTHCHECKS",))] = ""
    enabled_xids: Annotated[str, Field("health.enabledXids", text,
        "XIDs to count even if an application causes them or they are disabled; all: every XID.",
        env=("DP_ENABLE_HEALTHCHECKS",))] = ""
    # fmt: on

    @property
    def off(self) -> bool:
        """Whether all health checks are off. With `all`, enabling single XIDs changes nothing."""
        return read_switches(self.disabled_xids, self.enabled_xids).get(_EVERY_XID, False)


DEFAULTS: Final = HealthSettings()


def xid_class(number: int, settings: HealthSettings = DEFAULTS) -> XidClass:
    """The class of an XID."""
    if number in settings.xids:
        return settings.xids[number]

    known, _ = _XIDS.get(number, UNKNOWN)
    switches = read_switches(settings.disabled_xids, settings.enabled_xids)
    every = switches.get(_EVERY_XID)
    is_ignored = every if every is False else switches.get(number, every)
    if is_ignored:
        return XidClass.APPLICATION

    is_counted = is_ignored is False and known is XidClass.APPLICATION
    return XidClass.FATAL if is_counted else known


# What becomes of the health after a report.

Time = dt.datetime

# Seconds: a probe that fails within this time after a counted failure is the same failure.
SAME_HICCUP: Final = 4.0

_REBOOT: Final = ("reboot of the node", Action.REBOOT)
_RESET: Final = ("reset", Action.RESET)
WANTS: Final = {
    RecoveryAction.NODE_REBOOT: _REBOOT,
    RecoveryAction.SYSTEM_REBOOT: _REBOOT,
    RecoveryAction.GPU_RESET: _RESET,
    RecoveryAction.DRAIN_AND_RESET: _RESET,
    RecoveryAction.BUS_RESET: _RESET,
    RecoveryAction.OTHER: _RESET,
}
"""What the GPU needs by the driver's recovery action. All others concern no GPU alone."""

# From the least severe to the most severe.
_RANK: Final = (Condition.OK, Condition.WATCH, Condition.UNMONITORED, Condition.BAD, Condition.LOST)

UNNAMED: Final = " on a GPU that the driver cannot name"
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
    now: Time,
    cause: str,
    runbook: str,
    reason: str,
    *,
    xid: int | None = None,
    needs: Action = Action.NONE,
    action: Action = Action.WAIT,
) -> Health:
    """The health of a GPU after one report. Bad and lost GPUs are not served, all others are.

    `needs`: RESET or REBOOT if it cannot be ok before. `action`: what else a person should do. The
    stronger of the two is told; WAIT: the condition clears by itself.
    """
    action = max(needs, action, key=[*Action].index)
    text = _sentence(reason, _STEPS.get(condition) or _STEPS.get(action, ""), runbook)
    return Health(
        condition,
        now,
        cause,
        text,
        xid,
        needs_reset=needs in {Action.RESET, Action.REBOOT},
        serving=condition not in {Condition.BAD, Condition.LOST},
        action=action,
        runbook=runbook,
        needs_reboot=needs is Action.REBOOT,
    )


def judge(
    health: Health, report: DriverEvent | Probe, now: Time, settings: HealthSettings
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

    if health.silent and fresh.silent:
        # Further silence does not extend the time for which it is served.
        fresh = aged(replace(fresh, since=health.since, serving=health.serving), now, settings)

    # A verdict alone does not carry the count of bouts.
    bouts, recovered_at = health.bouts, health.recovered_at
    if fresh.ill and not health.ill:
        # A GPU that fails every hour would otherwise be served for most of the hour, and take the
        # pods of each time with it.
        longest = max(settings.quiet, settings.longest_quiet)
        is_soon = recovered_at is not None and (now - recovered_at).total_seconds() < longest
        bouts, recovered_at = (bouts + 1 if is_soon else 1), None
    elif health.ill and not fresh.ill:
        recovered_at = now

    fresh = replace(fresh, bouts=bouts, recovered_at=recovered_at)
    return health if fresh == health else fresh


def aged(health: Health, now: Time, settings: HealthSettings) -> Health:
    """The health after time alone: a silent GPU is served only for `driver_hang` seconds."""
    is_over = health.silent and health.serving and seconds(health, now) >= settings.driver_hang
    return replace(health, serving=False) if is_over else health


def switched_off(now: Time) -> Health:
    """The health of every GPU when health checks are switched off."""
    text = "health checks are switched off in the settings"
    return verdict(Condition.UNMONITORED, now, Cause.OFF, "H-OFF", text, action=Action.NONE)


def quiet_time(health: Health, settings: HealthSettings) -> float:
    """The cool-down of this GPU: seconds without a bad report."""
    doublings = min(max(health.bouts, 1) - 1, 32) if health.ill else 0
    return min(settings.quiet * 2.0**doublings, max(settings.quiet, settings.longest_quiet))


def cooled_at(health: Health, settings: HealthSettings) -> Time | None:
    """When its cool-down ends without another bad report. None: its text says what ends it."""
    is_cooling = health.condition in {Condition.WATCH, Condition.BAD} and not health.needs_reset
    # A fault in its signs lasts as long as the signs.
    if not is_cooling or health.cause in {Cause.FABRIC, Cause.MEMORY}:
        return None
    return (health.quiet_since or health.since) + dt.timedelta(seconds=quiet_time(health, settings))


def missing(health: Health, now: Time, settings: HealthSettings) -> tuple[str, ...]:
    """What its cool-down still needs, in words."""
    if (end := cooled_at(health, settings)) is None:
        return ()

    needs = []
    if now < end:
        needs.append(f"{(end - now).total_seconds():.0f} s more without a bad report")
    if (probes := settings.passes - health.passed_probes) > 0:
        needs.append(f"{probes} more passed probe{'s' if probes > 1 else ''}")
    return tuple(needs)


def past(health: Health) -> str:
    """The text of a health without what is to be done."""
    return _sentence(_happened(health), "", health.runbook)


def _happened(health: Health) -> str:
    text = health.text.removesuffix(f" [{health.runbook}]")
    reason, _, step = text.rpartition("; ")
    return reason if step in {*_STEPS.values(), COOLING, RELIEVED} else text


def _sentence(reason: str, step: str, runbook: str) -> str:
    text = f"{reason}; {step}" if step else reason
    return f"{text} [{runbook}]" if runbook else text


def gravity(health: Health) -> int:
    """The severity of a health: by condition, then by the need for a reset or reboot."""
    return 3 * _RANK.index(health.condition) + health.needs_reset + health.needs_reboot


def seconds(health: Health, now: Time) -> float:
    """Seconds since the cool-down began."""
    return (now - (health.quiet_since or health.since)).total_seconds()


# Events of the driver.


def _on_event(health: Health, event: DriverEvent, now: Time, settings: HealthSettings) -> Health:
    xid = event.xid or 0
    kind = xid_class(xid, settings) if event.kind is EventKind.XID else XidClass.NEEDS_RESET

    # CHANGED is about no GPU's health. An XID of an application is the fault of a program in a
    # container, the echo of another error or a notice, by NVIDIA's catalog (IGNORE, RESTART_APP).
    # The next container may well run here.
    if event.kind is EventKind.CHANGED or kind is XidClass.APPLICATION:
        return health

    if event.kind is EventKind.ECC_DOUBLE:
        text = "uncorrectable memory error"
        found = verdict(Condition.BAD, now, Cause.ECC, "H-ECC", text, needs=Action.RESET)
    else:
        condition, needs = CONSEQUENCES[kind]
        # A class that the settings name says by itself what to do.
        action = STRONGER.get(xid, Action.WAIT) if kind is xid_class(xid) else Action.WAIT
        told = partial(verdict, condition, now, Cause.XID, f"H-{xid:03d}", xid=xid)
        found = told(f"XID {xid}: {xid_name(xid)}", needs=needs, action=action)

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

    The first cause stays: later reports mostly follow from it. A silent GPU stays silent, so that
    reports do not extend the time for which it is served. A refused GPU may have been reset
    meanwhile, so a report that needs a reset replaces its verdict.
    """
    is_new_need = health.cause == Cause.REFUSED and fresh.needs_reset
    if gravity(fresh) > gravity(health) or is_new_need:
        return fresh

    known = health if health.xid is not None else replace(health, xid=fresh.xid)
    if health.condition is Condition.LOST and fresh.needs_reset:
        # Either the report is a late echo, or the GPU was back already and needs another reset. If
        # the next probe still finds the GPU lost, it was an echo.
        is_boot_due = health.needs_reboot or fresh.needs_reboot
        return replace(known, needs_reset=True, needs_reboot=is_boot_due)

    return known if health.condition is Condition.UNMONITORED else again(known, fresh.since)


def again(health: Health, now: Time) -> Health:
    """The same health with its cool-down restarted. Reports within 1 s count as one.

    The cool-down of a GPU that needs a reset begins when that need ends.
    """
    is_counted = health.needs_reset or seconds(health, now) < 1.0
    if health.condition is Condition.LOST or (is_counted and health.passed_probes == 0):
        return health
    since = health.quiet_since if health.needs_reset else now
    return replace(health, quiet_since=since, passed_probes=0)


# Probes.


def _on_probe(health: Health, probe: Probe, now: Time, settings: HealthSettings) -> Health:
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
            return signed(_on_failed(health, probe, now), probe.signs, now)
        case ProbeOutcome.REFUSED:
            return _on_refused(health, now)
        case ProbeOutcome.LOST:
            return _on_lost(health, probe, now)
        case _:  # it is silent
            if health.ill:
                # Silence is no recovery: the count of passed probes begins again.
                return replace(health, passed_probes=0)
            text = f"it does not answer ({cap(probe.text) or 'no reply'})"
            if health.runbook == RUNBOOK:
                return health  # it is taken back, and served when it answers
            return told(Cause.DRIVER, "H-SILENT", text, xid=health.xid)


def _on_passed(health: Health, signs: GpuSigns, now: Time, settings: HealthSettings) -> Health:
    is_joining = health.cause == Cause.FABRIC  # it has no fault, so it needs no cool-down
    if health.condition is Condition.OK or (is_joining and not has_joined(signs)):
        return health

    if is_joining or health.condition is Condition.UNMONITORED:
        if health.xid is None:
            return Health(Condition.OK, since=now)
        # What was reported before it fell silent, or left its fabric, still counts.
        said = f"it reported XID {health.xid} before"
        return verdict(Condition.WATCH, now, Cause.XID, f"H-{health.xid:03d}", said, xid=health.xid)

    known = relieved(health, signs, now)
    if known.condition is Condition.LOST:
        return _on_recovered(known, now)

    passed = min(known.passed_probes + 1, settings.passes)
    # Neither plugin takes a GPU back: "there is no way to recover from the Unhealthy state"
    # (server.go of NVIDIA's plugin). One passed probe proves little, since a broken GPU answers
    # between errors.
    has_rested = seconds(known, now) >= quiet_time(known, settings)
    if has_rested and passed >= settings.passes and not known.needs_reset:
        return Health(Condition.OK, since=now)

    return replace(known, passed_probes=passed)


def _on_failed(health: Health, probe: Probe, now: Time) -> Health:
    """A failed probe makes a GPU watched, and another one within its cool-down makes it bad."""
    if health.ill:
        return again(health, now)
    error = cap(probe.text) or "an error"
    # The probes of all services meet the same hiccup of the driver within one round.
    is_echo = seconds(health, now) < SAME_HICCUP
    # A driver that comes back answers for one GPU after the other. A GPU that is taken back is not
    # served yet, and its next failure decides.
    if health.silent and health.runbook != RUNBOOK:
        return replace(health, text=f"probes fail: {error} [H-PROBE]", runbook="H-PROBE")
    if is_echo and (health.silent or health.cause == Cause.PROBE):
        return health

    found = partial(verdict, now=now, cause=Cause.PROBE, runbook="H-PROBE", xid=health.xid)
    if is_failing(health):
        return found(Condition.BAD, reason=f"probes fail: {error}", action=Action.INSPECT)
    return found(Condition.WATCH, reason=f"a probe failed: {error}")


def is_failing(health: Health) -> bool:
    """Whether another failed probe is one too many to serve the GPU."""
    return health.cause == Cause.PROBE or health.runbook == RUNBOOK


def _on_refused(health: Health, now: Time) -> Health:
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


def _on_lost(health: Health, probe: Probe, now: Time) -> Health:
    if health.condition is Condition.LOST:
        # A reset that was asked for meanwhile was an echo.
        return replace(health, needs_reset=health.needs_reset and health.needs_reboot)
    # Being back implies a reset, but nobody can reset what the driver does not reach: "GPU is lost.
    # Reboot the system to recover this GPU" (nvidia-smi).
    needs = Action.REBOOT if health.needs_reboot else Action.NONE
    told = partial(verdict, xid=health.xid, needs=needs, action=Action.REBOOT)
    # The id of what needed a reset stays, so that its return is told as that reset.
    runbook = health.runbook if health.needs_reset else _incident(health, "H-LOST")
    reason = f"after XID {health.xid}" if health.xid is not None else cap(probe.text)
    text = f"the driver no longer reaches it ({reason or 'no reason given'})"
    return told(Condition.LOST, now, Cause.LOST, runbook, text)


def _on_recovered(health: Health, now: Time) -> Health:
    """The GPU was lost and answers. That implies a reset, unless it reported an error since."""
    said = "it was lost and is back"
    needs = Action.RESET if health.needs_reset else Action.NONE
    needs = Action.REBOOT if health.needs_reboot else needs
    if needs is Action.NONE:
        # Its last text asked for a reboot: the new one has to say that nothing is to be done.
        said = f"{said}; {COOLING}"
    told = partial(verdict, Condition.BAD, now, Cause.LOST, health.runbook, said)
    return replace(told(xid=health.xid, needs=needs), passed_probes=1)


def _incident(health: Health, runbook: str) -> str:
    """The id of what goes on: that of the XID with which it began, else `runbook`."""
    return runbook if health.xid is None else f"H-{health.xid:03d}"


# What a GPU tells of itself.


def signed(health: Health, signs: GpuSigns, now: Time) -> Health:
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


def _of_signs(signs: GpuSigns, now: Time, xid: int | None) -> Health | None:
    """The verdict about the most severe fault that a GPU tells of itself, or None."""
    ill = partial(verdict, Condition.BAD, now, xid=xid)
    # It holds until the driver wants none any more: no other sign says more.
    if signs.recovery in WANTS:
        words, needs = WANTS[signs.recovery]
        text = f"the driver asked for a {words} ({signs.recovery})"
        return ill(Cause.ADVICE, "H-ADVICE", text, needs=needs)

    if not has_joined(signs):
        text = f"it has not joined the fabric of its NVSwitches ({signs.fabric})"
        text += "; check that nvidia-fabricmanager runs"
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


def relieved(health: Health, signs: GpuSigns, now: Time) -> Health:
    """End the need for a reset, and begin the cool-down, if the driver shows that it is over."""
    # GPU_REQUIRES_RESET (16) is the driver's answer to each call until nvidia-smi --gpu-reset or a
    # boot, so another answer proves a reset, unless the driver asks for one more.
    was_refused = health.cause == Cause.REFUSED and signs.recovery not in WANTS
    is_over = was_refused or signs.recovery is RecoveryAction.NONE
    if not is_over or not health.needs_reset or health.needs_reboot:
        return health
    if health.condition is Condition.LOST:  # a lost GPU that answers again has been reset
        return replace(health, needs_reset=False)
    text = _sentence(_happened(health), RELIEVED, health.runbook)
    known = replace(health, needs_reset=False, action=Action.WAIT, text=text)
    return replace(known, quiet_since=now, passed_probes=0)


# An operator's work on a GPU.

RUNBOOK: Final = "H-RELEASED"


def released(health: Health, now: Time) -> Health:
    """The health of a released GPU: not served. The need for a reset or reboot is kept."""
    if health.cause == Cause.RELEASED:
        return health

    return replace(
        health,
        condition=Condition.UNMONITORED,
        since=now,
        quiet_since=None,
        cause=Cause.RELEASED,
        text=f"an operator released it; `hami-agent recheck GPU` takes it back [{RUNBOOK}]",
        serving=False,
        passed_probes=0,
        action=Action.NONE,
        runbook=RUNBOOK,
        before=health if health.ill else None,
    )


def taken_back(health: Health, now: Time, settings: HealthSettings) -> Health:
    """The health of a GPU that is taken back after a release.

    One that was bad or lost is so again: a bad one begins its cool-down anew, or still needs its
    reset. Any other is served as soon as it answers, and not before: the work may have broken it.
    """
    if health.cause != Cause.RELEASED:
        return health

    if health.before or (health.bouts and health.recovered_at is None):  # it was bad or lost
        # Version 0.1.0 does not keep how it was.
        text = f"it was unhealthy before it was released [{RUNBOOK}]"
        bad = replace(health, condition=Condition.BAD, cause=Cause.PROBE, text=text)
        return again(remembered(health.before or bad, now, settings, boot_changed=False), now)

    text = f"it is taken back; it is served when it answers [{RUNBOOK}]"
    return replace(health, since=now, cause=Cause.DRIVER, text=text, xid=None)


# Over a restart of the agent and a boot.


def remembered(
    health: Health, now: Time, settings: HealthSettings, *, boot_changed: bool
) -> Health:
    """The health with which a GPU starts, from its health in the checkpoint.

    - After a boot (`boot_changed`), which resets every GPU, each is ok until its first probe.
    - A GPU whose XID the operator has since declared harmless is ok.
    - The time for which a silent GPU is served begins again: this process has not probed it yet.
    - No time is in the future.
    """
    of_xid = health.cause == Cause.XID and health.xid is not None
    is_harmless = of_xid and xid_class(health.xid or 0, settings) is XidClass.APPLICATION
    if boot_changed or is_harmless:
        return Health(Condition.OK, since=now)
    # A container of the agent that starts again resets no GPU.
    return replace(
        health,
        since=now if health.silent and health.serving else min(health.since, now),
        quiet_since=health.quiet_since and min(health.quiet_since, now),
        recovered_at=health.recovered_at and min(health.recovered_at, now),
        passed_probes=0,
    )


# Attribution: if all GPUs fail with the same text, the fault is the driver's.

MANY: Final = 2  # the fewest GPUs for which equal failures are the driver's
OF_ALL: Final = "the driver reports the same for all GPUs: "
# Troubles that the driver also reports for a GPU when the driver itself has a fault.
MAY_PASS: Final = frozenset({Trouble.LOST, Trouble.FAILED})

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
    faults = [one for one in scan.faults if one.trouble is not Trouble.RELEASED]
    same = {(one.text, one.trouble): one for one in faults if not ill(GpuUuid(one.gpu))}
    fault = next(iter(same.values())) if len(same) == 1 and not scan.gpus else None
    return fault if fault is not None and fault.trouble in MAY_PASS else None
