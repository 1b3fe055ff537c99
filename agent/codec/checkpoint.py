"""The state file: versioned JSON with a checksum over the exact bytes of its data.

    {"kind":"hami-agent-state","version":1,"checksum":"<sha256>","data":{…}}

A file of the version before and of the version after is read too: unknown keys are ignored and
missing ones are their defaults, so a downgrade by one keeps every row.
"""

import hashlib
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from agent.core.condition import Health
from agent.core.errors import StateCorrupt, cap
from agent.core.gpu import GpuUuid
from agent.core.ledger import Ledger, Row
from agent.core.plain_row import PlainRow
from agent.core.state import State

KIND = "hami-agent-state"
VERSION = 1
READABLE = frozenset({VERSION, VERSION + 1})


class _Data(msgspec.Struct, frozen=True):
    """The payload, as it is read."""

    generation: int
    boot_id: str
    machine_id: str
    ledger: Ledger
    health: dict[str, Health]


class _File(msgspec.Struct, frozen=True):
    """The envelope. `data` keeps its exact bytes for the checksum."""

    kind: str
    version: int
    checksum: str
    data: msgspec.Raw


_Shape = TypeVar("_Shape", _File, _Data)


class StateEncoder:
    """Encodes one state after another. A row that was in the last one is not encoded again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Row | PlainRow, msgspec.Raw]] = {}

    def encode(self, state: State) -> bytes:
        """The file's bytes; equal states give equal bytes."""
        ledger, health = state.ledger, state.health
        before = self._known
        rows: tuple[Row | PlainRow, ...] = (*ledger.rows, *ledger.plain)
        # By identity: to hash a row takes longer than to encode it. Who is in it stays alive.
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
            }
        )
        checksum = hashlib.sha256(data).hexdigest()
        head = f'{{"kind":"{KIND}","version":{VERSION},"checksum":"{checksum}","data":'
        return b"".join((head.encode(), data, b"}\n"))

    def _encoded(self, rows: Iterable[Row | PlainRow]) -> list[msgspec.Raw]:
        return [self._known[id(row)][1] for row in rows]


def encode_state(state: State) -> bytes:
    """The bytes of one state that no other follows."""
    return StateEncoder().encode(state)


def decode_state(content: bytes) -> State:
    """The state in `content`. Raises StateCorrupt, which says what is wrong with it."""
    file = _decode(content, _File)
    if file.kind != KIND:
        raise StateCorrupt(f"it is not a state file: its kind is {cap(file.kind, 40)}")
    if file.version not in READABLE:
        raise StateCorrupt(
            f"it has version {file.version}, and this agent reads up to {VERSION + 1}"
        )
    raw = bytes(file.data)
    if hashlib.sha256(raw).hexdigest() != file.checksum:
        raise StateCorrupt("its checksum does not match its data")
    data = _decode(raw, _Data)
    return State(
        generation=data.generation,
        boot_id=data.boot_id,
        machine_id=data.machine_id,
        ledger=data.ledger,
        health={GpuUuid(uuid): health for uuid, health in data.health.items()},
    )


def _decode(content: bytes, shape: type[_Shape]) -> _Shape:
    try:
        return msgspec.json.decode(content, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateCorrupt(f"it cannot be read: {cap(str(error), 120)}") from error
