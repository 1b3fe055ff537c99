"""How pods are matched: what the operator chose."""

import dataclasses
import enum


class UnlockedPods(enum.StrEnum):
    """What to do with a pod that holds no lock because HAMi took none."""

    STRICT = "strict"
    UNIQUE = "unique"


@dataclasses.dataclass(frozen=True, slots=True)
class MatchSettings:
    """`resource` is the kubelet's name; `unlocked_pods` the policy for pods without a lock."""

    node: str
    resource: str = "nvidia.com/gpu"
    unlocked_pods: UnlockedPods = UnlockedPods.STRICT
