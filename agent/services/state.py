"""The durable state: sole writer of the ledger. It writes to disk before it publishes.

A change is published, and `commit` returns, once its generation is on disk. Changes that arrive
during a write share the next write. Health is written too, but no caller waits for it. While a
write hangs, `error` says so.
"""

import asyncio
import contextlib
import datetime as dt
from collections import deque
from collections.abc import Callable, Mapping
from typing import NoReturn

import msgspec
import structlog

from agent.codec.checkpoint import StateEncoder, decode_state
from agent.core.errors import StateCorrupt, StateError
from agent.core.health.memory import stepped
from agent.core.inventory.condition import Health
from agent.core.inventory.gpu import GpuUuid
from agent.core.ports import Disk
from agent.core.state.ledger import Ledger
from agent.core.state.state import State
from agent.kit.cell import Cell
from agent.kit.running_time import Lag
from agent.kit.tally import Tally

log = structlog.get_logger(__name__)

CURRENT = "state.json"
PREVIOUS = "state.previous.json"
UNREADABLE = "state.unreadable.json"
PREVIOUS_UNREADABLE = "state.previous.unreadable.json"
"""Copies of unreadable generations, kept for analysis."""

_ASIDE = {CURRENT: UNREADABLE, PREVIOUS: PREVIOUS_UNREADABLE}

RETRY = 0.5
"""Seconds after a failed write until the next one: no slice is on offer until one succeeds."""

COMMIT_DEADLINE = 10.0
"""Seconds after which a running write sets `error`, until it ends. No `commit` waits for longer."""

LAST_WRITE = 2.0
"""Seconds for the last write when the service ends."""

Change = Callable[[Ledger], Ledger]


class Recovered(msgspec.Struct, frozen=True):
    """The state with which the agent starts.

    `notice`: what the operator should know about the recovery. Empty if the newest generation was
    readable or the node is new. If no generation was readable, the ledger is empty, and reconcile
    rebuilds the rows from annotations and the kubelet.
    """

    state: State
    notice: str = ""


async def recover(
    disk: Disk,
    *,
    boot_id: str,
    machine_id: str,
    booted_at: dt.datetime | None = None,
) -> Recovered:
    """The newest readable generation of this host, or an empty one.

    - If the newest generation is unreadable, the one before it is used, and `notice` says so.
    - If none is readable, copies are kept: they may be of another version of the agent.
    - `booted_at`: the time of the boot by the present clock. Within one boot, the times of health
      follow a step of the clock.
    - Without a machine id, as in a container, the state of any machine is accepted.

    Raises:
        StateError: a file could not be read, as opposed to being unusable.
    """
    problems: list[StateError] = []
    found: dict[str, bytes] = {}
    for name in (CURRENT, PREVIOUS):
        try:
            found[name] = content = await _content(disk, name)
            state = _decoded(content, name, machine_id)
            before = state.booted_at if state.boot_id == boot_id else None
            state = msgspec.structs.replace(
                state,
                health={u: stepped(one, before, booted_at) for u, one in state.health.items()},
                booted_at=booted_at,
            )
        except StateError as error:
            problems.append(error)
            continue
        if not problems:
            return Recovered(state)
        notice = f"{_joined(problems)}; continued from generation {state.generation} in {name}"
        return Recovered(state, notice + await _mend(disk, content))
    empty = State(boot_id=boot_id, machine_id=machine_id, booted_at=booted_at)
    if all(isinstance(problem, _Missing) for problem in problems):
        return Recovered(empty)
    for problem in problems:
        if not isinstance(problem, StateCorrupt):
            raise problem
    notice = f"{_joined(problems)}; rebuilding from the pods' annotations and the kubelet"
    return Recovered(empty, notice + await _keep_aside(disk, found))


class _Missing(StateCorrupt):
    """A generation does not exist."""


async def _content(disk: Disk, name: str) -> bytes:
    content = await disk.read(name)
    if content is None:
        raise _Missing(f"{name} is missing")
    return content


def _decoded(content: bytes, name: str, machine_id: str) -> State:
    try:
        state = decode_state(content)
    except StateCorrupt as error:
        raise StateCorrupt(f"{name} is not usable: {error}") from error
    if machine_id and state.machine_id not in {"", machine_id}:
        raise StateCorrupt(f"{name} is not usable: it belongs to another machine")
    return msgspec.structs.replace(state, machine_id=machine_id or state.machine_id)


def _joined(problems: list[StateError]) -> str:
    return "; ".join(map(str, problems))


async def _mend(disk: Disk, content: bytes) -> str:
    """Write the only readable generation back as the newest one. Returns a notice.

    Otherwise the next write would keep the unreadable file as the previous generation.
    """
    try:
        await disk.replace(CURRENT, content, keep=UNREADABLE)
    except StateError as error:
        return f"; {error}"
    return ""


async def _keep_aside(disk: Disk, found: Mapping[str, bytes]) -> str:
    """Copy the unreadable generations, because two writes replace them. Returns a notice."""
    notice = ""
    for name, content in found.items():
        try:
            await disk.replace(_ASIDE[name], content)
        except StateError as error:
            notice += f"; {error}"
        else:
            notice += f"; {name} is kept as {_ASIDE[name]}"
    return notice


class _WaitingCommit(msgspec.Struct, eq=False):
    change: Change
    done: asyncio.Future[None]


class StateService:
    """Writes generations, one at a time. `commit()` returns only while `run()` is running."""

    def __init__(self, *, disk: Disk, recovered: State, boot_id: str, limit: int = 1024) -> None:
        self._disk = disk
        self._encoder = StateEncoder()
        self._state = msgspec.structs.replace(recovered, boot_id=boot_id)
        self._waiting: deque[_WaitingCommit] = deque()
        self._health: Mapping[GpuUuid, Health] | None = None
        self._news = asyncio.Event()
        self._writing = asyncio.Lock()
        self._limit = limit
        self._is_late = False
        self._lag = Lag()
        self.ledger: Cell[Ledger] = Cell(recovered.ledger)
        self.error: Cell[str] = Cell("")
        self.errors = Tally("checkpoint_errors_total", "Failed writes of the state file.")

    @property
    def generation(self) -> int:
        """The number of the generation on disk."""
        return self._state.generation

    @property
    def is_idle(self) -> bool:
        """True while no write runs."""
        return not self._writing.locked()

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
        if len(self._waiting) >= self._limit:
            raise StateError(f"{self._limit} changes already wait for the disk; look at its health")
        waiting = _WaitingCommit(change, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._news.set()
        try:
            await waiting.done
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(waiting)

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
                try:
                    async with asyncio.timeout(RETRY if self.error.value else None):
                        await self._news.wait()
                except TimeoutError:
                    log.debug("state.tried_again", after=RETRY)
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
        """Write the changes that wait now, after the running write."""
        async with self._writing:
            batch = [waiting for waiting in self._waiting if not waiting.done.done()]
            self._waiting.clear()
            try:
                await self._write(batch)
            except StateError as error:
                self._failed(error)
                _resolve(batch, error)
            finally:
                _resolve(batch, StateError("the agent stopped before the disk had it"))

    async def _write(self, batch: list[_WaitingCommit]) -> None:
        """Write one generation with these changes, publish it and end their `commit` calls."""
        ledger = self._state.ledger
        for waiting in batch:
            ledger = waiting.change(ledger)
        health = self._state.health if self._health is None else self._health
        unchanged = ledger == self._state.ledger and health == self._state.health
        if not unchanged or self.error.value:
            generation = self._state.generation + 1
            state = msgspec.structs.replace(
                self._state, generation=generation, ledger=ledger, health=health
            )
            with self._lag.alarm(COMMIT_DEADLINE, lambda _: self._tell_late(batch)):
                content = self._encoder.encode(state)
                await self._disk.replace(CURRENT, content, keep=PREVIOUS)
            self._state, self._is_late = state, False
            if self.error.set(""):
                log.info("state.writable", generation=generation)
        if self._health == health:
            self._health = None
        # In this order, the callers continue before the followers of the ledger.
        _resolve(batch, None)
        self.ledger.set(ledger)

    def _tell_late(self, batch: list[_WaitingCommit]) -> None:
        """Set `error` while the write hangs; end the calls that wait for it."""
        silence = f"the disk has not answered for {COMMIT_DEADLINE:g} s"
        text = f"{silence}: look at {self._disk.place}'s disk"
        self._is_late = True
        self.errors.add()
        log.error("state.unanswered", err=text)
        self.error.set(text)
        _resolve([*batch, *self._waiting], StateError(text))

    def _failed(self, error: StateError) -> None:
        if not self._is_late:  # a write that hung is already counted
            self.errors.add()
        self._is_late = False
        if self.error.set(str(error)):
            log.error("state.unwritable", err=str(error))


def _resolve(batch: list[_WaitingCommit], error: StateError | None) -> None:
    """End the `commit` calls that still wait."""
    for waiting in batch:
        if waiting.done.done():
            continue
        if error is None:
            waiting.done.set_result(None)
        else:
            waiting.done.set_exception(error)
