"""Decides whether the node offers slices at all.

If a node refuses every new pod but still offers slices, controllers keep creating pods and the
scheduler keeps sending them there.
"""

from typing import Final

import msgspec

HOLD_OFF: Final = 5.0
"""Seconds without a reason to withhold before slices are offered again."""


class Withholding(msgspec.Struct, frozen=True):
    """`reasons`: why every new pod would be refused, one sentence each; empty: none would be.

    `until`: the reasons are over, and slices are offered again at this time of the loop's clock.
    """

    reasons: tuple[str, ...] = ()
    until: float | None = None

    @property
    def holds(self) -> bool:
        """True while no slice is on offer."""
        return bool(self.reasons)


def withheld(before: Withholding, reasons: tuple[str, ...], now: float) -> Withholding:
    """The withholding at the loop time `now` (seconds), given the present `reasons`."""
    if reasons:
        return Withholding(reasons)
    if not before.holds:
        return before
    until = now + HOLD_OFF if before.until is None else before.until
    return Withholding() if now >= until else Withholding(before.reasons, until)
