"""Settings for matching an Allocate with a pod."""

import enum

import msgspec


class UnlockedPods(enum.StrEnum):
    """The policy for a pod without a node lock because HAMi took none."""

    STRICT = "strict"
    UNIQUE = "unique"


class MatchSettings(msgspec.Struct, frozen=True):
    """`resource`: the resource name of the Allocate. `unlocked_pods`: see UnlockedPods."""

    node: str
    resource: str = "nvidia.com/gpu"
    unlocked_pods: UnlockedPods = UnlockedPods.STRICT
