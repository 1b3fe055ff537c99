"""How a pod's annotations steer which GPU it gets, and in which order GPUs are tried.

Source: HAMi v2.10 pkg/scheduler/policy/gpu_policy.go, pkg/device/nvidia/device.go.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agent.codec.register import RegisteredGpu
from agent.sandbox.scheduler.model import GpuState, SchedulerSettings, Weights

WEIGHTS: Final = "hami.io/device-scoring-weights"
_GO_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})


class BadWeightsError(Exception):
    """The pod's scoring weights cannot be read; the text is the scheduler's."""


@dataclass(frozen=True, slots=True)
class Steering:
    """A pod's wishes; an empty collection is no wish."""

    use_types: tuple[str, ...]
    avoid_types: tuple[str, ...]
    use_uuids: tuple[str, ...]
    avoid_uuids: tuple[str, ...]
    mode: str | None
    numa_bind: bool
    gpu_policy: str
    node_policy: str
    weights: Weights

    @property
    def is_mutex(self) -> bool:
        """Whether the pod wants GPUs that nobody else uses."""
        return "mutex" in _split(self.gpu_policy)

    def admits_type(self, gpu: RegisteredGpu) -> bool:
        """Whether model and mode of the GPU suit the pod."""
        name = gpu.type_name.upper()
        if self.use_types and not any(word.upper() in name for word in self.use_types):
            return False
        if any(word.upper() in name for word in self.avoid_types):
            return False
        return self.mode is None or gpu.mode in self.mode

    def admits_uuid(self, gpu: RegisteredGpu) -> bool:
        """Whether the pod asks for this very GPU, or at least does not refuse it."""
        if self.use_uuids and gpu.uuid not in self.use_uuids:
            return False
        return gpu.uuid not in self.avoid_uuids

    def order(self, gpus: Sequence[GpuState]) -> list[GpuState]:
        """The GPUs sorted worst first; fitting tries them from the end. Ties keep their order."""
        return sorted(gpus, key=_sort_key(self))


def read_steering(annotations: Mapping[str, str], settings: SchedulerSettings) -> Steering:
    """The wishes that a pod's annotations express.

    Raises:
        BadWeightsError: scoring weights that are incomplete or no numbers.
    """
    return Steering(
        use_types=_split(annotations.get("nvidia.com/use-gputype", "")),
        avoid_types=_split(annotations.get("nvidia.com/nouse-gputype", "")),
        use_uuids=_split(annotations.get("nvidia.com/use-gpuuuid", "")),
        avoid_uuids=_split(annotations.get("nvidia.com/nouse-gpuuuid", "")),
        mode=annotations.get("nvidia.com/vgpu-mode") or None,
        numa_bind=annotations.get("nvidia.com/numa-bind", "") in _GO_TRUE,
        gpu_policy=annotations.get("hami.io/gpu-scheduler-policy") or settings.gpu_policy,
        node_policy=annotations.get("hami.io/node-scheduler-policy") or settings.node_policy,
        weights=_read_weights(annotations.get(WEIGHTS)),
    )


def _sort_key(steering: Steering) -> Callable[[GpuState], tuple[float, ...]]:
    policy, bind, weights = steering.gpu_policy, steering.numa_bind, steering.weights
    if "," in policy or policy == "numa":
        return _chain_key(steering)
    if policy == "mutex":
        return lambda gpu: (-gpu.load.slots, gpu.capacity.numa)
    sign = 1 if policy == "binpack" else -1
    if bind:
        return lambda gpu: (-sign * gpu.capacity.numa, sign * gpu.score(weights))
    return lambda gpu: (sign * gpu.score(weights), gpu.capacity.numa)


def _chain_key(steering: Steering) -> Callable[[GpuState], tuple[float, ...]]:
    keys: dict[str, Callable[[GpuState], float]] = {
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


def _read_weights(text: str | None) -> Weights:
    if text is None:
        return Weights()
    numbers: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if name not in ("slot", "core", "memory") or not number.isdecimal():
            raise _bad_weights(text, "expected weights that are integers of 0 or more")
        numbers[name] = int(number)
    if len(numbers) != 3:
        raise _bad_weights(text, "expected slot, core, and memory weights")
    if not any(numbers.values()):
        raise _bad_weights(text, "at least one weight must be greater than 0")
    return Weights(**numbers)


def _bad_weights(text: str, detail: str) -> BadWeightsError:
    return BadWeightsError(f'invalid {WEIGHTS} annotation "{text}": {detail}')
