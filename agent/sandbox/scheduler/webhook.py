"""What HAMi's mutating webhook makes of a pod before it is stored.

Source: HAMi v2.10 pkg/scheduler/webhook.go:Handle, pkg/device/nvidia/device.go:MutateAdmission.
Quotas are not modelled.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Final

from agent.sandbox.api_errors import ForbiddenError, Json, StatusError
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.requests import (
    CORES,
    COUNT,
    MEMORY,
    MEMORY_PERCENT,
    PRIORITY,
    all_containers,
    lookup,
    parse_quantity,
)

DEFAULT_SCHEDULER: Final = "default-scheduler"
_DENIED: Final = 'admission webhook "vgpu.hami.io" denied the request: '


@dataclass(frozen=True, slots=True)
class Admission:
    """The webhook's answer; `pod` is the pod as it is to be stored."""

    pod: Json
    is_allowed: bool = True
    code: int = 200
    message: str = ""


class _DeniedError(Exception):
    """The webhook refuses the pod; the text is HAMi's."""

    def __init__(self, message: str, code: int = ForbiddenError.code) -> None:
        super().__init__(message)
        self.code = code


def review_pod(pod: Json, settings: SchedulerSettings) -> Admission:
    """Decide about a new pod and fill in HAMi's defaults; the given pod is not changed."""
    spec = pod["spec"]
    if spec.get("containers") and _belongs_to_another(spec.get("schedulerName") or "", settings):
        return Admission(pod, message="pod already has different scheduler assigned")
    try:
        return Admission(_mutate_pod(deepcopy(pod), settings))
    except _DeniedError as denied:
        return Admission(pod, is_allowed=False, code=denied.code, message=str(denied))


def admit_pod(pod: Json, settings: SchedulerSettings) -> Json:
    """The pod as the API server stores it.

    Raises:
        StatusError: the webhook denied it.
    """
    admission = review_pod(pod, settings)
    if admission.is_allowed:
        return admission.pod
    refusal = ForbiddenError if admission.code == ForbiddenError.code else StatusError
    raise refusal(_DENIED + admission.message)


def _belongs_to_another(name: str, settings: SchedulerSettings) -> bool:
    if not name or name == settings.scheduler_name:
        return False
    return name != DEFAULT_SCHEDULER or not settings.force_overwrite


def _mutate_pod(pod: Json, settings: SchedulerSettings) -> Json:
    spec = pod["spec"]
    if not spec.get("containers"):
        raise _DeniedError("pod has no containers")
    wants = [_mutate_container(spec, container, settings) for container in all_containers(pod)]
    if not any(wants):
        return pod
    for container in all_containers(pod):
        if (container.get("securityContext") or {}).get("privileged"):
            raise _DeniedError(f"container {container['name']} is privileged")
    if settings.scheduler_name:
        spec["schedulerName"] = settings.scheduler_name
        if spec.get("nodeName"):
            raise _DeniedError("pod has node assigned")
    return pod


def _mutate_container(spec: Json, container: Json, settings: SchedulerSettings) -> bool:
    """Apply NVIDIA's defaults to one container; true when it asks for a GPU."""
    percent = _read_percentage(container)
    resources = container.get("resources") or {}
    limits = dict(resources.get("limits") or {})
    if PRIORITY in limits:
        _add_env(container, "CUDA_TASK_PRIORITY", str(parse_quantity(limits[PRIORITY]) or 0))
    if settings.gpu_core_policy not in ("", "default"):
        _add_env(container, "GPU_CORE_UTILIZATION_POLICY", settings.gpu_core_policy)
    _default_count(limits, settings)
    if COUNT not in limits:
        if settings.overwrite_env:
            _add_env(container, "NVIDIA_VISIBLE_DEVICES", "none")
        return False
    is_whole = percent == 100 or (percent is None and lookup(container, MEMORY) is None)
    if lookup(container, CORES) is None and is_whole:
        limits[CORES] = "100"
    container["resources"] = resources | {"limits": limits}
    if settings.runtime_class_name and not spec.get("runtimeClassName"):
        spec["runtimeClassName"] = settings.runtime_class_name
    return True


def _default_count(limits: Json, settings: SchedulerSettings) -> None:
    shares_a_gpu = any(resource in limits for resource in (CORES, MEMORY, MEMORY_PERCENT))
    if COUNT not in limits and shares_a_gpu and settings.default_gpu_count > 0:
        limits[COUNT] = str(settings.default_gpu_count)


def _read_percentage(container: Json) -> int | None:
    asked = lookup(container, MEMORY_PERCENT)
    if asked is None:
        return None
    percent = parse_quantity(asked)
    if percent is None or not 0 <= percent <= 100:
        where = f"invalid {MEMORY_PERCENT} value {asked} in container {container['name']}"
        raise _DeniedError(f"{where}: must be an integer between 0 and 100", StatusError.code)
    return percent


def _add_env(container: Json, name: str, value: str) -> None:
    container["env"] = [*(container.get("env") or ()), {"name": name, "value": value}]
