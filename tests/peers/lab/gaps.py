"""Times without an agent, and which rejections of pods belong into them."""

import re
from dataclasses import dataclass
from typing import Final

from agent.errors import RefusalReason
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.words import because

TOLD_LATE: Final = 20.0
"""Seconds after which a rejection is in the API for sure: the kubelet tells at once, but where that
went wrong only ten seconds later. What belongs into a gap is judged by when the pod was taken."""

STARTING: Final = 2.0
"""Seconds for which an agent that knows its pods is still busy with its start."""

_UNREACHED: Final = "rpc error: code = (Unavailable|Canceled) desc = .*"
_KUBELETS_OWN: Final = (
    re.escape(because(f"no healthy devices present; cannot allocate unhealthy devices {RESOURCE}")),
    because(f"(device plugin GetPreferredAllocation rpc failed with err: )?{_UNREACHED}"),
    f"Pod was rejected: Node didn't have enough resource: {RESOURCE}, .*",
)
"""What it says where nobody answers it."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A pod that the kubelet did not take.

    `taken` and `at` in Unix seconds: when the kubelet began with it, and when the watch showed it.
    """

    name: str
    taken: float
    at: float
    message: str


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without the agent, in Unix seconds: until the kubelet had its list again."""

    start: float
    end: float
    known: float
    """Until the new agent knew the pods of the node."""

    def explains(self, one: Rejected) -> bool:
        """Whether the kubelet took up and rejected a pod in it, in words that belong there."""
        if is_blind(one.message):
            end = self.known
        elif is_out_of_time(one.message):
            end = max(self.known, self.end) + STARTING
        elif is_kubelets_own(one.message):
            end = self.end
        else:
            return False
        return one.taken <= end and self.start <= one.at <= end + TOLD_LATE


def is_blind(message: str) -> bool:
    """Whether an agent speaks that does not know the pods of its node yet."""
    return f"[{RefusalReason.PODS_UNKNOWN.value}]" in message


def is_out_of_time(message: str) -> bool:
    """Whether an agent speaks that found no answer in time, as one may that was just started."""
    reasons = RefusalReason.OUT_OF_TIME, RefusalReason.STARVED
    return any(f"[{reason.value}]" in message for reason in reasons)


def is_kubelets_own(message: str) -> bool:
    """Whether the kubelet says that it reached no agent, and no agent speaks through it."""
    return "[HA-" not in message and any(re.fullmatch(one, message) for one in _KUBELETS_OWN)
