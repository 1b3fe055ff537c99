"""What a pod asks for: its resource limits, and the annotations by which it restricts its GPUs.

Source: HAMi v2.10 pkg/device/devices.go:Resourcereqs, pkg/scheduler/policy/gpu_policy.go,
pkg/device/nvidia/device.go.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agent.allocate.room import NOT_WHOLE, ContainerRequest, read_request
from agent.hami.register import RegisteredGpu
from agent.kube.objects import decode_quantity, decode_whole
from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.model import GpuView, SchedulerSettings, Weights

COUNT: Final = "nvidia.com/gpu"
MEMORY: Final = "nvidia.com/gpumem"
MEMORY_PERCENT: Final = "nvidia.com/gpumem-percentage"
CORES: Final = "nvidia.com/gpucores"
PRIORITY: Final = "nvidia.com/priority"
WEIGHTS: Final = "hami.io/device-scoring-weights"
_WEIGHTS: Final = ("slot", "core", "memory")
_INTEGER: Final = re.compile(r"[+-]?[0-9]+", re.ASCII)
_INT64_MAX: Final = 2**63 - 1
_GO_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})


def parse_quantity(value: object) -> int | None:
    """A Kubernetes quantity as a whole number; None if it is a fraction or not a quantity."""
    return decode_whole(str(value))


def quantity_value(value: object) -> int | None:
    """A Kubernetes quantity rounded up, like `Quantity.Value`; None if it is not a quantity."""
    return decode_quantity(str(value))


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


class BadWeightsError(Exception):
    """The pod's scoring weights cannot be read; the text is the scheduler's."""


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
    weights: Weights

    @property
    def is_mutex(self) -> bool:
        """Whether the pod wants GPUs that no other pod uses."""
        return "mutex" in _split(self.gpu_policy)

    @property
    def needs_topology(self) -> bool:
        """Whether the GPUs are chosen by their connections."""
        return "topology-aware" in _split(self.gpu_policy)

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

    def order(self, gpus: Sequence[GpuView]) -> list[GpuView]:
        """The GPUs, worst first; fitting tries them from the end. Ties keep their order."""
        return sorted(gpus, key=_sort_key(self))


def read_steering(annotations: Mapping[str, str], settings: SchedulerSettings) -> Steering:
    """The constraints in a pod's annotations.

    Raises:
        BadWeightsError: the scoring weights are incomplete or not numbers.
    """
    return Steering(
        use_types=_wish(annotations.get("nvidia.com/use-gputype", "")),
        avoid_types=_wish(annotations.get("nvidia.com/nouse-gputype", "")),
        use_uuids=_wish(annotations.get("nvidia.com/use-gpuuuid", "")),
        avoid_uuids=_wish(annotations.get("nvidia.com/nouse-gpuuuid", "")),
        mode=annotations.get("nvidia.com/vgpu-mode"),
        numa_bind=annotations.get("nvidia.com/numa-bind", "") in _GO_TRUE,
        gpu_policy=annotations.get("hami.io/gpu-scheduler-policy", settings.gpu_policy),
        node_policy=annotations.get("hami.io/node-scheduler-policy", settings.node_policy),
        weights=_read_weights(annotations.get(WEIGHTS)),
    )


def _sort_key(steering: Steering) -> Callable[[GpuView], tuple[float, ...]]:
    policy, bind, weights = steering.gpu_policy, steering.numa_bind, steering.weights
    if "," in policy or policy == "numa":
        return _chain_key(steering)
    if policy == "mutex":
        return lambda gpu: (-gpu.load.slots, gpu.capacity.numa)
    sign = 1 if policy == "binpack" else -1
    if bind:
        return lambda gpu: (-sign * gpu.capacity.numa, sign * gpu.score(weights))
    return lambda gpu: (sign * gpu.score(weights), gpu.capacity.numa)


def _chain_key(steering: Steering) -> Callable[[GpuView], tuple[float, ...]]:
    keys: dict[str, Callable[[GpuView], float]] = {
        "binpack": lambda gpu: gpu.score(steering.weights),
        "spread": lambda gpu: -gpu.score(steering.weights),
        "numa": lambda gpu: gpu.capacity.numa,
    }
    names = [word for word in _split(steering.gpu_policy) if word in keys] or ["spread"]
    if steering.numa_bind:
        names.insert(0, "numa")
    return lambda gpu: (*(keys[name](gpu) for name in names), gpu.capacity.index)


def _split(text: str) -> tuple[str, ...]:
    return tuple(word for word in (part.strip() for part in text.split(",")) if word)


def _wish(text: str) -> tuple[str, ...] | None:
    """The items of a list; None if it is blank. A list of only commas allows nothing."""
    return _split(text) if text.strip() else None


def _is_like(gpu: RegisteredGpu, words: Sequence[str]) -> bool:
    name = gpu.type_name.upper()
    return any(word.upper() in name for word in words)


def _read_weights(text: str | None) -> Weights:
    """The weights, as HAMi v2.10 pkg/util/device_scoring_weights.go reads them."""
    if text is None:
        return Weights()
    numbers: dict[str, int] = {}
    parts = text.split(",")
    if len(parts) != len(_WEIGHTS):
        raise _bad_weights(text, "expected slot, core, and memory weights")
    for part in parts:
        name, equals, number = part.strip().partition("=")
        name = name.strip()
        if detail := _weight_fault(name, equals, number.strip(), numbers):
            raise _bad_weights(text, detail)
        numbers[name] = int(number)
    if not any(numbers.values()):
        raise _bad_weights(text, "at least one weight must be positive")
    return Weights(**numbers)


def _weight_fault(name: str, equals: str, number: str, before: Mapping[str, int]) -> str | None:
    """The first error of one weight, checked in HAMi's order."""
    value = int(number) if _INTEGER.fullmatch(number) else None
    faults = (
        ("expected key=value entries", not equals),
        (f"duplicate {_quoted(name)} weight", name in before),
        (
            f"{_quoted(name)} weight must be an integer",
            value is None or not -_INT64_MAX - 1 <= value <= _INT64_MAX,
        ),
        (f"{_quoted(name)} weight must not be negative", (value or 0) < 0),
        (f"unknown weight {_quoted(name)}", name not in _WEIGHTS),
    )
    return next((detail for detail, applies in faults if applies), None)


def _bad_weights(text: str, detail: str) -> BadWeightsError:
    return BadWeightsError(f"invalid {WEIGHTS} annotation {_quoted(text)}: {detail}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
