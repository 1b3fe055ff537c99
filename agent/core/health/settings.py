"""Settings for health: the agent's own, and the XID variables of HAMi's and NVIDIA's plugin."""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from agent.core.health.xids import XIDS, XidClass

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


class HealthSettings(msgspec.Struct, frozen=True):
    """How GPUs are judged. Durations are seconds."""

    driver_hang: float = 60.0
    """How long a GPU that does not answer is served."""
    quiet: float = 600.0
    """The cool-down: time without a bad report before a watched or bad GPU can be ok again."""
    longest_quiet: float = 7200.0
    """The longest cool-down. A bout within this time after the last one doubles the cool-down."""
    passes: int = 3
    """How many probes must pass since the last bad report."""
    probe_interval: float = 10.0
    probe_deadline: float = 2.0
    gather: float = 0.005
    """How long an event waits for other events of the same failure."""
    coalesce: float = 0.05
    """How long a probe waits for others. Changes within this time after a list are one list."""
    xids: Mapping[int, XidClass] = msgspec.field(default_factory=dict)
    """Classes that differ from the table's."""
    switches: XidSwitches = msgspec.field(default_factory=XidSwitches)
    """From the variables of HAMi's and NVIDIA's plugin; `xids` wins."""


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
