"""Reads the GPU requests of containers from a pod's resource limits.

Source: HAMi v2.10 pkg/device/devices.go:Resourcereqs.
"""

from collections.abc import Iterator
from typing import Final

from agent.codec.quantity import decode_quantity, decode_whole
from agent.core.allocation.requests import NOT_WHOLE, ContainerRequest, read_request
from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.model import SchedulerSettings

COUNT: Final = "nvidia.com/gpu"
MEMORY: Final = "nvidia.com/gpumem"
MEMORY_PERCENT: Final = "nvidia.com/gpumem-percentage"
CORES: Final = "nvidia.com/gpucores"
PRIORITY: Final = "nvidia.com/priority"


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
