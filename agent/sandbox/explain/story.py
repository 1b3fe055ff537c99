"""The values of an explanation, and its words for requests and amounts."""

import enum
from collections.abc import Mapping

import msgspec

from agent.allocate.room import ContainerRequest


class GateVerdict(enum.Enum):
    """What a gate says."""

    PASSED = "passed"
    BLOCKED = "blocked"
    WAITING = "waiting"
    """Another program has to act, and normally does so soon."""
    NOTED = "noted"
    """It blocks nothing."""
    NOT_REACHED = "not-reached"
    UNKNOWN = "unknown"
    """The data for it could not be read."""


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

    `promised_…` is what other pods were given, whether they use it or not. `said`: what the reason
    and the figures do not say.
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
    - `biggest`: the pods that hold most of what is short there, as text.
    - `events`: what the Node's agent said last.
    """

    name: str
    is_fit: bool
    reason: str = ""
    said: str = ""
    codes: tuple[str, ...] = ()
    gpus: tuple[GpuVerdict, ...] = ()
    has_gpus: bool = True
    biggest: tuple[str, ...] = ()
    events: tuple[str, ...] = ()


class PlacingChange(msgspec.Struct, frozen=True, rename="camel"):
    """A change with which the scheduler's model places the pod on `node`.

    `paste`: the command, or the line of YAML, that makes it; empty if there is none.
    """

    said: str
    node: str
    paste: str = ""


class Explanation(msgspec.Struct, frozen=True, rename="camel"):
    """All that is said of one pod.

    - `headline`: one sentence: state, age and request. `blocked`: a gate says no.
    - `nodes`: a few of the Nodes, nearest to a fit first; `nodes_by_reason` counts all.
    - `tried`: changes were tried, also where none is in `changes`.
    - `missing`: parts of the cluster that could not be read, each with why.
    """

    namespace: str
    pod: str
    phase: str
    headline: str
    blocked: bool
    gates: tuple[Gate, ...]
    nodes: tuple[NodeVerdict, ...] = ()
    nodes_by_reason: Mapping[str, int] = msgspec.field(default_factory=dict)
    changes: tuple[PlacingChange, ...] = ()
    tried: bool = False
    missing: tuple[str, ...] = ()

    def gate(self, name: str) -> Gate:
        """The gate of that name. Raises StopIteration."""
        return next(gate for gate in self.gates if gate.name == name)


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
