"""HAMi's mutating webhook for new pods.

Source: HAMi v2.10 pkg/scheduler/webhook.go:Handle, pkg/device/nvidia/device.go:MutateAdmission,
charts/hami/templates/scheduler/webhook.yaml.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Final

from agent.cluster import Requirement
from agent.sandbox.scheduler.model import (
    CORES,
    COUNT,
    MEMORY,
    MEMORY_PERCENT,
    PRIORITY,
    SchedulerSettings,
    all_containers,
    init_count,
    lookup,
    pod_requests,
    quantity_value,
)
from agent.sandbox.scheduler.usage import Quotas
from agent.sandbox.store import ForbiddenError, Json, StatusError

DEFAULT_SCHEDULER: Final = "default-scheduler"
REVIEWED: Final = Requirement("hami.io/webhook", ("ignore",), wanted=False)
"""What HAMi's chart requires of a pod's labels, and of its namespace's."""
_DENIED: Final = 'admission webhook "vgpu.hami.io" denied the request: '


@dataclass(frozen=True, slots=True)
class WebhookAdmission:
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


def review_pod(
    pod: Json, settings: SchedulerSettings, quotas: Quotas | None = None
) -> WebhookAdmission:
    """Admit or deny a new pod, and add HAMi's defaults to a copy of it."""
    spec = pod["spec"]
    name = spec.get("schedulerName") or settings.scheduler_name
    is_ours = name == settings.scheduler_name
    if spec.get("containers") and not (is_ours or name == DEFAULT_SCHEDULER):
        return WebhookAdmission(pod, message="pod already has different scheduler assigned")
    try:
        return WebhookAdmission(_mutate_pod(deepcopy(pod), settings, quotas))
    except _DeniedError as denied:
        return WebhookAdmission(pod, is_allowed=False, code=denied.code, message=str(denied))


def admit_pod(
    pod: Json, settings: SchedulerSettings, namespace_labels: Mapping[str, str] | None = None
) -> Json:
    """The pod as the API server stores it: unchanged if the webhook is not asked about it.

    Raises:
        StatusError: the webhook denied it.
    """
    if not all(map(REVIEWED.holds, (pod["metadata"].get("labels") or {}, namespace_labels or {}))):
        return pod
    admission = review_pod(pod, settings)
    if admission.is_allowed:
        return admission.pod
    refusal = ForbiddenError if admission.code == ForbiddenError.code else StatusError
    raise refusal(_DENIED + admission.message)


def _mutate_pod(pod: Json, settings: SchedulerSettings, quotas: Quotas | None) -> Json:
    spec = pod["spec"]
    if not spec.get("containers"):
        raise _DeniedError("pod has no containers")
    wants = [_mutate_container(spec, container, settings) for container in all_containers(pod)]
    if any(wants):
        _take_over(pod, settings)
    if quotas is not None and not _fits_quota(pod, settings, quotas):
        raise _DeniedError("exceeding resource quota")
    return pod


def _take_over(pod: Json, settings: SchedulerSettings) -> None:
    """Assign a pod that requests GPUs to HAMi's scheduler. Raises _DeniedError."""
    spec = pod["spec"]
    for container in all_containers(pod):
        if (container.get("securityContext") or {}).get("privileged"):
            raise _DeniedError(f"container {container['name']} is privileged")
    if settings.scheduler_name:
        spec["schedulerName"] = settings.scheduler_name
        if spec.get("nodeName"):
            raise _DeniedError("pod has node assigned")


def _mutate_container(spec: Json, container: Json, settings: SchedulerSettings) -> bool:
    """Apply NVIDIA's defaults to one container. Returns whether it requests a GPU.

    A count that is only in the requests matters only for the default of the cores.
    """
    percent = _read_percentage(container)
    resources = container.get("resources") or {}
    limits = dict(resources.get("limits") or {})
    if PRIORITY in limits:
        _add_env(container, "CUDA_TASK_PRIORITY", str(quantity_value(limits[PRIORITY]) or 0))
    if settings.gpu_core_policy not in ("", "default"):
        _add_env(container, "GPU_CORE_UTILIZATION_POLICY", settings.gpu_core_policy)
    shares_a_gpu = any(resource in limits for resource in (CORES, MEMORY, MEMORY_PERCENT))
    if COUNT not in limits and shares_a_gpu:
        limits[COUNT] = "1"
    asks = COUNT in limits
    is_whole = percent == 100 or (percent is None and lookup(container, MEMORY) is None)
    has_count = asks or lookup(container, COUNT) is not None
    if has_count and is_whole and lookup(container, CORES) is None:
        limits[CORES] = "100"
        asks = True
    if not asks:
        if settings.overwrite_env:
            _add_env(container, "NVIDIA_VISIBLE_DEVICES", "none")
        return False
    container["resources"] = resources | {"limits": limits}
    if settings.runtime_class_name and spec.get("runtimeClassName") is None:
        spec["runtimeClassName"] = settings.runtime_class_name
    return True


def _fits_quota(pod: Json, settings: SchedulerSettings, quotas: Quotas) -> bool:
    """Whether the quota has room for max(sum of app containers, largest init container)."""
    requests = pod_requests(pod, settings)
    inits = init_count(pod)
    asked = [
        (request.memory_mib * request.count, request.core_percent * request.count)
        if request
        else (0, 0)
        for request in requests
    ]
    memory_mib, core_percent = (
        max([sum(given[part] for given in asked[inits:]), *(g[part] for g in asked[:inits])])
        for part in (0, 1)
    )
    if not (memory_mib or core_percent):
        return True
    return quotas.fits(pod["metadata"].get("namespace", ""), memory_mib, core_percent)


def _read_percentage(container: Json) -> int | None:
    asked = lookup(container, MEMORY_PERCENT)
    if asked is None:
        return None
    percent = quantity_value(asked)
    if percent is None or not 0 <= percent <= 100:
        shown = asked if percent is None else percent
        where = f"invalid {MEMORY_PERCENT} value {shown} in container {container['name']}"
        raise _DeniedError(f"{where}: must be an integer between 0 and 100", StatusError.code)
    return percent


def _add_env(container: Json, name: str, value: str) -> None:
    container["env"] = [*(container.get("env") or ()), {"name": name, "value": value}]
