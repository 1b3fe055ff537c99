"""HAMi's mutating webhook for new pods.

Source: HAMi v2.10 pkg/scheduler/webhook.go:Handle, pkg/device/nvidia/device.go:MutateAdmission,
charts/hami/templates/scheduler/webhook.yaml.
"""

import functools
from collections.abc import Mapping
from copy import deepcopy
from typing import Final

from agent.cluster import Requirement
from agent.kube.objects import decode_quantity
from agent.sandbox.scheduler import model
from agent.sandbox.scheduler.model import CORES, COUNT, MEMORY, SchedulerSettings
from agent.sandbox.store import ForbiddenError, Json, StatusError

DEFAULT_SCHEDULER: Final = "default-scheduler"
REVIEWED: Final = Requirement("hami.io/webhook", ("ignore",), wanted=False)
"""What HAMi's chart requires of a pod's labels, and of its namespace's."""
_DENIED: Final = 'admission webhook "vgpu.hami.io" denied the request: '


class DeniedError(Exception):
    """The webhook refuses the pod; the text is HAMi's."""

    def __init__(self, message: str, code: int = ForbiddenError.code) -> None:
        super().__init__(message)
        self.code = code


def admit_pod(
    pod: Json, settings: SchedulerSettings, namespace_labels: Mapping[str, str] | None = None
) -> Json:
    """The pod as the API server stores it: unchanged if the webhook is not asked about it.

    Raises:
        StatusError: the webhook denied it.
    """
    if not all(map(REVIEWED.holds, (pod["metadata"].get("labels") or {}, namespace_labels or {}))):
        return pod
    try:
        return review_pod(pod, settings)
    except DeniedError as denied:
        refusal = ForbiddenError if denied.code == ForbiddenError.code else StatusError
        raise refusal(f"{_DENIED}{denied}") from denied


def review_pod(pod: Json, settings: SchedulerSettings) -> Json:
    """A new pod, or a copy of it with HAMi's defaults if it is HAMi's. Raises DeniedError."""
    name = pod["spec"].get("schedulerName") or settings.scheduler_name
    if not pod["spec"].get("containers"):
        raise DeniedError("pod has no containers")
    if name not in (settings.scheduler_name, DEFAULT_SCHEDULER):
        return pod
    pod = deepcopy(pod)
    wants = [_mutate_container(container) for container in model.all_containers(pod)]
    for container in model.all_containers(pod) if any(wants) else ():
        if (container.get("securityContext") or {}).get("privileged"):
            raise DeniedError(f"container {container['name']} is privileged")
    if any(wants) and settings.scheduler_name:
        pod["spec"]["schedulerName"] = settings.scheduler_name
        if pod["spec"].get("nodeName"):
            raise DeniedError("pod has node assigned")
    return pod


def _mutate_container(container: Json) -> bool:
    """Apply NVIDIA's defaults to one container. Returns whether it requests a GPU.

    A count that is only in the requests matters only for the default of the cores.
    """
    percent = _read_percentage(container)
    resources = container.get("resources") or {}
    limits = dict(resources.get("limits") or {})
    has = functools.partial(model.lookup, container)
    if model.PRIORITY in limits:
        value = str(decode_quantity(str(limits[model.PRIORITY])) or 0)
        env = [*(container.get("env") or ()), {"name": "CUDA_TASK_PRIORITY", "value": value}]
        container["env"] = env
    if not limits.keys().isdisjoint((CORES, MEMORY, model.MEMORY_PERCENT)):
        limits.setdefault(COUNT, "1")
    asks = COUNT in limits
    is_whole = percent == 100 or (percent is None and has(MEMORY) is None)
    if (asks or has(COUNT) is not None) and is_whole and has(CORES) is None:
        limits[CORES] = "100"
        asks = True
    if asks:
        container["resources"] = resources | {"limits": limits}
    return asks


def _read_percentage(container: Json) -> int | None:
    asked = model.lookup(container, model.MEMORY_PERCENT)
    if asked is None:
        return None
    percent = decode_quantity(str(asked))
    if percent is None or not 0 <= percent <= 100:
        shown = asked if percent is None else percent
        where = f"invalid {model.MEMORY_PERCENT} value {shown} in container {container['name']}"
        raise DeniedError(f"{where}: must be an integer between 0 and 100", StatusError.code)
    return percent
