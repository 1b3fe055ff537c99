"""The XID table, and what operators say of single XIDs. Data first, and nothing of any GPU."""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

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
    """Bad until the GPU was reset, the driver wants no reset any more, or the node booted."""
    NEEDS_REBOOT = "needs-reboot"
    """Bad until the node booted."""


class XidSource(enum.StrEnum):
    """Where a row's class is from."""

    PLUGIN = "plugin"
    """What NVIDIA's k8s-device-plugin skips (internal/rm/health.go), and HAMi after it."""
    CATALOG = "catalog"
    """The immediate action in NVIDIA's XID catalog (docs.nvidia.com/deploy/xid-errors, r590)."""
    CAREFUL = "careful"
    """Ours: graver than the catalog's immediate action, or the catalog leaves it open."""


@dataclasses.dataclass(frozen=True, slots=True)
class Xid:
    """One row of the table; `name` completes the sentence "XID 79: …"."""

    number: int
    name: str
    kind: XidClass
    source: XidSource


def _rows(kind: XidClass, source: XidSource, names: Mapping[int, str]) -> Iterator[Xid]:
    return (Xid(number, name, kind, source) for number, name in names.items())


def _table() -> Iterator[Xid]:
    yield from _rows(
        XidClass.APPLICATION,
        XidSource.PLUGIN,
        {
            13: "graphics engine exception",
            31: "GPU memory page fault",
            43: "GPU stopped processing",
            45: "preemptive cleanup after an earlier error",
            68: "video decoder exception",
            109: "context switch timeout",
        },
    )
    yield from _rows(
        XidClass.CONTAINED,
        XidSource.CATALOG,
        {
            63: "row remapping or page retirement was recorded",
            92: "high rate of single-bit ECC errors",
            94: "contained memory error",
            154: "the driver wants another recovery action",
        },
    )
    yield from _rows(
        XidClass.FATAL,
        XidSource.CAREFUL,
        {
            32: "corrupted push buffer stream",
            38: "driver firmware error",
            69: "graphics engine class error",
        },
    )
    yield from _rows(
        XidClass.NEEDS_RESET,
        XidSource.CATALOG,
        {
            46: "GPU stopped processing",
            48: "double-bit ECC error",
            62: "internal micro-controller halted",
            64: "row remapping or page retirement failed",
            95: "uncontained memory error",
            110: "security fault",
            119: "GSP did not answer in time",
            120: "GSP error",
            136: "link training failed",
            140: "unrecovered ECC error",
            143: "GPU initialisation failed",
            155: "NVLink software error",
            156: "resource retirement was recorded",
            158: "GPU fatal timeout",
        },
    )
    # The catalog restarts the machine for 79, to get the GPU back on the bus: one that is back has
    # been reset. For 74 it has a procedure, which ends with a reset.
    yield from _rows(
        XidClass.NEEDS_RESET,
        XidSource.CAREFUL,
        {74: "NVLink error", FELL_OFF_THE_BUS: "the GPU has fallen off the bus"},
    )
    yield from _rows(XidClass.NEEDS_REBOOT, XidSource.CATALOG, {151: "key rotation error"})


XIDS: Final[Mapping[int, Xid]] = MappingProxyType({row.number: row for row in _table()})
UNKNOWN: Final = "a driver error"


def xid_name(number: int) -> str:
    """What the XID is, in words."""
    return XIDS[number].name if number in XIDS else UNKNOWN


def xid_label(number: int) -> str:
    """The XID as a metric's label: its number, or `other` for one beyond all that NVIDIA uses."""
    return str(number) if 0 < number <= _MOST_NUMBER else "other"


_ALL: Final = frozenset({"all", "xids"})
_EVERY_XID: Final = 0
_MOST_NUMBER: Final = 255
"""The catalog ends below 200; a driver that invents numbers makes no series for each."""
_LARGEST: Final = 2**64 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class XidSwitches:
    """Which XIDs count, as NVIDIA's plugin (from 0.18) and HAMi (from 2.8) are told by variables.

    `disabled` maps an XID to whether it is ignored, and 0 to whether all are. Source: both
    plugins' getDisabledHealthCheckXids.
    """

    disabled: Mapping[int, bool] = dataclasses.field(default_factory=dict)

    @property
    def off(self) -> bool:
        """No health checks at all. Single XIDs that are enabled beside `all` change nothing."""
        return self.disabled.get(_EVERY_XID, False)

    def ignores(self, number: int) -> bool:
        """Whether this XID changes nothing."""
        if self.disabled.get(_EVERY_XID) is False:
            return False
        return self.disabled.get(number, self.off)

    def sets(self, number: int) -> bool:
        """Whether somebody said anything of this XID, or of all."""
        return _EVERY_XID in self.disabled or number in self.disabled


def read_switches(disable: str, enable: str) -> XidSwitches:
    """What DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS say; the second one wins.

    Items that are neither a number nor `all` or `xids` are passed over, see `malformed`.
    """
    if not disable.strip() and not enable.strip():
        return XidSwitches()
    disabled = dict.fromkeys(_items(disable), True)
    for row in XIDS.values():
        if row.source is XidSource.PLUGIN:
            disabled[row.number] = True
    disabled.update(dict.fromkeys(_items(enable), False))
    return XidSwitches(disabled)


def malformed(text: str) -> tuple[str, ...]:
    """The items of such a variable that say nothing."""
    items = [item.strip().lower() for item in text.split(",")]
    return tuple(one for one in items if one and one not in _ALL and _number(one) is None)


def _items(text: str) -> Iterable[int]:
    """The XIDs that are named. `all` makes the others meaningless."""
    items = [item.strip() for item in text.lower().split(",")]
    if _ALL & set(items):
        return (_EVERY_XID,)
    return [number for item in items if (number := _number(item)) is not None]


def _number(item: str) -> int | None:
    if not (item.isascii() and item.isdigit()) or len(item) > len(str(_LARGEST)):
        return None
    return int(item) if int(item) <= _LARGEST else None
