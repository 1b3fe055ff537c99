"""Reads the GPU requests of containers from a pod's resource limits.

Source: HAMi v2.10 pkg/device/device.go:Resourcereqs, nvidia/device.go:GenerateResourceRequests.
"""

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.model import PERCENT_UNSET, ContainerRequest, SchedulerSettings

COUNT: Final = "nvidia.com/gpu"
MEMORY: Final = "nvidia.com/gpumem"
MEMORY_PERCENT: Final = "nvidia.com/gpumem-percentage"
CORES: Final = "nvidia.com/gpucores"
PRIORITY: Final = "nvidia.com/priority"
_INT32_MAX: Final = 2**31 - 1
_QUANTITY: Final = re.compile(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)([a-zA-Z]{0,2})(?:[eE]([+-]?\d+))?")
_SUFFIXES: Final = {
    "": Fraction(1),
    "m": Fraction(1, 1000),
    **{unit: Fraction(1000) ** power for power, unit in enumerate(("k", "M", "G", "T"), start=1)},
    **{
        unit: Fraction(1024) ** power
        for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti"), start=1)
    },
}


def parse_quantity(value: object) -> int | None:
    """A Kubernetes quantity as a whole number; None if it is a fraction or not a quantity."""
    exact = _exact(value)
    return int(exact) if exact is not None and exact.denominator == 1 else None


def quantity_value(value: object) -> int | None:
    """A Kubernetes quantity rounded up, like `Quantity.Value`; None if it is not a quantity."""
    exact = _exact(value)
    return None if exact is None else math.ceil(exact)


def _exact(value: object) -> Fraction | None:
    found = _QUANTITY.fullmatch(str(value))
    if found is None or found[2] not in _SUFFIXES:
        return None
    return Fraction(found[1]) * _SUFFIXES[found[2]] * Fraction(10) ** int(found[3] or 0)


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
    count = parse_quantity(lookup(container, COUNT))
    if count is None or count <= 0:
        return None
    memory_mib, percent = 0, PERCENT_UNSET
    asked = lookup(container, MEMORY)
    if asked is not None:
        factor = max(settings.memory_factor, 1)
        number = parse_quantity(asked)
        if number is None or not 0 <= number <= _INT32_MAX // factor:
            return None
        memory_mib = number * factor
    wanted = parse_quantity(lookup(container, MEMORY_PERCENT))
    if wanted is not None and wanted > 0:
        percent = min(wanted, 100)
    if percent == PERCENT_UNSET and memory_mib == 0:
        memory_mib = settings.default_memory_mib
        percent = percent if memory_mib else 100
    cores = parse_quantity(lookup(container, CORES))
    if cores is None or abs(cores) > _INT32_MAX:
        cores = settings.default_core_percent
    return ContainerRequest(count, memory_mib, percent, cores)
