"""What survives the process: the ledger, the memory of health, and whose state it is."""

import dataclasses
from collections.abc import Mapping

from agent.core.condition import Health
from agent.core.gpu import GpuUuid
from agent.core.ledger import Ledger


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """One generation of the state.

    `boot_id` names the boot in which the health memory was written; `machine_id` the host.
    """

    generation: int = 0
    boot_id: str = ""
    machine_id: str = ""
    ledger: Ledger = dataclasses.field(default_factory=Ledger)
    health: Mapping[GpuUuid, Health] = dataclasses.field(default_factory=dict)
