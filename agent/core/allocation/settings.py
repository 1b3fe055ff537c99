"""Settings for matching an Allocate with a pod."""

import dataclasses
import enum


class UnlockedPods(enum.StrEnum):
    """The policy for a pod without a node lock because HAMi took none."""

    STRICT = "strict"
    UNIQUE = "unique"


@dataclasses.dataclass(frozen=True, slots=True)
class MatchSettings:
    """`resource`: the resource name of the Allocate. `unlocked_pods`: see UnlockedPods.

    `renamed`: the present resource name if `resource` is a former one, else empty. By a former
    name, only containers that were answered before are answered again.
    """

    node: str
    resource: str = "nvidia.com/gpu"
    unlocked_pods: UnlockedPods = UnlockedPods.STRICT
    renamed: str = ""
