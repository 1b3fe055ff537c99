"""The register annotation: what the inventory says against what the API server holds.

Laws: nothing is written when both mean the same; an empty list is never written; a write that
failed is tried again; who fights over the annotation is told, not fought for ever.
"""

import asyncio
import contextlib
import dataclasses
import enum
import random
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import structlog

from agent.codec.register import (
    RegisteredGpu,
    decode_register,
    encode_register,
    registered,
    same_meaning,
)
from agent.core.annotations import HANDSHAKE, REGISTER
from agent.core.changes import NodeEvent
from agent.core.errors import ApiError, ApiThrottled, MalformedText
from agent.core.inventory import Inventory
from agent.core.pods import NodeView
from agent.core.ports import NodeApi
from agent.kit.backoff import Backoff
from agent.kit.cell import Cell
from agent.kit.tally import Tally

log = structlog.get_logger(__name__)

DELAYS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
JITTER = 0.5
SPREAD = 1.0
"""Seconds over which nodes spread a changed inventory; a changed health waits for nobody."""
ROUNDS = 5
FIGHT = 600.0
"""More than so many rounds within so many seconds are a fight; then as long a truce."""

UNSEEN = "the Node has not been seen yet"


class Reason(enum.StrEnum):
    """Why the annotation is written."""

    MISSING = "missing"
    NODE_CREATED = "node-created"
    INVENTORY = "inventory"
    HEALTH = "health"
    FOREIGN = "foreign"
    """We wrote it, and somebody changed it."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReportState:
    """Whether the API server holds what the inventory says; if not, `reason` says why."""

    reported: bool = False
    conflict: bool = False
    reason: str = UNSEEN


@dataclasses.dataclass(frozen=True, slots=True)
class ReportCells:
    """What the reporter reads, and its own state, which it alone writes."""

    inventory: Cell[Inventory]
    node: Cell[NodeView | None]
    state: Cell[ReportState]


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """One write that is due: `text` for the Node `uid`. Urgent: it does not wait its turn."""

    uid: str
    text: str
    reason: Reason
    urgent: bool

    @property
    def target(self) -> tuple[str, str]:
        """What the write is about: equal means that it was tried already."""
        return self.uid, self.text


class Reporter:
    """Keeps the annotation true. `writes` counts by reason, `failures` by the server's code."""

    def __init__(
        self,
        api: NodeApi,
        cells: ReportCells,
        saw: Callable[[NodeView], None],
        conflict: Callable[[NodeEvent], None],
        random: random.Random,
    ) -> None:
        self.writes = Tally(
            "report_writes_total", "Writes of the register annotation.", ("reason",)
        )
        self.failures = Tally(
            "report_failures_total", "Writes of the register annotation that failed.", ("code",)
        )
        self._api = api
        self._cells = cells
        self._saw = saw
        self._conflict = conflict
        self._random = random
        self._backoff = Backoff(DELAYS, JITTER, random)
        self._news = asyncio.Event()
        self._written: tuple[str, str] | None = None
        self._due: float | None = None
        self._failed: tuple[tuple[str, str], ApiError, float] | None = None
        self._rounds: deque[float] = deque()
        self._truce: tuple[tuple[str, str], float] | None = None

    async def run(self) -> None:
        """Keep the annotation true for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._notice(self._cells.inventory))
            group.create_task(self._notice(self._cells.node))
            group.create_task(self._keep())

    async def _notice(self, cell: Cell[Inventory] | Cell[NodeView | None]) -> None:
        async for _ in cell.follow():
            self._news.set()

    async def _keep(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        while True:
            self._news.clear()
            need = self._need()
            if isinstance(need, str):
                self._cells.state.set(ReportState(reported=not need, reason=need))
                self._due = None
                await self._news.wait()
                continue
            left = self._turn(need, loop.time()) - loop.time()
            if left <= 0:
                await self._write(need)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._news.wait()

    def _need(self) -> Need | str:
        """The write that the newest views ask for, or why there is none (empty: all is said)."""
        node, inventory = self._cells.node.value, self._cells.inventory.value
        if node is None:
            return UNSEEN
        held = node.annotations.get(REGISTER)
        known = _decode(held)
        desired = _desired(inventory, known)
        if not desired:
            return "no GPU has been found yet"
        text = encode_register(desired)
        if same_meaning(text, held):
            return ""
        reason = self._reason(node.uid, text, held)
        if reason is Reason.INVENTORY and _bare(desired) == _bare(known):
            reason = Reason.HEALTH
        return Need(node.uid, text, reason, urgent=_health_differs(desired, known))

    def _reason(self, uid: str, text: str, held: str | None) -> Reason:
        if self._written is not None:
            if self._written[0] != uid:
                return Reason.NODE_CREATED
            if self._written[1] == text:
                return Reason.FOREIGN
        return Reason.MISSING if held is None else Reason.INVENTORY

    def _turn(self, need: Need, now: float) -> float:
        """The loop time at which the write may go out."""
        turn = now
        if not need.urgent:
            if self._due is None:
                self._due = now + self._random.uniform(0.0, SPREAD)
            turn = self._due
        return max(turn, self._retry_at(need), self._truce_until(need, now))

    def _retry_at(self, need: Need) -> float:
        """After a failure the same write waits; another one too if the server asked for it."""
        if self._failed is None:
            return 0.0
        target, error, retry_at = self._failed
        waits = target == need.target or isinstance(error, ApiThrottled)
        return retry_at if waits else 0.0

    def _truce_until(self, need: Need, now: float) -> float:
        """When a fight with another writer may go on; a changed inventory ends it."""
        if self._truce is not None and self._truce[0] == need.target and now < self._truce[1]:
            return self._truce[1]
        if self._truce is not None:
            self._truce = None
            self._rounds.clear()
        while self._rounds and self._rounds[0] <= now - FIGHT:
            self._rounds.popleft()
        if need.reason is not Reason.FOREIGN or len(self._rounds) < ROUNDS:
            return 0.0
        self._truce = (need.target, now + FIGHT)
        self._tell_conflict()
        return now + FIGHT

    def _tell_conflict(self) -> None:
        text = (
            f"another writer keeps changing the Node annotation {REGISTER}: stop the other device"
            " plugin of this node; the next try is in 10 minutes or when the GPUs change"
        )
        log.error("report.conflict", rounds=len(self._rounds))
        self._cells.state.set(ReportState(reported=False, conflict=True, reason=text))
        self._conflict(NodeEvent("ReportConflict", text, warning=True))

    async def _write(self, need: Need) -> None:
        try:
            node = await self._api.annotate_node({REGISTER: need.text, HANDSHAKE: None})
        except ApiError as error:
            self._give_up(need, error)
            return
        loop = asyncio.get_running_loop()
        if need.reason is Reason.FOREIGN:
            self._rounds.append(loop.time())
        self._written = need.target
        self._failed = self._due = None
        self._backoff.reset()
        self.writes.add(need.reason.value)
        log.info("report.written", reason=need.reason.value, node_uid=need.uid)
        self._saw(node)

    def _give_up(self, need: Need, error: ApiError) -> None:
        delay = max(self._backoff.next(), error.retry_after or 0.0)
        again = self._failed is not None
        self._failed = (need.target, error, asyncio.get_running_loop().time() + delay)
        self.failures.add(str(error.status or "none"))
        self._cells.state.set(ReportState(reported=False, reason=str(error)))
        if not again:
            log.warning("report.failed", err=str(error), again_in=round(delay, 3))


def _desired(inventory: Inventory, known: tuple[RegisteredGpu, ...]) -> tuple[RegisteredGpu, ...]:
    """What the annotation must say; nothing before the first scan.

    Without any GPU the ones that are known there stay, unhealthy: a scheduler takes an empty list
    for an error and keeps what it had (HAMi pkg/device/devices.go, UnMarshalNodeDevices).
    """
    if inventory.generation == 0:
        return ()
    return registered(inventory) or tuple(dataclasses.replace(gpu, healthy=False) for gpu in known)


def _decode(text: str | None) -> tuple[RegisteredGpu, ...]:
    """The GPUs of the annotation; none when it is absent or no register annotation."""
    if text is None:
        return ()
    try:
        return decode_register(text)
    except MalformedText:
        return ()


def _bare(gpus: tuple[RegisteredGpu, ...]) -> frozenset[RegisteredGpu]:
    return frozenset(dataclasses.replace(gpu, healthy=True) for gpu in gpus)


def _health_differs(desired: tuple[RegisteredGpu, ...], known: tuple[RegisteredGpu, ...]) -> bool:
    """True when a GPU that the annotation names is healthy in one and not in the other."""
    before = {gpu.uuid: gpu.healthy for gpu in known}
    return any(before.get(gpu.uuid, gpu.healthy) != gpu.healthy for gpu in desired)
