"""Settings for matching an Allocate with a pod."""

import dataclasses
import enum


class UnlockedPods(enum.StrEnum):
    """The policy for a pod without a node lock because HAMi took none."""

    STRICT = "strict"
    UNIQUE = "unique"


@dataclasses.dataclass(frozen=True, slots=True)
class MatchSettings:
    """`resource`: the resource name of the Allocate. `unlocked_pods`: see UnlockedPods."""

    node: str
    resource: str = "nvidia.com/gpu"
    unlocked_pods: UnlockedPods = UnlockedPods.STRICT
