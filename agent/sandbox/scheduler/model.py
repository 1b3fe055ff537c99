"""The scheduler's values: GPUs, their use, nodes, and what pods ask for."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from typing_extensions import override

from agent.allocate.room import ContainerRequest, RequestRules, read_request
from agent.cluster import NOT_WHOLE
from agent.hami.annotations import RegisteredGpu
from agent.kube.objects import decode_whole
from agent.model import GpuUuid
from agent.sandbox.store import Json


class Load(NamedTuple):
    """The use of one GPU: slots, memory in MiB, and percent of its cores."""

    slots: int = 0
    memory_mib: int = 0
    core_percent: int = 0

    @override
    def __add__(self, other: "Load") -> "Load":  # type: ignore[override] # no concatenation
        return Load(*map(operator.add, self, other))

    def greater(self, other: "Load") -> "Load":
        """The greater of each number."""
        return Load(*map(max, self, other))


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU and its use, for the decision about one pod."""

    capacity: RegisteredGpu
    load: Load = field(default_factory=Load)

    @property
    def free_mib(self) -> int:
        """The memory that no pod has."""
        return self.capacity.registered_mib - self.load.memory_mib

    @property
    def score(self) -> float:
        """How full the GPU is, 0 when it is idle (HAMi pkg/scheduler/policy/gpu_policy.go)."""
        has, used = self.capacity, self.load
        if not (has.split_count and has.core_percent and has.registered_mib):
            return 0.0
        return 10 * (
            used.slots / has.split_count
            + used.core_percent / has.core_percent
            + used.memory_mib / has.registered_mib
        )


@dataclass(frozen=True, slots=True)
class RegisteredNode:
    """A registered node: its GPUs in the order of the annotation, and which are cordoned."""

    gpus: tuple[GpuView, ...]
    cordoned: frozenset[str] = frozenset()

    def with_loads(self, loads: Mapping[GpuUuid, Load]) -> "RegisteredNode":
        """The node with this use of its GPUs."""
        gpus = (replace(one, load=loads.get(one.capacity.uuid, Load())) for one in self.gpus)
        return replace(self, gpus=tuple(gpus))

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
    """HAMi's scheduler flags, and how its device-config.yaml reads requests.

    `kube_qps`, `kube_burst`: limit all requests of the scheduler's client; HAMi's defaults.
    `eager`: read a changed Node at once; HAMi reads it within 15 s.
    """

    scheduler_name: str = "hami-scheduler"
    rules: RequestRules = RequestRules(known=True)  # noqa: RUF009 -- it is frozen
    gpu_policy: str = "spread"
    node_policy: str = "binpack"
    kube_qps: float = 5.0
    kube_burst: int = 10
    eager: bool = False

    def quick(self) -> "SchedulerSettings":
        """The same with a client that hardly waits: `--kube-qps=500 --kube-burst=1000`."""
        return replace(self, kube_qps=500.0, kube_burst=1000)


# What a pod asks for: its resource limits, and the annotations by which it restricts its GPUs.
#
# Source: HAMi v2.10 pkg/device/devices.go:Resourcereqs, pkg/scheduler/policy/gpu_policy.go,
# pkg/device/nvidia/device.go.

COUNT: Final = "nvidia.com/gpu"
MEMORY: Final = "nvidia.com/gpumem"
MEMORY_PERCENT: Final = "nvidia.com/gpumem-percentage"
CORES: Final = "nvidia.com/gpucores"
PRIORITY: Final = "nvidia.com/priority"
_GO_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})


def parse_quantity(value: object) -> int | None:
    """A Kubernetes quantity as a whole number; None if it is a fraction or not a quantity."""
    return decode_whole(str(value))


def all_containers(pod: Json) -> Iterator[Json]:
    """Init containers, then the others: the order of the groups in the pod's annotation."""
    yield from pod["spec"].get("initContainers") or ()
    yield from pod["spec"].get("containers") or ()


def init_count(pod: Json) -> int:
    """The number of groups of init containers."""
    return len(pod["spec"].get("initContainers") or ())


def lookup(container: Json, resource: str) -> object | None:
    """The value of a resource: its limit, else its request, else None."""
    resources = container.get("resources") or {}
    for part in ("limits", "requests"):
        value: object = (resources.get(part) or {}).get(resource)
        if value is not None:
            return value
    return None


def names_no_memory(container: Json) -> bool:
    """Whether no memory is named, which asks for all of it."""
    return all(lookup(container, key) is None for key in (MEMORY, MEMORY_PERCENT))


def pod_requests(pod: Json, settings: SchedulerSettings) -> tuple[ContainerRequest | None, ...]:
    """One entry for each container, init containers first; None if it requests no GPU."""
    return tuple(container_request(container, settings) for container in all_containers(pod))


def container_request(container: Json, settings: SchedulerSettings) -> ContainerRequest | None:
    """The request of the container. An unusable memory value drops the whole request."""
    found = {
        name: parse_quantity(value)
        for name in (COUNT, MEMORY, MEMORY_PERCENT, CORES)
        if (value := lookup(container, name)) is not None
    }
    amounts = {name: NOT_WHOLE if each is None else each for name, each in found.items()}
    return read_request(amounts.get(COUNT, 0), amounts, settings.rules)


@dataclass(frozen=True, slots=True)
class Steering:
    """A pod's constraints on its GPUs; None if it has none of a kind."""

    use_types: tuple[str, ...] | None
    avoid_types: tuple[str, ...] | None
    use_uuids: tuple[str, ...] | None
    avoid_uuids: tuple[str, ...] | None
    mode: str | None
    numa_bind: bool
    gpu_policy: str
    node_policy: str

    @property
    def is_mutex(self) -> bool:
        """Whether the pod wants GPUs that no other pod uses."""
        return "mutex" in _split(self.gpu_policy)

    def admits_type(self, gpu: RegisteredGpu) -> bool:
        """Whether model and mode of the GPU suit the pod."""
        if self.use_types is not None and not _is_like(gpu, self.use_types):
            return False
        if self.avoid_types is not None and _is_like(gpu, self.avoid_types):
            return False
        return self.mode is None or gpu.mode in self.mode

    def admits_uuid(self, gpu: RegisteredGpu) -> bool:
        """Whether the pod's lists of UUIDs allow this GPU."""
        if self.use_uuids is not None and gpu.uuid not in self.use_uuids:
            return False
        return self.avoid_uuids is None or gpu.uuid not in self.avoid_uuids

    def admits(self, gpu: RegisteredGpu) -> bool:
        """Whether the pod itself does not exclude the GPU."""
        return self.admits_type(gpu) and self.admits_uuid(gpu)

    def order(self, gpus: Sequence[GpuView]) -> list[GpuView]:
        """The GPUs, worst first; fitting tries them from the end. Ties keep their order.

        Of HAMi's policies numa and topology-aware, and those of several words, are not modelled.
        """
        sign = 1 if self.gpu_policy == "binpack" else -1

        def key(gpu: GpuView) -> tuple[float, float]:
            if self.is_mutex:
                return -gpu.load.slots, gpu.capacity.numa
            if self.numa_bind:
                return -sign * gpu.capacity.numa, sign * gpu.score
            return sign * gpu.score, gpu.capacity.numa

        return sorted(gpus, key=key)


def read_steering(annotations: Mapping[str, str], settings: SchedulerSettings) -> Steering:
    """The constraints in a pod's annotations. Weights for the score are not modelled."""
    return Steering(
        use_types=_wish(annotations.get("nvidia.com/use-gputype", "")),
        avoid_types=_wish(annotations.get("nvidia.com/nouse-gputype", "")),
        use_uuids=_wish(annotations.get("nvidia.com/use-gpuuuid", "")),
        avoid_uuids=_wish(annotations.get("nvidia.com/nouse-gpuuuid", "")),
        mode=annotations.get("nvidia.com/vgpu-mode"),
        numa_bind=annotations.get("nvidia.com/numa-bind", "") in _GO_TRUE,
        gpu_policy=annotations.get("hami.io/gpu-scheduler-policy", settings.gpu_policy),
        node_policy=annotations.get("hami.io/node-scheduler-policy", settings.node_policy),
    )


def _split(text: str) -> tuple[str, ...]:
    return tuple(word for word in (part.strip() for part in text.split(",")) if word)


def _wish(text: str) -> tuple[str, ...] | None:
    """The items of a list; None if it is blank. A list of only commas allows nothing."""
    return _split(text) if text.strip() else None


def _is_like(gpu: RegisteredGpu, words: Sequence[str]) -> bool:
    name = gpu.type_name.upper()
    return any(word.upper() in name for word in words)
