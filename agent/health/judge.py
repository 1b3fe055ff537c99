"""The health of a GPU: a report and what was known make what is known."""

import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Annotated, Final

import msgspec

from agent.errors import cap
from agent.health.verdicts import (
    NextStep,
    again,
    answered_again,
    bad,
    has_joined,
    incident,
    needing,
    of_xid,
    past,
    refused,
    relieved,
    seconds,
    signed,
    silenced,
    suspected,
    told_of,
    watched,
    with_action,
    worse,
)
from agent.health.xids import XIDS, XidClass
from agent.model import (
    Action,
    Cause,
    Condition,
    DriverEvent,
    EventKind,
    GpuSigns,
    Health,
    Probe,
    ProbeOutcome,
)
from agent.setting import (
    HOW,
    Field,
    ValueType,
    WrongValue,
    duration,
    read_texts,
    shown,
    text,
)

# Settings for health: the agent's own, and the XID variables of HAMi's and NVIDIA's plugin.

_ALL: Final = frozenset({"all", "xids"})
_EVERY_XID: Final = 0
_LARGEST: Final = 2**64 - 1

PLUGINS_SKIP: Final = (13, 31, 43, 45, 68, 109)
"""The XIDs that both plugins ignore by default. Source: k8s-device-plugin internal/rm/health.go."""


class XidSwitches(msgspec.Struct, frozen=True):
    """Which XIDs count, by the variables of NVIDIA's plugin (from 0.18) and HAMi's (from 2.8).

    `disabled` maps an XID to whether it is ignored, and 0 to whether all are. Source:
    getDisabledHealthCheckXids of both plugins.
    """

    disabled: Mapping[int, bool] = msgspec.field(default_factory=dict)

    @property
    def off(self) -> bool:
        """Whether all health checks are off. With `all`, enabling single XIDs changes nothing."""
        return self.disabled.get(_EVERY_XID, False)

    def ignores(self, number: int) -> bool:
        """Whether this XID is ignored."""
        if self.disabled.get(_EVERY_XID) is False:
            return False
        return self.disabled.get(number, self.off)

    def sets(self, number: int) -> bool:
        """Whether a variable names this XID or all XIDs."""
        return _EVERY_XID in self.disabled or number in self.disabled


def read_switches(disable: str, enable: str) -> XidSwitches:
    """Parse DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS; the second one wins.

    Items other than a number, `all` or `xids` are ignored; `malformed` returns them.
    """
    if not disable.strip() and not enable.strip():
        return XidSwitches()
    disabled = dict.fromkeys(_items(disable), True)
    disabled.update(dict.fromkeys(PLUGINS_SKIP, True))
    disabled.update(dict.fromkeys(_items(enable), False))
    return XidSwitches(disabled)


def malformed(text: str) -> tuple[str, ...]:
    """The items of such a variable that are neither a number nor `all` or `xids`."""
    items = [item.strip().lower() for item in text.split(",")]
    return tuple(item for item in items if item and item not in _ALL and _number(item) is None)


def _items(text: str) -> Iterable[int]:
    """The XIDs in the list. `all` or `xids` overrides the others."""
    items = [item.strip() for item in text.lower().split(",")]
    if _ALL & set(items):
        return (_EVERY_XID,)
    return [number for item in items if (number := _number(item)) is not None]


def _number(item: str) -> int | None:
    if not (item.isascii() and item.isdigit()) or len(item) > len(str(_LARGEST)):
        return None
    return int(item) if int(item) <= _LARGEST else None


_CLASSES: Final[Mapping[str, XidClass]] = {kind.value: kind for kind in XidClass}
_MOST_XID: Final = 65535


def _class_of(item: str) -> tuple[int, XidClass]:
    xid, _, name = (part.strip() for part in item.partition("="))
    is_xid = xid.isascii() and xid.isdigit() and len(xid) < 6 and 0 < int(xid) <= _MOST_XID
    if not is_xid or name not in _CLASSES:
        raise WrongValue(f"expected XID=CLASS with one of {', '.join(_CLASSES)}", shown(item))
    return int(xid), _CLASSES[name]


def _xid_classes(value: object) -> tuple[str, ...]:
    items = read_texts(value)
    named = [_class_of(item)[0] for item in items]
    if twice := sorted({xid for xid in named if named.count(xid) > 1}):
        raise WrongValue(f"expected one class for XID {twice[0]}", "more")
    return items


xid_classes: Final = ValueType(
    _xid_classes,
    {
        "type": "array",
        "items": {"type": "string", "pattern": f"^[1-9][0-9]{{0,4}} *= *({'|'.join(XidClass)})$"},
    },
)
"""A list of texts like `94=fatal`; in variables and flags separated by commas."""


class HealthSettings(msgspec.Struct, frozen=True):
    """How GPUs are judged. Durations are seconds."""

    driver_hang: Annotated[
        float,
        Field(
            "health.driverHang",
            duration(1, 3600),
            "Time without an answer of the driver after which new pods get none of its GPUs. "
            f"{HOW}",
        ),
    ] = 60.0
    quiet: Annotated[
        float,
        Field(
            "health.quietPeriod",
            duration(1, 86400),
            "Cool-down: a GPU is ok after this time without a bad report and 3 passed probes. "
            f"{HOW}",
        ),
    ] = 600.0
    passes: int = 3
    """How many probes must pass since the last bad report."""
    probe_interval: Annotated[
        float,
        Field("health.probePeriod", duration(0.1, 3600), f"Time between probes of a GPU. {HOW}"),
    ] = 10.0
    longest_quiet: Annotated[
        float,
        Field(
            "health.longestQuietPeriod",
            duration(1, 604800),
            "Longest cool-down. The cool-down of a GPU doubles each time that the GPU becomes bad "
            f"again soon after it recovered. {HOW}",
        ),
    ] = 7200.0
    probe_deadline: float = 2.0
    gather: float = 0.005
    """How long an event waits for other events of the same failure."""
    coalesce: float = 0.05
    """How long a probe waits for others. Changes within this time after a list are one list."""
    xids: Annotated[
        Mapping[int, XidClass],
        Field(
            "health.xids",
            xid_classes,
            "Classes of XIDs that differ from the agent's table, such as 94=fatal: "
            f"{', '.join([*XidClass][:-1])} or {[*XidClass][-1]}.",
            convert=lambda items: dict(map(_class_of, items)),
        ),
    ] = msgspec.field(default_factory=dict)
    disabled_xids: Annotated[
        str,
        Field(
            "health.disabledXids",
            text,
            "XIDs to ignore, separated by commas. all or xids: no health checks at all, as in "
            "NVIDIA's plugin. Then a GPU that hangs or fails stays on offer; a lost GPU stays "
            "until the next scan, at most 1 minute.",
            env=("DP_DISABLE_HEALTHCHECKS",),
        ),
    ] = ""
    enabled_xids: Annotated[
        str,
        Field(
            "health.enabledXids",
            text,
            "XIDs to count even if an application causes them or they are disabled; all: every "
            "XID.",
            env=("DP_ENABLE_HEALTHCHECKS",),
        ),
    ] = ""
    switches: XidSwitches = msgspec.field(default_factory=XidSwitches)
    """What the two lists mean together; `xids` wins."""


DEFAULTS: Final = HealthSettings()


def xid_class(number: int, settings: HealthSettings = DEFAULTS) -> XidClass:
    """The class of an XID. As in NVIDIA's plugin, an XID outside the table is fatal."""
    if number in settings.xids:
        return settings.xids[number]
    known = XIDS[number].kind if number in XIDS else XidClass.FATAL
    if not settings.switches.sets(number):
        return known
    if settings.switches.ignores(number):
        return XidClass.APPLICATION
    return XidClass.FATAL if known is XidClass.APPLICATION else known


# Carries the health of GPUs over a restart of the agent, a boot, and a step of the clock.

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


# Judges one GPU: from its health and a driver event or a probe to its next health.
#
# Reports make a condition worse. A cool-down with passed probes makes a watched or bad GPU ok
# again. A GPU that needs a reset stays bad until it was reset. If a GPU becomes bad again soon
# after it recovered, its cool-down doubles, up to a bound.

SAME_HICCUP: Final = 4.0
"""Seconds. A probe that fails within this time after a counted failure is the same failure."""

LATELY: Final = 600.0
"""Seconds for which a failed probe counts."""

IN_A_ROW: Final = 2
"""This many failures without a passed probe between them make the GPU bad."""

MOST_LATELY: Final = 5
"""This many failures within LATELY make the GPU bad, even with passed probes between them."""

MOST_DOUBLINGS: Final = 32
_BY_CAUSE: Final[Mapping[str, str]] = {
    Cause.RELEASED: "`hami-agent recheck` has to take it back",
    Cause.FABRIC: "it has to join the fabric of its NVSwitches: check that nvidia-fabricmanager "
    "runs",
}
_BY_CONDITION: Final[Mapping[str, str]] = {
    Condition.LOST: "the driver has to reach it again: reset it, or reboot the node",
    Condition.UNMONITORED: "it has to answer, and the agent has to receive its events",
}
"""What ends a condition that no cool-down ends."""
UNNAMED: Final = " on a GPU that the driver cannot name"


def judge(
    health: Health, report: DriverEvent | Probe, now: dt.datetime, settings: HealthSettings
) -> Health:
    """The health of one GPU after a report about it. Returns `health` itself if nothing changes.

    `now` must not go backwards between calls.
    """
    if health.cause == Cause.RELEASED:
        return health  # work on the GPU can cause any report
    known = _counted(health, report, now) if isinstance(report, Probe) else health
    return _carried(known, _judged(known, report, now, settings), now, settings)


def aged(health: Health, now: dt.datetime, settings: HealthSettings) -> Health:
    """The health after time alone: a silent GPU is served only for `driver_hang` seconds."""
    if health.silent and health.serving and seconds(health, now) >= settings.driver_hang:
        return msgspec.structs.replace(health, serving=False)
    return health


def switched_off(now: dt.datetime) -> Health:
    """The health of every GPU when health checks are switched off."""
    text = "health checks are switched off in the settings [H-OFF]"
    return Health(Condition.UNMONITORED, now, Cause.OFF, text, runbook="H-OFF")


def quiet_time(health: Health, settings: HealthSettings) -> float:
    """The cool-down of this GPU: seconds without a bad report."""
    if not health.ill:
        return settings.quiet
    doublings = min(max(health.bouts, 1) - 1, MOST_DOUBLINGS)
    return min(settings.quiet * 2.0**doublings, max(settings.quiet, settings.longest_quiet))


def missing(health: Health, now: dt.datetime, settings: HealthSettings) -> tuple[str, ...]:
    """What still has to happen until the GPU is ok, in words. Empty if it is ok."""
    if health.condition is Condition.OK or health.cause == Cause.OFF:
        return ()
    end = _BY_CAUSE.get(health.cause) or _BY_CONDITION.get(health.condition)
    if end or health.needs_reboot:
        return (end or "a reboot of the node",)
    needs = ["a reset of the GPU, or a reboot of the node"] if health.needs_reset else []
    rested = 0.0 if health.needs_reset else seconds(health, now)  # it begins with the reset
    rest = quiet_time(health, settings) - rested
    if rest > 0:
        needs.append(f"{rest:.0f} s more without a bad report")
    if (probes := settings.passes - health.passed_probes) > 0:
        needs.append(f"{probes} more passed probe{'s' if probes > 1 else ''}")
    return tuple(needs)


def _judged(
    health: Health, report: DriverEvent | Probe, now: dt.datetime, settings: HealthSettings
) -> Health:
    if isinstance(report, Probe):
        return _probed(health, report, now, settings)
    if report.kind is EventKind.XID:
        return _struck(health, report, now, settings)
    if report.kind is EventKind.ECC_DOUBLE:
        text = "uncorrectable memory error"
        if report.uuid is None:
            return suspected(health, watched(now, Cause.ECC, text + UNNAMED, "H-ECC"))
        verdict = bad(now, Cause.ECC, text, "H-ECC", NextStep.RESET_NOW)
        return worse(health, needing(verdict, reboot=False))
    return health  # corrected errors, power supply, changes of the GPUs that are there


def _carried(health: Health, fresh: Health, now: dt.datetime, settings: HealthSettings) -> Health:
    """`fresh` with the counts of bouts and failed probes, which single verdicts do not carry."""
    if fresh is health:
        return health
    bouts, recovered_at = health.bouts, health.recovered_at
    if fresh.ill and not health.ill:
        soon = recovered_at is not None and (
            (now - recovered_at).total_seconds() < max(settings.quiet, settings.longest_quiet)
        )
        bouts, recovered_at = (bouts + 1 if soon else 1), None
    elif health.ill and not fresh.ill:
        recovered_at = now
    return msgspec.structs.replace(
        fresh,
        bouts=bouts,
        recovered_at=recovered_at,
        failures=() if fresh.ill else _lately(health, now),
        failed_in_row=0 if fresh.ill else health.failed_in_row,
    )


def _struck(
    health: Health, event: DriverEvent, now: dt.datetime, settings: HealthSettings
) -> Health:
    number = event.xid if event.xid is not None else 0
    verdict = of_xid(number, xid_class(number, settings), now)
    if verdict is None:
        return health
    if event.uuid is None:
        verdict = watched(now, Cause.XID, told_of(number) + UNNAMED, verdict.runbook)
        return suspected(health, msgspec.structs.replace(verdict, xid=number))
    return worse(health, msgspec.structs.replace(verdict, xid=number))


def _probed(health: Health, probe: Probe, now: dt.datetime, settings: HealthSettings) -> Health:
    if probe.outcome is ProbeOutcome.PASSED:
        return _answered(health, probe, now, settings)
    if probe.outcome is ProbeOutcome.FAILED:
        return signed(_reached(health, probe, now), probe.signs, now)
    if probe.outcome is ProbeOutcome.REFUSED:
        return _refused(health, now)
    if probe.outcome is ProbeOutcome.LOST:
        return _lost(health, probe, now)
    return _silent(health, probe, now, settings)


def _answered(health: Health, probe: Probe, now: dt.datetime, settings: HealthSettings) -> Health:
    """The GPU answers. Its signs count, and whether the agent receives its events."""
    deaf = health.condition is Condition.UNMONITORED and health.cause == Cause.MONITOR
    fresh = health if deaf and probe.unmonitored else _passed(health, now, settings, probe.signs)
    fresh = signed(fresh, probe.signs, now)
    if probe.unmonitored and fresh.condition in {Condition.OK, Condition.WATCH}:
        text = f"the agent does not receive its events: {cap(probe.unmonitored)}"
        return silenced(fresh, now, Cause.MONITOR, text, "H-DEAF")
    return fresh


def _passed(health: Health, now: dt.datetime, settings: HealthSettings, signs: GpuSigns) -> Health:
    is_joining = health.cause == Cause.FABRIC  # it has no fault, so it needs no cool-down
    if health.condition is Condition.OK or (is_joining and not has_joined(signs)):
        return health
    is_unheard = health.condition is Condition.UNMONITORED
    if is_joining or (is_unheard and health.xid is None):
        return _cleared(health, now)
    if is_unheard:
        text = f"XID {health.xid} before it stopped answering"
        runbook = f"H-{health.xid:03d}"
        return msgspec.structs.replace(watched(now, Cause.XID, text, runbook), xid=health.xid)
    if health.condition is Condition.LOST:
        return _back(health, now)
    known = relieved(answered_again(health, signs, now), signs, now)
    return _rested(known, now, settings)


def _back(health: Health, now: dt.datetime) -> Health:
    """The GPU was lost and answers. That implies a reset, unless it reported an error since."""
    needs = health.needs_reset or health.needs_reboot
    then = NextStep.RESET_AGAIN if needs else NextStep.REST
    then = NextStep.BOOT if health.needs_reboot else then
    back = bad(now, Cause.LOST, "it was lost and is back", health.runbook, then)
    back = msgspec.structs.replace(back, xid=health.xid, passed_probes=1)
    return needing(back, reboot=health.needs_reboot) if needs else back


def _rested(health: Health, now: dt.datetime, settings: HealthSettings) -> Health:
    passed = min(health.passed_probes + 1, settings.passes)
    quiet = seconds(health, now) >= quiet_time(health, settings)
    if quiet and passed >= settings.passes and not health.needs_reset:
        return Health(Condition.OK, since=now)
    if passed == health.passed_probes:
        return health
    return msgspec.structs.replace(health, passed_probes=passed)


def _cleared(health: Health, now: dt.datetime) -> Health:
    """The GPU answers and its events arrive again. Failed probes before the silence still count."""
    if not _lately(health, now):
        return Health(Condition.OK, since=now)
    return watched(now, Cause.PROBE, "a probe failed in the last 10 minutes", "H-PROBE")


def _reached(health: Health, probe: Probe, now: dt.datetime) -> Health:
    """A probe failed. If it carries signs of the GPU, the GPU is neither lost nor refused."""
    if not probe.signs.rows_failed:
        return _failed(health, probe, now)
    is_lost = health.condition is Condition.LOST
    known = _back(health, now) if is_lost else answered_again(health, probe.signs, now)
    return _failed(known, probe, now)


def _refused(health: Health, now: dt.datetime) -> Health:
    """The driver refuses calls. A lost GPU that needs a reboot is then no longer lost."""
    is_back = health.condition is Condition.LOST and health.needs_reboot
    return again(_back(health, now), now) if is_back else refused(health, now)


def _failed(health: Health, probe: Probe, now: dt.datetime) -> Health:
    """A single failure makes a GPU watched; too many make it bad."""
    if health.ill:
        return again(health, now)
    error = cap(probe.text) or "an error"
    if is_failing(health, now):
        verdict = bad(now, Cause.PROBE, f"probes fail: {error}", "H-PROBE")
        return msgspec.structs.replace(verdict, xid=health.xid, action=Action.INSPECT)
    doubt = watched(now, Cause.PROBE, f"a probe failed: {error}", "H-PROBE")
    return worse(health, msgspec.structs.replace(doubt, xid=health.xid))


def _lost(health: Health, probe: Probe, now: dt.datetime) -> Health:
    if health.condition is Condition.LOST:
        is_echo = health.needs_reset and not health.needs_reboot
        return msgspec.structs.replace(health, needs_reset=False) if is_echo else health
    reason = f"after XID {health.xid}" if health.xid is not None else cap(probe.text)
    text = f"the driver no longer reaches it ({reason or 'no reason given'})"
    verdict = msgspec.structs.replace(
        bad(now, Cause.LOST, text, incident(health, "H-LOST")),
        condition=Condition.LOST,
        xid=health.xid,
        action=Action.RESET,
    )
    return (
        needing(verdict, reboot=True) if health.needs_reboot else with_action(verdict, health.xid)
    )


def _silent(health: Health, probe: Probe, now: dt.datetime, settings: HealthSettings) -> Health:
    if health.silent:
        return aged(health, now, settings)
    if health.ill:
        return (
            health if not health.passed_probes else msgspec.structs.replace(health, passed_probes=0)
        )
    text = f"it does not answer ({cap(probe.text) or 'no reply'})"
    return silenced(health, now, Cause.DRIVER, text, "H-SILENT")


# Failed probes: which of them count, and how many make a GPU bad.


def _counted(health: Health, probe: Probe, now: dt.datetime) -> Health:
    """`health` with the failure that `probe` adds. Returns `health` itself if it adds none."""
    if probe.outcome is ProbeOutcome.PASSED and health.failed_in_row:
        return msgspec.structs.replace(health, failed_in_row=0)
    if probe.outcome is not ProbeOutcome.FAILED or health.ill or _is_echo(health, now):
        return health
    return msgspec.structs.replace(
        health,
        failures=(*_lately(health, now), now)[-MOST_LATELY:],
        failed_in_row=min(health.failed_in_row + 1, IN_A_ROW),
    )


def _lately(health: Health, now: dt.datetime) -> tuple[dt.datetime, ...]:
    """The times of the failed probes that still count."""
    return tuple(at for at in health.failures if (now - at).total_seconds() < LATELY)


def is_failing(health: Health, now: dt.datetime) -> bool:
    """Whether too many probes failed to serve the GPU."""
    return health.failed_in_row >= IN_A_ROW or len(_lately(health, now)) >= MOST_LATELY


def _is_echo(health: Health, now: dt.datetime) -> bool:
    return bool(health.failures) and (now - health.failures[-1]).total_seconds() < SAME_HICCUP
