"""The state on disk: its encoding, its recovery, and the one writer of the ledger."""

import asyncio
import datetime as dt
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NoReturn, TypeVar

import msgspec
import structlog
from msgspec.structs import asdict

from agent.cluster import NodeEvent
from agent.errors import Refusal, StateCorrupt, StateError, cap
from agent.kit.cell import Cell
from agent.kit.timing import Lag, Tally, await_event
from agent.ledger import PLAIN, ContainerKey, Decider, Holder, JournalEntry, Ledger, Row, State
from agent.model import GpuUuid, Health
from agent.ports import Clock, Disk

# The form of every file in the state directory: JSON with a checksum of its data's exact bytes.
#
# {"kind":"hami-agent-state","version":1,"checksum":"<sha256>","data":{…}}
#
# A file of the next version is read too: unknown keys are ignored, missing ones get their defaults.


class _Envelope(msgspec.Struct, frozen=True):
    """The envelope. `data` keeps its exact bytes for the checksum."""

    kind: str
    version: int
    checksum: str
    data: msgspec.Raw


_Shape = TypeVar("_Shape")

VERSION = 1
"""Of all files that this agent writes."""


def seal(kind: str, value: object) -> bytes:
    """Encode `value` and put it into the envelope."""
    data = msgspec.json.encode(value)
    checksum = hashlib.sha256(data).hexdigest()
    return msgspec.json.encode(_Envelope(kind, VERSION, checksum, msgspec.Raw(data))) + b"\n"


def unseal(content: bytes, kind: str, shape: type[_Shape]) -> _Shape:
    """Decode the data of a file of that kind. Raises StateCorrupt, which says what is wrong."""
    file = _decode(content, _Envelope)
    if file.kind != kind or file.version not in (VERSION, VERSION + 1):
        raise StateCorrupt(
            f"its kind is {cap(file.kind, 40)} and it has version {file.version}; this agent reads "
            f"{kind}, versions {VERSION} and {VERSION + 1}"
        )
    raw = bytes(file.data)
    if hashlib.sha256(raw).hexdigest() != file.checksum:
        raise StateCorrupt("its checksum does not match its data")
    return _decode(raw, shape)


def _decode(content: bytes, shape: type[_Shape]) -> _Shape:
    try:
        return msgspec.json.decode(content, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateCorrupt(f"it cannot be read: {cap(str(error), 120)}") from error


LAST_GOOD_KIND = "hami-agent-settings"  # of the last good copy of the settings
KIND = "hami-agent-state"  # of the checkpoint: the ledger and the health memory

_NOBODY: Final = Holder("", "", "")


class _LedgerData(msgspec.Struct, frozen=True):
    """The rows by who decided them."""

    rows: tuple[dict[str, object], ...] = ()
    plain: tuple[dict[str, object], ...] = ()


def _present_form(fields: Mapping[str, object], decider: Decider) -> Mapping[str, object]:
    """The fields of a row, also of one that version 0.1.0 wrote."""
    if decider is Decider.SCHEDULER:
        names = {name: fields.get(name) for name in ("namespace", "pod")}
        key = msgspec.convert(fields.get("key"), ContainerKey)
        return {"holder": {**names, "container": key.container}, **fields, "decided_by": decider}
    is_known = fields.get("recorded", False) or fields.get("holder") is not None
    key_fields = {"pod_uid": fields.get("uid"), "container": PLAIN}
    return {"key": key_fields, "confirmed": is_known, **fields, "decided_by": decider}


def encode_state(state: State) -> bytes:
    """Encode the state; equal states give equal bytes. A full node takes about half a ms."""
    # Version 0.1.0 looks for an outbox, for the names of a holder beside its row, for `uid` and
    # `recorded`, and for the time of the boot, by which it follows a step of the clock.
    rows = [
        {**asdict(row.holder or _NOBODY), **asdict(row)}
        for row in state.ledger.rows_by(Decider.SCHEDULER)
    ]
    plain = [
        {"uid": row.key.pod_uid, "recorded": row.confirmed, **asdict(row)}
        for row in state.ledger.rows_by(Decider.KUBELET)
    ]
    health = {str(uuid): state.health[uuid] for uuid in sorted(state.health)}
    ledger = {"rows": rows, "outbox": (), "plain": plain}
    return seal(KIND, {**asdict(state), "ledger": ledger, "health": health, "booted_at": None})


def decode_state(content: bytes, machine_id: str = "") -> State:
    """Decode a state, which must be of that machine, if both are known. Raises StateCorrupt."""
    data = unseal(content, KIND, dict[str, object])
    try:
        found = msgspec.convert(data.get("ledger"), _LedgerData)
        rows = [_present_form(fields, Decider.SCHEDULER) for fields in found.rows]
        rows += [_present_form(fields, Decider.KUBELET) for fields in found.plain]
        state = msgspec.convert({**data, "ledger": {"rows": rows}}, State)
    except msgspec.ValidationError as error:
        raise StateCorrupt(f"it cannot be read: {cap(str(error), 120)}") from error
    if machine_id and state.machine_id not in {"", machine_id}:
        raise StateCorrupt("it belongs to another machine")
    return msgspec.structs.replace(state, machine_id=machine_id or state.machine_id)


# The durable state: sole writer of the ledger. A change is published, and `commit` returns, once it
# is on disk. Changes that arrive during a write share the next write.

log = structlog.get_logger(__name__)

CURRENT = "state.json"
PREVIOUS = "state.previous.json"
UNREADABLE = "state.unreadable.json"
"""A copy of the last unreadable CURRENT, for analysis: another version may have written it."""

RETRY = 0.5
"""Seconds after a failed write until the next one: no slice is on offer until one succeeds."""

COMMIT_DEADLINE = 10.0
"""Seconds after which a running write sets `error`, until it ends. No `commit` waits for longer."""

LAST_WRITE = 2.0  # seconds for the last write when the service ends

Change = Callable[[Ledger], Ledger]


class Recovered(msgspec.Struct, frozen=True):
    """The state with which the agent starts.

    `notice`: what the operator should know about the recovery; empty: nothing. `keep`: the name
    that CURRENT gets at the next write.
    """

    state: State
    notice: str = ""
    keep: str = PREVIOUS


async def recover(disk: Disk, *, boot_id: str, machine_id: str) -> Recovered:
    """The newest readable generation of this host, or an empty one. Nothing is written.

    If none is usable, reconcile rebuilds the rows from annotations and the kubelet. Raises
    StateError if a file could not be read, as opposed to being unusable. Without a machine id, as
    in a container, the state of any machine is accepted.
    """
    problems: list[StateError] = []
    is_new = True
    for name in (CURRENT, PREVIOUS):
        try:
            content = await disk.read(name)
            if content is not None:
                is_new = False
                state = decode_state(content, machine_id)
                break
            problems.append(StateCorrupt(f"{name} is missing"))
        except StateCorrupt as error:
            problems.append(StateCorrupt(f"{name} is not usable: {error}"))
        except StateError as error:
            problems.append(error)
    else:
        # A file that cannot be read may be whole: rows that it has must not be lost.
        for problem in problems:
            if not isinstance(problem, StateCorrupt):
                raise problem
        state = State(boot_id=boot_id, machine_id=machine_id)

    if not problems or is_new:
        return Recovered(state)

    # The next write must not make an unreadable file the previous generation.
    outcome = "rebuilding from the pods' annotations and the kubelet"
    if state.generation:
        outcome = f"continued from generation {state.generation} in {PREVIOUS}"
    notice = (
        f"{'; '.join(map(str, problems))}; {outcome}; the unusable file is kept as {UNREADABLE}"
    )
    return Recovered(state, notice, UNREADABLE)


class StateService:
    """Writes generations, one at a time. `commit()` returns only while `run()` is running."""

    def __init__(self, *, disk: Disk, recovered: State, boot_id: str, keep: str = PREVIOUS) -> None:
        self._disk = disk
        self._keep = keep
        self._state = msgspec.structs.replace(recovered, boot_id=boot_id)
        self._waiting: dict[asyncio.Future[None], Change] = {}
        self._health = recovered.health
        self._news = asyncio.Event()
        self._is_late = self._is_proven = False
        self._lag = Lag()
        self.is_idle = True
        """False while a write runs."""
        self.ledger: Cell[Ledger] = Cell(recovered.ledger)
        self.error: Cell[str] = Cell("")
        self.errors = Tally("checkpoint_errors_total", "Failed writes of the state file.")

    @property
    def health(self) -> Mapping[GpuUuid, Health]:
        """The health of GPUs on disk."""
        return self._state.health

    async def commit(self, change: Change) -> None:
        """Apply `change` to the ledger. Returns when the result is on disk and published.

        Raises StateError if it could not be written; then nothing has changed. Once a write has
        taken COMMIT_DEADLINE, and until it ends, every caller gets StateError. Then, or if the
        caller is cancelled, a running write continues, so `change` may still be written.
        """
        if self._is_late:
            raise StateError(self.error.value)
        done = asyncio.get_running_loop().create_future()
        self._waiting[done] = change
        self._news.set()
        try:
            await done
        finally:
            self._waiting.pop(done, None)

    def remember(self, health: Mapping[GpuUuid, Health]) -> None:
        """Write `health` with the next write, soon. No caller is notified."""
        self._health = dict(health)
        self._news.set()

    async def run(self) -> NoReturn:
        """Write whenever a change waits. After a failed write, try again each RETRY seconds.

        When cancelled, it writes once more.
        """
        try:
            while True:
                await await_event(self._news, RETRY if self.error.value else None)
                self._news.clear()
                await self.flush()
        finally:
            # A second cancellation ends this task, not the write.
            await asyncio.shield(self._finish())

    async def _finish(self) -> None:
        try:
            async with asyncio.timeout(LAST_WRITE):
                await self.flush()
        except TimeoutError:
            log.warning("state.last_write_lost", after=LAST_WRITE, place=self._disk.place)

    async def flush(self) -> None:
        """Write one generation with the changes that wait, publish it and end their `commit`s."""
        batch = {done: one for done, one in self._waiting.items() if not done.done()}
        self._waiting = {}
        error: StateError | None = StateError("the agent stopped before the disk had it")
        self.is_idle = False
        try:
            ledger = self._state.ledger
            for change in batch.values():
                ledger = change(ledger)

            state = msgspec.structs.replace(self._state, ledger=ledger, health=self._health)
            if state != self._state or self.error.value or not self._is_proven:
                state = msgspec.structs.replace(state, generation=state.generation + 1)
                with self._lag.alarm(COMMIT_DEADLINE, lambda _: self._hung(batch)):
                    await self._disk.replace(CURRENT, encode_state(state), keep=self._keep)

                self._state, self._keep, self._is_proven = state, PREVIOUS, True
                if self.error.set(""):
                    log.info("state.writable", generation=state.generation)

            error = None
        except StateError as failure:
            self._failed(str(failure), batch)
        finally:
            self.is_idle, self._is_late = True, False
            _resolve(batch, error)

        # In this order, the callers continue before the followers of the ledger.
        self.ledger.set(self._state.ledger)

    def _hung(self, batch: Iterable[asyncio.Future[None]]) -> None:
        place = self._disk.place
        text = f"the disk has not answered for {COMMIT_DEADLINE:g} s: look at {place}'s disk"
        self._failed(text, [*batch, *self._waiting])
        self._is_late = True

    def _failed(self, text: str, calls: Iterable[asyncio.Future[None]]) -> None:
        """Say that the state cannot be written, and end the calls that wait for it."""
        if not self._is_late:  # a write that hung is already counted
            self.errors.add()
        if self.error.set(text):
            log.error("state.unwritable", err=text)
        _resolve(calls, StateError(text))


def _resolve(batch: Iterable[asyncio.Future[None]], error: StateError | None) -> None:
    for done in (done for done in batch if not done.done()):
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


KEPT: Final = dt.timedelta(hours=24)
LIMIT: Final = 500
"""Entries of each kind. The oldest give way, as when one pod is refused again and again."""


class NodeJournal:
    """The changes (Events about Node or pods) and refusals since the start. Logs are the record."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.changes: deque[JournalEntry] = deque(maxlen=LIMIT)
        self.refusals: deque[JournalEntry] = deque(maxlen=LIMIT)
        self.started = clock.now()

    @property
    def since(self) -> dt.datetime:
        """What was before is not known."""
        return max(self.started, self._clock.now() - KEPT)

    def changed(self, event: NodeEvent) -> None:
        """Record an Event of the agent."""
        what = event.reason, event.text, event.warning, event.namespace, event.pod
        self.changes.append(JournalEntry(self._clock.now(), *what))

    def refused(self, refusal: Refusal, row: Row | None) -> None:
        """Record a refusal. `row`: what would have been answered, if it is known."""
        holder = row.holder if row and row.holder else _NOBODY
        entry = JournalEntry(self._clock.now(), refusal.gate.value, refusal.sentence)
        self.refusals.append(msgspec.structs.replace(entry, **asdict(holder)))

    def recent(self, entries: deque[JournalEntry]) -> tuple[JournalEntry, ...]:
        """Those of the last 24 h, the newest first."""
        oldest = self._clock.now() - KEPT
        return tuple(entry for entry in reversed(entries) if entry.at > oldest)
