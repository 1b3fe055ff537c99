"""The XIDs of NVIDIA's catalog, and the class of each by the settings for health.

Source: the XID catalog at docs.nvidia.com/deploy/xid-errors (1 to 172, of R590).
"""

import enum
import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Final

import msgspec

from agent.model import Action, Condition
from agent.setting import HOW, Field, ValueType, WrongValue, duration, text, texts

FELL_OFF_THE_BUS: Final = 79


class XidClass(enum.StrEnum):
    """What an XID says about the GPU, not about the program that ran on it, as in settings."""

    APPLICATION = "application"
    """A fault of a program, the echo of another error, or a notice: nothing about the GPU."""
    CONTAINED = "contained"
    """The hardware handled the error, or the driver decides about it. The GPU stays in service."""
    FATAL = "fatal"
    """A quiet period and passed probes show that the error is over."""
    NEEDS_RESET = "needs-reset"
    """Until a reset of the GPU or a boot, or until the driver wants no reset any more."""
    NEEDS_REBOOT = "needs-reboot"
    """Until the node boots."""


CONSEQUENCES: Final[Mapping[XidClass, tuple[Condition, Action]]] = MappingProxyType(
    {
        XidClass.CONTAINED: (Condition.WATCH, Action.WAIT),
        XidClass.FATAL: (Condition.BAD, Action.WAIT),
        XidClass.NEEDS_RESET: (Condition.BAD, Action.RESET),
        XidClass.NEEDS_REBOOT: (Condition.BAD, Action.REBOOT),
    }
)
"""The condition of the GPU after an XID of the class, and what makes it ok again."""

UNKNOWN: Final = (XidClass.FATAL, "a driver error")
"""What is not in the table: as in NVIDIA's plugin it is fatal."""

_TABLE: Final[Mapping[XidClass, Mapping[str, tuple[int, ...]]]] = MappingProxyType(
    {
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
        # The restart that the catalog wants after 79 brings the GPU back on the bus: it was reset.
        XidClass.NEEDS_RESET: {
            "GPU stopped processing": (46,),
            "double-bit ECC error": (48,),
            "internal micro-controller halted": (62,),
            "row remapping or page retirement failed": (64,),
            "NVLink error": (74,),
            "the GPU has fallen off the bus": (FELL_OFF_THE_BUS,),
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
)
"""By class: the agent's name of each error, and its XIDs."""

XIDS: Final[Mapping[int, tuple[XidClass, str]]] = MappingProxyType(
    {
        number: (kind, name)
        for kind, names in _TABLE.items()
        for name, numbers in names.items()
        for number in numbers
    }
)
_MOST_NUMBER: Final = 255
"""The catalog ends below 200. Higher numbers share one metric series."""


def xid_name(number: int) -> str:
    """The name of the XID."""
    return XIDS.get(number, UNKNOWN)[1]


def xid_label(number: int) -> str:
    """The XID as a metric label: its number, or `other` outside 1 to 255."""
    return str(number) if 0 < number <= _MOST_NUMBER else "other"


# Settings for health: the agent's own, and the XID variables of HAMi's and NVIDIA's plugin.

_ALL: Final = frozenset({"all", "xids"})
_EVERY_XID: Final = 0
_DIGITS: Final = 20
"""A number of so many digits may not fit into the 64 bits of the plugins."""

PLUGINS_SKIP: Final = (13, 31, 43, 45, 68, 109)
"""The XIDs that both plugins ignore by default. Source: k8s-device-plugin internal/rm/health.go."""


@functools.lru_cache(maxsize=8)
def read_switches(disable: str, enable: str) -> Mapping[int, bool]:
    """By XID whether it is ignored, and by 0 whether all are. The second text wins.

    These are DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS of NVIDIA's plugin (from 0.18) and
    HAMi's (from 2.8). Items other than a number, `all` or `xids` are ignored; `malformed` returns
    them. Source: getDisabledHealthCheckXids of both plugins.
    """
    if not disable.strip() and not enable.strip():
        return {}

    skipped = dict.fromkeys((*_items(disable), *PLUGINS_SKIP), True)
    return skipped | dict.fromkeys(_items(enable), False)


def malformed(text: str) -> tuple[str, ...]:
    """The items of such a variable that are neither a number nor `all` or `xids`."""
    items = [item.strip().lower() for item in text.split(",")]
    return tuple(item for item in items if item and item not in _ALL and not _is_number(item))


def _items(text: str) -> Iterable[int]:
    """The XIDs in the list. `all` or `xids` overrides the others."""
    items = {item.strip() for item in text.lower().split(",")}
    return [_EVERY_XID] if _ALL & items else [int(item) for item in items if _is_number(item)]


def _is_number(item: str) -> bool:
    return item.isascii() and item.isdigit() and len(item) < _DIGITS


_MOST_XID: Final = 65535


def _class_of(item: str) -> tuple[int, XidClass]:
    xid, _, name = (part.strip() for part in item.partition("="))
    is_xid = xid.isascii() and xid.isdigit() and len(xid) < 6 and 0 < int(xid) <= _MOST_XID
    if not is_xid or name not in [*XidClass]:
        raise WrongValue(f"expected XID=CLASS with one of {', '.join(XidClass)}")
    return int(xid), XidClass(name)


def _xid_classes(value: object) -> tuple[str, ...]:
    items: tuple[str, ...] = texts(value)
    named = [_class_of(item)[0] for item in items]
    if twice := sorted({xid for xid in named if named.count(xid) > 1}):
        raise WrongValue(f"expected one class for XID {twice[0]}")
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
    """How long a report waits for others of the same failure."""
    coalesce: float = 0.05
    """Changes within this time after a list are one list."""
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

    @property
    def off(self) -> bool:
        """Whether all health checks are off. With `all`, enabling single XIDs changes nothing."""
        return read_switches(self.disabled_xids, self.enabled_xids).get(_EVERY_XID, False)


DEFAULTS: Final = HealthSettings()


def xid_class(number: int, settings: HealthSettings = DEFAULTS) -> XidClass:
    """The class of an XID."""
    if number in settings.xids:
        return settings.xids[number]

    known, _ = XIDS.get(number, UNKNOWN)
    switches = read_switches(settings.disabled_xids, settings.enabled_xids)
    every = switches.get(_EVERY_XID)
    is_ignored = every if every is False else switches.get(number, every)
    if is_ignored:
        return XidClass.APPLICATION

    is_counted = is_ignored is False and known is XidClass.APPLICATION
    return XidClass.FATAL if is_counted else known
