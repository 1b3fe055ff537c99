"""Whether new pods are let in at all: withheld().

A node that would refuse every new pod and still offers slices is a black hole: whatever fails there
is made again and sent there again.
"""

import dataclasses
from typing import Final

HOLD_OFF: Final = 5.0
"""Seconds for which nothing must be wrong before slices are offered again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Withholding:
    """`reasons`: what every new pod would be told, one sentence each. None: nothing is withheld.

    `until`: nothing is wrong any more, and at that loop time slices are offered again.
    """

    reasons: tuple[str, ...] = ()
    until: float | None = None

    @property
    def holds(self) -> bool:
        """True while no slice is on offer."""
        return bool(self.reasons)


def withheld(before: Withholding, reasons: tuple[str, ...], now: float) -> Withholding:
    """What is withheld at the loop time `now`, when `reasons` are what was found last."""
    if reasons:
        return Withholding(reasons)
    if not before.holds:
        return before
    until = now + HOLD_OFF if before.until is None else before.until
    return Withholding() if now >= until else Withholding(before.reasons, until)
