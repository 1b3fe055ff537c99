"""What survives the process: the ledger, the memory of health, and whose state it is."""

import dataclasses
import datetime as dt
from collections.abc import Mapping

from agent.core.inventory.condition import Health
from agent.core.inventory.gpu import GpuUuid
from agent.core.state.ledger import Ledger


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """One generation of the state.

    `boot_id` names the boot in which the health memory was written; `machine_id` the host.
    `booted_at`: when that boot was, by the clock that the moments of the health memory are of; a
    clock that was set since says otherwise.
    """

    generation: int = 0
    boot_id: str = ""
    machine_id: str = ""
    ledger: Ledger = dataclasses.field(default_factory=Ledger)
    health: Mapping[GpuUuid, Health] = dataclasses.field(default_factory=dict)
    booted_at: dt.datetime | None = None
