"""Settings for matching an Allocate with a pod."""

import enum

import msgspec

from agent.core.allocation.requests import RequestRules


class UnlockedPods(enum.StrEnum):
    """Which pods without a node lock are served: none, those for which HAMi takes none, or all.

    HAMi up to and including 2.10 takes none where init containers alone request GPUs.
    """

    STRICT = "strict"
    SCHEDULED = "scheduled"
    UNIQUE = "unique"


class MatchSettings(msgspec.Struct, frozen=True):
    """`resource`: the resource name of the Allocate. `unlocked_pods`: see UnlockedPods.

    `scheduler_name`, `requests`: the name of HAMi's scheduler, and how it reads requests.
    """

    node: str
    resource: str = "nvidia.com/gpu"
    unlocked_pods: UnlockedPods = UnlockedPods.SCHEDULED
    scheduler_name: str = "hami-scheduler"
    requests: RequestRules = RequestRules()
