"""The checkpoint: the ledger, its outbox and the health memory, in an envelope with a checksum.

Unknown keys are ignored and missing ones get their defaults, so a downgrade by one version keeps
every row.
"""

import datetime as dt

import msgspec

from agent.codec.envelope import seal, unseal
from agent.core.cluster.pods import DEFAULT_PRIORITY, PodUid, Role
from agent.core.containers.edits import ContainerEdits
from agent.core.inventory.condition import Health
from agent.core.inventory.gpu import GpuUuid
from agent.core.inventory.share import Share
from agent.core.inventory.slices import SliceId
from agent.core.state.holdings import KubeletEpoch
from agent.core.state.ledger import PLAIN, ContainerKey, Decider, Effect, Holder, Ledger, Row
from agent.core.state.state import State

KIND = "hami-agent-state"
VERSION = 1


class _ScheduledRow(msgspec.Struct, frozen=True):
    """A row that the scheduler decided, in the order of its keys."""

    key: ContainerKey
    namespace: str
    pod: str
    role: Role
    group: int
    shares: tuple[Share, ...]
    slice_ids: tuple[SliceId, ...]
    edits: ContainerEdits
    answered_at: dt.datetime
    epoch: KubeletEpoch
    confirmed: bool = False
    offered: bool = False
    told: bool = False
    resource: str = ""
    lock: str = ""
    priority: int = DEFAULT_PRIORITY
    live_limits: tuple[Share, ...] = ()

    def row(self) -> Row:
        """What it says."""
        values = msgspec.structs.asdict(self)
        where = values.pop("namespace"), values.pop("pod"), self.key.container
        return Row(holder=Holder(*where), **values)


class _PlainRow(msgspec.Struct, frozen=True):
    """A row that the kubelet decided. `uid` is its drawn UID; `recorded`: it was ever confirmed."""

    uid: PodUid
    slice_ids: tuple[SliceId, ...]
    shares: tuple[Share, ...]
    edits: ContainerEdits
    answered_at: dt.datetime
    epoch: KubeletEpoch
    holder: Holder | None = None
    recorded: bool = False
    adopted: bool = False
    resource: str = ""
    live_limits: tuple[Share, ...] = ()

    def row(self) -> Row:
        """What it says."""
        values = msgspec.structs.asdict(self)
        confirmed = values.pop("recorded") or self.holder is not None
        key = ContainerKey(values.pop("uid"), PLAIN)
        return Row(key=key, decided_by=Decider.KUBELET, confirmed=confirmed, **values)


def _written(row: Row) -> dict[str, object]:
    """The row as the file has it. Live limits are left out where nobody has set any."""
    is_scheduled = row.decided_by is Decider.SCHEDULER
    form: type[msgspec.Struct] = _ScheduledRow if is_scheduled else _PlainRow
    others = {} if is_scheduled else {"uid": row.key.pod_uid, "recorded": row.confirmed}
    return {
        name: others[name] if name in others else getattr(row, name)
        for name in form.__struct_fields__
        if name != "live_limits" or row.live_limits
    }


class _LedgerData(msgspec.Struct, frozen=True):
    """The rows by who decided them, and the outbox."""

    rows: tuple[_ScheduledRow, ...] = ()
    outbox: tuple[Effect, ...] = ()
    plain: tuple[_PlainRow, ...] = ()


class _StateData(msgspec.Struct, frozen=True):
    """The payload, as decoded."""

    generation: int
    boot_id: str
    machine_id: str
    ledger: _LedgerData
    health: dict[str, Health]
    booted_at: dt.datetime | None = None


class StateEncoder:
    """Encodes successive states. A row of the last one is not encoded again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Row, msgspec.Raw]] = {}

    def encode(self, state: State) -> bytes:
        """Encode a state; equal states give equal bytes."""
        ledger, health = state.ledger, state.health
        before = self._known
        # By identity: hashing a row takes longer than encoding it. The entry keeps the row alive.
        self._known = {
            id(row): before.get(id(row)) or (row, msgspec.Raw(msgspec.json.encode(_written(row))))
            for row in ledger.rows
        }
        data = msgspec.json.encode(
            {
                "generation": state.generation,
                "boot_id": state.boot_id,
                "machine_id": state.machine_id,
                "ledger": {
                    "rows": self._encoded(ledger, Decider.SCHEDULER),
                    "outbox": ledger.outbox,
                    "plain": self._encoded(ledger, Decider.KUBELET),
                },
                "health": {str(uuid): health[uuid] for uuid in sorted(health)},
                "booted_at": state.booted_at,
            }
        )
        return seal(KIND, VERSION, data)

    def _encoded(self, ledger: Ledger, decider: Decider) -> list[msgspec.Raw]:
        return [self._known[id(row)][1] for row in ledger.rows if row.decided_by is decider]


def decode_state(content: bytes) -> State:
    """Decode the state in `content`. Raises StateCorrupt, which says what is wrong."""
    data = unseal(content, KIND, VERSION, _StateData)
    found = data.ledger
    return State(
        generation=data.generation,
        boot_id=data.boot_id,
        machine_id=data.machine_id,
        ledger=Ledger(
            (*(one.row() for one in found.rows), *(one.row() for one in found.plain)), found.outbox
        ),
        health={GpuUuid(uuid): health for uuid, health in data.health.items()},
        booted_at=data.booted_at,
    )
