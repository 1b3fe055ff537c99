"""The steps of an Allocate, and the refusals when the node's disk fails in one of them."""

import enum

from agent.core.errors import Refusal, RefusalReason, StateError

DISK_BUDGET = 10.0
"""Seconds that one Allocate waits for the node's disk: the kubelet sets no deadline, and a refusal
fails the pod. When the disk is silent for longer, the node offers no slice."""

VAIN = 16
VAIN_REFILL = 5.0
"""Waits of calls that nothing came of, for the node: so many at once, and then one every five
seconds. While a call waits the kubelet admits nobody, and a tenant can make pods without end that
are waited for in vain."""

_SILENT = "the disk has not answered in time"


class AllocateStep(enum.StrEnum):
    """A step of an Allocate. The value is for the log."""

    HOOK = "look-at-hook-path"
    MATCH = "find-pod"
    CHECK = "check-ids"
    DIRECTORY = "make-directory"
    WRITE = "write-ledger"


_BELOW_THE_HOOK_PATH = {
    AllocateStep.HOOK: "HAMi-core's files on the node cannot be read",
    AllocateStep.DIRECTORY: "The container's directory on the node cannot be created",
}


def starved_refusal() -> Refusal:
    """The refusal when the agent itself had too little CPU to find the answer in time."""
    return Refusal(
        RefusalReason.STARVED,
        "The GPU agent of this node gets too little CPU to answer in time; ask the operator to "
        "raise its CPU request, and the pod's controller starts it again.",
        transient=True,
    )


def disk_refusal(error: TimeoutError | StateError, step: AllocateStep) -> Refusal:
    """The refusal when the disk failed in `step`, or did not finish it in time."""
    reason = str(error) if isinstance(error, StateError) else _SILENT
    if step in _BELOW_THE_HOOK_PATH:
        return Refusal(
            RefusalReason.HOST_DIRECTORY,
            f"{_BELOW_THE_HOOK_PATH[step]} ({reason}); ask the operator to check the node's hook "
            "path and its disk.",
            transient=True,
        )
    return Refusal(
        RefusalReason.STATE_UNWRITABLE,
        f"The agent cannot write its state ({reason}), so it answers no new container; ask the "
        "operator to check the node's disk.",
        transient=True,
    )
