"""Where the health watch's conclusions go."""

import dataclasses
from collections.abc import Callable, Mapping

from agent.core.condition import Health
from agent.core.gpu import GpuUuid


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HealthPorts:
    """Where verdicts go. `changed`: the driver says that GPUs came or went."""

    judged: Callable[[Mapping[GpuUuid, Health]], None]
    remember: Callable[[Mapping[GpuUuid, Health]], None]
    changed: Callable[[], None]
