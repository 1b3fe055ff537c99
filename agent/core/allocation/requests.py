"""What HAMi's scheduler makes of a container's request of GPUs.

Source: HAMi v2.10 pkg/device/nvidia/device.go, GenerateResourceRequests and Fit.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

PERCENT_UNSET: Final = 101
"""The memory percentage of a request that names none."""
NOT_WHOLE: Final = -1
"""The amount of a resource that is not a whole number."""
_INT32_MAX: Final = 2**31 - 1


class RequestRules(msgspec.Struct, frozen=True):
    """The names of resources and the defaults in HAMi's device-config.yaml.

    `known`: that file was read. Otherwise these are HAMi's defaults, and the scheduler may have
    others.
    """

    memory: str = "nvidia.com/gpumem"
    memory_percent: str = "nvidia.com/gpumem-percentage"
    cores: str = "nvidia.com/gpucores"
    memory_factor: int = 1
    default_memory_mib: int = 0
    default_core_percent: int = 0
    known: bool = False


class ContainerRequest(msgspec.Struct, frozen=True):
    """The request of one container: `count` GPUs, each with memory (0: by percent) and cores."""

    count: int
    memory_mib: int
    memory_percent: int
    core_percent: int

    def memory_on(self, registered_mib: int) -> int:
        """The MiB that the scheduler gives of a GPU that registered so many."""
        is_by_percent = self.memory_mib == 0 and self.memory_percent != PERCENT_UNSET
        return registered_mib * self.memory_percent // 100 if is_by_percent else self.memory_mib

    @property
    def cores(self) -> int:
        """The percent of compute that the scheduler gives of each GPU; 0: no limit."""
        return min(self.core_percent, 100)


def read_request(
    count: int, amounts: Mapping[str, int], rules: RequestRules
) -> ContainerRequest | None:
    """The request for `count` GPUs. `amounts`: by resource its limit, else its request.

    None: it requests no GPU, or HAMi drops the whole request because it cannot count its memory.
    """
    factor = max(rules.memory_factor, 1)
    memory_mib = amounts.get(rules.memory, 0)
    if count <= 0 or not 0 <= memory_mib <= _INT32_MAX // factor:
        return None
    memory_mib *= factor
    percent = min(amounts.get(rules.memory_percent, 0), 100)
    percent = percent if percent > 0 else PERCENT_UNSET
    if percent == PERCENT_UNSET and memory_mib == 0:
        memory_mib = rules.default_memory_mib
        percent = percent if memory_mib else 100
    cores = amounts.get(rules.cores, NOT_WHOLE)
    is_known = 0 <= cores <= _INT32_MAX
    return ContainerRequest(
        count, memory_mib, percent, cores if is_known else rules.default_core_percent
    )
