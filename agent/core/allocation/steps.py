"""The steps of an Allocate, and the refusals when the node's disk fails in one of them."""

import datetime as dt
import enum

from agent.core.ages import has_passed
from agent.core.errors import Refusal, RefusalReason, StateError
from agent.core.state.holdings import KubeletEpoch

TAKING_UP = dt.timedelta(seconds=30)
"""How long after its start a kubelet may still be admitting the pods that were there before."""

ALLOCATE_BUDGET = 0.8
"""Seconds for one Allocate. While it runs, the kubelet starts and stops nothing on the node."""

TAKING_UP_BUDGET = 1.6
"""The same for a kubelet that has just started and admits its pods again. It starts nothing else
yet. Without its checkpoint, the agent asks it about up to 110 pods, at 100 calls a second."""

VAIN = 16
VAIN_REFILL = 5.0
"""Waits of calls that nothing came of, for the node: so many at once, and then one every five
seconds. While a call waits the kubelet admits nobody, and a tenant can make pods without end that
are waited for in vain."""

_SILENT = "the disk has not answered in time"


def is_taking_up(epoch: KubeletEpoch, now: dt.datetime) -> bool:
    """Whether the kubelet may still be admitting the pods that were there before it started."""
    return not has_passed(TAKING_UP, epoch.since, now)


class AllocateStep(enum.StrEnum):
    """A step of an Allocate. The value is for the log."""

    HOOK = "look-at-hook-path"
    MATCH = "find-pod"
    CHECK = "check-ids"
    DIRECTORY = "make-directory"
    WRITE = "write-ledger"
    ALONE = "await-others"


def disk_refusal(error: TimeoutError | StateError, step: AllocateStep) -> Refusal:
    """The refusal when the disk failed in `step`, or did not finish it in time."""
    reason = str(error) if isinstance(error, StateError) else _SILENT
    if step is AllocateStep.HOOK:
        return Refusal(
            RefusalReason.HOST_DIRECTORY,
            f"HAMi-core's files on the node cannot be read ({reason}); ask the operator to check "
            "the node's hook path and its disk.",
            transient=True,
        )
    if step is AllocateStep.DIRECTORY:
        return Refusal(
            RefusalReason.HOST_DIRECTORY,
            f"The container's directory on the node cannot be created ({reason}); ask the operator "
            "to check the node's hook path and its disk.",
            transient=True,
        )
    return Refusal(
        RefusalReason.STATE_UNWRITABLE,
        f"The agent cannot write its state ({reason}), so it answers no new container; ask the "
        "operator to check the node's disk.",
        transient=True,
    )
