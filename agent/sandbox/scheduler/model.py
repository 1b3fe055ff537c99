"""The scheduler's values: GPUs, their use, nodes, and the requests of containers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agent.allocate.room import RequestRules
from agent.hami.register import RegisteredGpu
from agent.model import GpuUuid

Links = Mapping[GpuUuid, Mapping[GpuUuid, int]]


@dataclass(frozen=True, slots=True)
class Load:
    """The use of one GPU: slots, memory in MiB, and percent of its cores."""

    slots: int = 0
    memory_mib: int = 0
    core_percent: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(
            self.slots + other.slots,
            self.memory_mib + other.memory_mib,
            self.core_percent + other.core_percent,
        )

    def greater(self, other: "Load") -> "Load":
        """The greater of each number."""
        return Load(
            max(self.slots, other.slots),
            max(self.memory_mib, other.memory_mib),
            max(self.core_percent, other.core_percent),
        )


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU and its use, for the decision about one pod."""

    capacity: RegisteredGpu
    load: Load = field(default_factory=Load)

    def with_load(self, more: Load) -> "GpuView":
        """The same GPU with additional use."""
        return replace(self, load=self.load + more)

    def score(self, weights: "Weights") -> float:
        """How full the GPU is, 0 when it is idle (HAMi pkg/scheduler/policy/gpu_policy.go)."""
        has, used = self.capacity, self.load
        if not (has.split_count and has.core_percent and has.registered_mib):
            return 0.0
        return 10 * (
            weights.slot * used.slots / has.split_count
            + weights.core * used.core_percent / has.core_percent
            + weights.memory * used.memory_mib / has.registered_mib
        )


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of slots, cores and memory in the score of a GPU."""

    slot: int = 1
    core: int = 1
    memory: int = 1


@dataclass(frozen=True, slots=True)
class RegisteredNode:
    """A registered node: its GPUs in the order of the annotation, and which are cordoned.

    `links`: the points of each pair of GPUs, by both UUIDs; a missing pair has 0.
    """

    name: str
    gpus: tuple[GpuView, ...]
    cordoned: frozenset[str] = frozenset()
    links: Links = field(default_factory=dict)

    def score(self) -> float:
        """How full the node is (HAMi pkg/scheduler/policy/node_policy.go)."""
        slots = sum(gpu.capacity.split_count for gpu in self.gpus)
        cores = sum(gpu.capacity.core_percent for gpu in self.gpus)
        memory_mib = sum(gpu.capacity.registered_mib for gpu in self.gpus)
        if not (slots and cores and memory_mib):
            return 0.0
        used = sum((gpu.load for gpu in self.gpus), Load())
        return 10 * (used.slots / slots + used.core_percent / cores + used.memory_mib / memory_mib)


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """HAMi's scheduler flags and the `nvidia` section of its device-config.yaml.

    - `lock_timeout`: seconds until a lock may be taken over.
    - `memory_factor`: multiplies requested memory.
    - `kube_qps`, `kube_burst`: limit all requests of the scheduler's client; HAMi's defaults.
    """

    scheduler_name: str = "hami-scheduler"
    force_overwrite: bool = True
    default_gpu_count: int = 1
    default_memory_mib: int = 0
    default_core_percent: int = 0
    memory_factor: int = 1
    gpu_policy: str = "spread"
    node_policy: str = "binpack"
    gpu_core_policy: str = "default"
    runtime_class_name: str = ""
    overwrite_env: bool = False
    lock_timeout: float = 300.0
    kube_qps: float = 5.0
    kube_burst: int = 10

    @property
    def rules(self) -> RequestRules:
        """How it reads requests."""
        return RequestRules(
            memory_factor=self.memory_factor,
            default_memory_mib=self.default_memory_mib,
            default_core_percent=self.default_core_percent,
            known=True,
        )

    def quick(self) -> "SchedulerSettings":
        """The same with a client that hardly waits: `--kube-qps=500 --kube-burst=1000`."""
        return replace(self, kube_qps=500.0, kube_burst=1000)


Reasons = Mapping[str, int]
"""Why GPUs were not chosen: reason → number of GPUs."""
