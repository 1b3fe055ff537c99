"""The steps of an Allocate, what pods may request, and the settings of both."""

import enum
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from agent.errors import Refusal, RefusalReason, StateError
from agent.setting import Field, ValueType, choice, optional_resource, text, whole

# The steps of an Allocate, and the refusals when the node's disk fails in one of them.

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


# What HAMi's scheduler makes of a container's request of GPUs.
#
# Source: HAMi v2.10 pkg/device/nvidia/device.go, GenerateResourceRequests and Fit.

PERCENT_UNSET: Final = 101
"""The memory percentage of a request that names none."""
NOT_WHOLE: Final = -1
"""The amount of a resource that is not a whole number."""
_INT32_MAX: Final = 2**31 - 1


def _rule(key: str, read: ValueType, words: str) -> Field:
    text = f"Requests of pods as HAMi's scheduler reads them: {words}."
    return Field(key, read, text, live=True, profiled=False)


_AMOUNT: Final = whole(-(2**31), _INT32_MAX)


class RequestRules(msgspec.Struct, frozen=True):
    """The names of resources and the defaults in HAMi's device-config.yaml.

    `known`: that file was read. Otherwise these are HAMi's defaults, and the scheduler may have
    others.
    """

    memory: Annotated[
        str,
        _rule("sharing.memoryResourceName", optional_resource, "the resource for MiB of each GPU"),
    ] = "nvidia.com/gpumem"
    memory_percent: Annotated[
        str,
        _rule(
            "sharing.memoryPercentResourceName",
            optional_resource,
            "the resource for percent of each GPU's memory",
        ),
    ] = "nvidia.com/gpumem-percentage"
    cores: Annotated[
        str,
        _rule("sharing.coreResourceName", optional_resource, "the resource for percent of compute"),
    ] = "nvidia.com/gpucores"
    memory_factor: Annotated[int, _rule("sharing.memoryFactor", _AMOUNT, "the factor on MiB")] = 1
    default_memory_mib: Annotated[
        int,
        _rule("sharing.defaultMemoryMiB", _AMOUNT, "MiB in place of none; 0: all memory"),
    ] = 0
    default_core_percent: Annotated[
        int,
        _rule("sharing.defaultCorePercent", _AMOUNT, "compute in place of none; 0: no limit"),
    ] = 0
    known: bool = False


class ContainerRequest(msgspec.Struct, frozen=True):
    """The request of one container: `count` GPUs, each with memory (0: by percent) and cores."""

    count: int
    memory_mib: int
    memory_percent: int
    core_percent: int

    def memory_on(self, registered_mib: int) -> int:
        """The MiB that the scheduler gives of a GPU that registered so many."""
        is_by_percent = self.memory_mib == 0 and self.memory_percent != PERCENT_UNSET
        return registered_mib * self.memory_percent // 100 if is_by_percent else self.memory_mib

    @property
    def cores(self) -> int:
        """The percent of compute that the scheduler gives of each GPU; 0: no limit."""
        return min(self.core_percent, 100)


def read_request(
    count: int, amounts: Mapping[str, int], rules: RequestRules
) -> ContainerRequest | None:
    """The request for `count` GPUs. `amounts`: by resource its limit, else its request.

    None: it requests no GPU, or HAMi drops the whole request because it cannot count its memory.
    """
    factor = max(rules.memory_factor, 1)
    memory_mib = amounts.get(rules.memory, 0)
    if count <= 0 or not 0 <= memory_mib <= _INT32_MAX // factor:
        return None
    memory_mib *= factor
    percent = min(amounts.get(rules.memory_percent, 0), 100)
    percent = percent if percent > 0 else PERCENT_UNSET
    if percent == PERCENT_UNSET and memory_mib == 0:
        memory_mib = rules.default_memory_mib
        percent = percent if memory_mib else 100
    cores = amounts.get(rules.cores, NOT_WHOLE)
    is_known = 0 <= cores <= _INT32_MAX
    return ContainerRequest(
        count, memory_mib, percent, cores if is_known else rules.default_core_percent
    )


# Settings for matching an Allocate with a pod.


class UnlockedPods(enum.StrEnum):
    """Which pods without a node lock are served: none, those for which HAMi takes none, or all.

    HAMi up to and including 2.10 takes none where init containers alone request GPUs.
    """

    STRICT = "strict"
    SCHEDULED = "scheduled"
    UNIQUE = "unique"


class MatchSettings(msgspec.Struct, frozen=True):
    """Which pod an Allocate is for. `node`, `resource`: of Settings and SharingSettings."""

    node: str
    resource: str = "nvidia.com/gpu"
    unlocked_pods: Annotated[
        UnlockedPods,
        Field(
            "allocation.unlockedPods",
            choice(*UnlockedPods),
            "Which pods without a node lock are served, if the kubelet (1.34 or later) confirms "
            "that they are being admitted. strict: none. scheduled: those for which HAMi's "
            "scheduler takes none, because only init containers request GPUs; it must have bound "
            "them, and the annotation must be what it makes of their requests. unique: all.",
            flag="--unlocked-pods",
            live=True,
        ),
    ] = UnlockedPods.SCHEDULED
    scheduler_name: Annotated[
        str,
        Field(
            "allocation.schedulerName",
            text,
            "spec.schedulerName of the pods that HAMi's scheduler places.",
            live=True,
        ),
    ] = "hami-scheduler"
    requests: RequestRules = RequestRules()
