"""The values of an explanation, sentences about reasons of HAMi's scheduler, and figures."""

import datetime as dt
import enum
from collections.abc import Mapping
from typing import Final

import msgspec

from agent.allocate.room import ContainerRequest
from agent.errors import cap
from agent.kube.reader import PodEventView
from agent.sandbox.scheduler.model import GpuView
from agent.sandbox.scheduler.requests import Steering
from agent.status import span

NODE_UNREGISTERED: Final = "NodeUnregistered"
"""The runbook's id for HAMi's text `node unregistered`."""
KUBE_SCHEDULER: Final = "E-NODE"
ADVICE: Final = {
    "CardNotHealth": "`hami-agent status --node NODE` says what the GPU has and what to do",
    "CardCordoned": "if the work on the GPU is done: `hami-agent uncordon GPU --node NODE`",
    "CardTypeMismatch": "compare the pod's use-gputype, nouse-gputype and vgpu-mode with the GPUs",
    "CardUuidMismatch": "compare the pod's use-gpuuuid and nouse-gpuuuid with the GPUs",
    NODE_UNREGISTERED: "look at the agent's pod on that node",
    KUBE_SCHEDULER: "compare what the pod's spec asks of a Node with the Nodes",
}
"""Where to look. A change is advised only if the scheduler's model has verified it."""


class GateVerdict(enum.Enum):
    """What a gate says; the value is the word that people read."""

    PASSED = "ok"
    BLOCKED = "NO"
    WAITING = "wait"
    NOTED = "note"
    NOT_REACHED = "--"
    UNKNOWN = "??"


class Gate(msgspec.Struct, frozen=True):
    """One gate on a pod's way to a running container.

    - `said`: one sentence. `advice`: what to do; empty if nothing.
    - `reason`: the runbook's id; empty if there is nothing to look up.
    - `facts`: more lines.
    """

    name: str
    verdict: GateVerdict
    said: str
    reason: str = ""
    advice: str = ""
    facts: tuple[str, ...] = ()


class GpuVerdict(msgspec.Struct, frozen=True, rename="camel"):
    """One GPU for the container that does not fit; `reason` is empty if the GPU fits.

    `promised_…` is what other pods were given, whether they use it or not.
    """

    uuid: str
    index: int
    model: str
    reason: str
    said: str
    registered_mib: int
    promised_mib: int
    asked_mib: int
    core_percent: int
    promised_percent: int
    asked_percent: int
    slots: int
    used_slots: int


class NodeVerdict(msgspec.Struct, frozen=True, rename="camel"):
    """One Node: whether the pod fits, else HAMi's reason and each GPU.

    - `reason`: the scheduler's text, such as `2/8 CardInsufficientMemory`.
    - `said`: the same in words. `codes`: the runbook's ids.
    - `has_gpus`: the Node has, or once had, something of GPUs.
    - `biggest`: the pods with most memory there, as text.
    """

    name: str
    is_fit: bool
    reason: str = ""
    said: str = ""
    codes: tuple[str, ...] = ()
    gpus: tuple[GpuVerdict, ...] = ()
    has_gpus: bool = True
    biggest: tuple[str, ...] = ()


class PlacingChange(msgspec.Struct, frozen=True, rename="camel"):
    """A change with which the scheduler's model places the pod on `node`."""

    said: str
    node: str


class Explanation(msgspec.Struct, frozen=True):
    """All that is said of one pod.

    - `headline`: one sentence: state, age and request.
    - `nodes`: at most NODES_TOLD of the Nodes, nearest to a fit first; `reasons` counts all.
    - `missing`: parts of the cluster that could not be read, each with why.
    """

    namespace: str
    name: str
    phase: str
    headline: str
    taken: dt.datetime
    gates: tuple[Gate, ...]
    nodes: tuple[NodeVerdict, ...] = ()
    reasons: Mapping[str, int] = msgspec.field(default_factory=dict)
    changes: tuple[PlacingChange, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def is_blocked(self) -> bool:
        """Whether a gate says no."""
        return any(gate.verdict is GateVerdict.BLOCKED for gate in self.gates)

    def gate(self, name: str) -> Gate:
        """The gate of that name. Raises StopIteration."""
        return next(gate for gate in self.gates if gate.name == name)


def refused_gpu(reason: str, gpu: GpuView, request: ContainerRequest, steering: Steering) -> str:
    """Why this GPU does not do for the container, with the figures; empty without a reason."""
    if not reason:
        return ""
    has, used = gpu.capacity, gpu.load
    free_mib = has.registered_mib - used.memory_mib
    free_percent = has.core_percent - used.core_percent
    types = _wanted(steering.use_types, steering.avoid_types, steering.mode)
    uuids = _wanted(steering.use_uuids, steering.avoid_uuids, None)
    sentences = {
        "CardNotHealth": "the agent reports it as unhealthy",
        "CardCordoned": "it is cordoned (hami.io/device-cordon)",
        "CardTypeMismatch": f"{cap(has.type_name, 64)} found, {types}",
        "CardUuidMismatch": f"{cap(has.uuid, 64)} found, {uuids}",
        "CardTimeSlicingExhausted": f"{used.slots} of {has.split_count} slices are held",
        "CardInsufficientMemory": (
            f"{mib(free_mib)} free ({has.registered_mib:,} registered - {used.memory_mib:,} "
            f"promised to others), {request.memory_on(has.registered_mib):,} asked"
        ),
        "CardInsufficientCore": (
            f"{free_percent} % of cores free ({has.core_percent} registered - {used.core_percent} "
            f"promised to others), {min(request.core_percent, 100)} asked"
        ),
        "CardComputeUnitsExhausted": (
            f"all {has.core_percent} % of its cores are promised to others"
        ),
        "ExclusiveDeviceAllocateConflict": (
            "the pod wants it alone, and "
            f"{used.slots} of its slices {'is' if used.slots == 1 else 'are'} held"
        ),
        "NumaNotFit": f"it fits, but too few GPUs of NUMA node {has.numa} do (numa-bind)",
        "AllocatedCardsInsufficientRequest": f"it fits, but {request.count} GPUs are asked for",
        "ResourceQuotaNotFit": "the namespace's ResourceQuota has no room for this share",
    }
    return sentences[reason]


def request_words(request: ContainerRequest) -> str:
    """What one container asks for."""
    gpus = "1 GPU slice" if request.count == 1 else f"{request.count} GPU slices, each"
    if request.memory_mib:
        memory = mib(request.memory_mib)
    else:
        memory = f"{min(request.memory_percent, 100)} % of the memory"
    counted_as = " (which counts as 100 %)" if request.core_percent > 100 else ""
    return f"{gpus} with {memory} and {core_words(request.core_percent)}{counted_as}"


def core_words(percent: int) -> str:
    """A core share; 0 is no limit."""
    return f"{percent} % of the cores" if percent else "no limit of cores"


def mib(number: int) -> str:
    """Memory with its unit."""
    return f"{number:,} MiB"


def when(event: PodEventView, now: dt.datetime) -> str:
    """How long ago the Event was last seen."""
    return ago(event.last, now) if event.last else "at an unknown time"


def ago(moment: dt.datetime, now: dt.datetime) -> str:
    """How long ago it was."""
    return f"{span((now - moment).total_seconds())} ago"


def _wanted(
    wanted: tuple[str, ...] | None, avoided: tuple[str, ...] | None, mode: str | None
) -> str:
    parts = []
    if wanted is not None:
        parts.append(f"{cap(' or '.join(wanted), 128) or 'none'} wanted")
    if avoided is not None:
        parts.append(f"{cap(' or '.join(avoided), 128) or 'none'} excluded")
    if mode is not None:
        parts.append(f"mode {cap(mode, 64)} wanted")
    return ", ".join(parts) or "another wanted"
