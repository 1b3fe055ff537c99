"""Whether the node offers slices at all.

If a node refuses every new pod but still offers slices, controllers keep creating pods and the
scheduler keeps sending them there. While slices are withheld, the kubelet rejects every bound pod.
"""

import msgspec


class Withholding(msgspec.Struct, frozen=True):
    """`reasons`: why every new pod would be refused, one sentence each; empty: none would be."""

    reasons: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """True while no slice is on offer."""
        return bool(self.reasons)
