"""How GPUs are judged: what the operator chose, also by the variables of other plugins."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Final

from agent.core.health.xids import XIDS, XidClass

_ALL: Final = frozenset({"all", "xids"})
_EVERY_XID: Final = 0
_LARGEST: Final = 2**64 - 1

PLUGINS_SKIP: Final = (13, 31, 43, 45, 68, 109)
"""What both plugins skip unasked. Source: k8s-device-plugin internal/rm/health.go, and HAMi."""


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
    disabled.update(dict.fromkeys(PLUGINS_SKIP, True))
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


@dataclasses.dataclass(frozen=True, slots=True)
class HealthSettings:
    """How GPUs are judged. Durations are seconds."""

    driver_hang: float = 60.0
    """A GPU that does not answer is served for so long."""
    quiet: float = 600.0
    """Time without a bad report before a watched or bad GPU can be ok again."""
    longest_quiet: float = 7200.0
    """The same at most, for one that keeps falling ill; also what `soon after` means."""
    passes: int = 3
    """Probes that must pass since the last bad report, also."""
    probe_interval: float = 10.0
    probe_deadline: float = 2.0
    gather: float = 0.005
    """Events wait so long for others of the same mishap."""
    coalesce: float = 0.05
    """Probes wait so long for others; what follows a new list within that time is one list."""
    xids: Mapping[int, XidClass] = dataclasses.field(default_factory=dict)
    """Classes that differ from the table's."""
    switches: XidSwitches = dataclasses.field(default_factory=XidSwitches)
    """What the variables of HAMi's and NVIDIA's plugin say; `xids` wins."""


DEFAULTS: Final = HealthSettings()


def xid_class(number: int, settings: HealthSettings = DEFAULTS) -> XidClass:
    """The class of an XID; one that the table does not know is fatal, as for NVIDIA's plugin."""
    if number in settings.xids:
        return settings.xids[number]
    known = XIDS[number].kind if number in XIDS else XidClass.FATAL
    if not settings.switches.sets(number):
        return known
    if settings.switches.ignores(number):
        return XidClass.APPLICATION
    return XidClass.FATAL if known is XidClass.APPLICATION else known
