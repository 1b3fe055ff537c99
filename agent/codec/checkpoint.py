"""The checkpoint: the ledger, its outbox and the health memory, in an envelope with a checksum.

Unknown keys are ignored and missing ones get their defaults, so a downgrade by one version keeps
every row.
"""

import datetime as dt
from collections.abc import Iterable

import msgspec

from agent.codec.envelope import seal, unseal
from agent.core.inventory.condition import Health
from agent.core.inventory.gpu import GpuUuid
from agent.core.state.ledger import Ledger, Row
from agent.core.state.plain_row import PlainRow
from agent.core.state.state import State

KIND = "hami-agent-state"
VERSION = 1


class _StateData(msgspec.Struct, frozen=True):
    """The payload, as decoded."""

    generation: int
    boot_id: str
    machine_id: str
    ledger: Ledger
    health: dict[str, Health]
    booted_at: dt.datetime | None = None


class StateEncoder:
    """Encodes successive states. A row of the last one is not encoded again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Row | PlainRow, msgspec.Raw]] = {}

    def encode(self, state: State) -> bytes:
        """Encode a state; equal states give equal bytes."""
        ledger, health = state.ledger, state.health
        before = self._known
        rows: tuple[Row | PlainRow, ...] = (*ledger.rows, *ledger.plain)
        # By identity: hashing a row takes longer than encoding it. The entry keeps the row alive.
        self._known = {
            id(row): before.get(id(row)) or (row, msgspec.Raw(msgspec.json.encode(row)))
            for row in rows
        }
        data = msgspec.json.encode(
            {
                "generation": state.generation,
                "boot_id": state.boot_id,
                "machine_id": state.machine_id,
                "ledger": {
                    "rows": self._encoded(ledger.rows),
                    "outbox": ledger.outbox,
                    "plain": self._encoded(ledger.plain),
                },
                "health": {str(uuid): health[uuid] for uuid in sorted(health)},
                "booted_at": state.booted_at,
            }
        )
        return seal(KIND, VERSION, data)

    def _encoded(self, rows: Iterable[Row | PlainRow]) -> list[msgspec.Raw]:
        return [self._known[id(row)][1] for row in rows]


def encode_state(state: State) -> bytes:
    """Encode a single state."""
    return StateEncoder().encode(state)


def decode_state(content: bytes) -> State:
    """Decode the state in `content`. Raises StateCorrupt, which says what is wrong."""
    data = unseal(content, KIND, VERSION, _StateData)
    return State(
        generation=data.generation,
        boot_id=data.boot_id,
        machine_id=data.machine_id,
        ledger=data.ledger,
        health={GpuUuid(uuid): health for uuid, health in data.health.items()},
        booted_at=data.booted_at,
    )
