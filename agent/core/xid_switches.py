"""What operators say of XIDs by the variables of NVIDIA's and HAMi's plugin."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Final

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
