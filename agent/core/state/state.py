"""The stored state: ledger and health memory, with the host and boot that they belong to."""

import datetime as dt
from collections.abc import Mapping

import msgspec

from agent.core.inventory.condition import Health
from agent.core.inventory.gpu import GpuUuid
from agent.core.state.ledger import Ledger


class State(msgspec.Struct, frozen=True):
    """One generation of the state.

    `boot_id`: the boot in which the health memory was written. `booted_at`: the time of that boot,
    by the same clock as the times in the health memory; if the clock was set since, it differs from
    the boot time now. `machine_id`: the host.
    """

    generation: int = 0
    boot_id: str = ""
    machine_id: str = ""
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    health: Mapping[GpuUuid, Health] = msgspec.field(default_factory=dict)
    booted_at: dt.datetime | None = None
