"""The Node's condition GpuDegraded, as it should be."""

import dataclasses
import datetime as dt
from typing import Final

from agent.core.inventory import Inventory

GPU_DEGRADED: Final = "GpuDegraded"
TEXT_LIMIT: Final = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class NodeCondition:
    """A condition of the Node, in the sense of node-problem-detector: true is bad."""

    kind: str
    status: bool
    reason: str
    message: str
    since: dt.datetime


def gpu_degraded(inventory: Inventory, now: dt.datetime) -> NodeCondition:
    """Whether GPUs of this node are not served, and which.

    While some are ill, `since` outlives a restart, as their health does. Of one that is only not
    there health says nothing: it is so from now on.
    """
    # One that is only kept because a slice of it is held is nobody's loss.
    gpus = [gpu for gpu in inventory.gpus if gpu.present or gpu.wanted]
    ill = [gpu for gpu in gpus if not gpu.serving]
    if not ill:
        since = max((gpu.health.since for gpu in gpus), default=now)
        count = len(gpus)
        few = {0: "there are no GPUs to share", 1: "the only GPU is served"}
        text = few.get(count, f"all {count} GPUs are served")
        return NodeCondition(
            GPU_DEGRADED, status=False, reason="AllServed", message=text, since=since
        )
    text = "; ".join(f"{gpu.gpu.title} {gpu.plight}" for gpu in ill)
    since = min((gpu.health.since for gpu in ill if not gpu.health.serving), default=now)
    text = text[:TEXT_LIMIT]
    return NodeCondition(GPU_DEGRADED, status=True, reason="NotServed", message=text, since=since)
