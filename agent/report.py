"""Keeps the report on the Node true, and tells people: Events and the condition of the Node."""

import asyncio
import contextlib
import enum
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

import msgspec
import structlog

from agent.allocate.room import takes_room
from agent.cluster import (
    CORDON,
    HANDSHAKE,
    REGISTER,
    SCORE,
    NodeCondition,
    NodeEvent,
    NodeView,
    PodTable,
)
from agent.errors import ApiError, ApiThrottled
from agent.hami.register import NodeReport, ReportSettings, encode_reported, report_of
from agent.health.news import believed, gpu_degraded, gpu_events, turning
from agent.kit.cell import Cell
from agent.kit.tasks import Backoff, Throttle
from agent.kit.timing import Tally
from agent.ledger import Ledger
from agent.model import Cause, GpuFault, GpuUuid, Inventory, Trouble
from agent.node.devices import cordon_events, read_cordon
from agent.ports import Clock, NodeApi, PodApi

# Posts Events about this Node in order, with best effort. An Event is never the only record.

log = structlog.get_logger(__name__)

LIMIT = 256
"""Events that may wait. When more come, the oldest is dropped and counted."""

AGAIN = 5.0
"""Seconds until a post that failed is tried again."""


WARN_PERIOD = 60.0
"""Seconds between two warnings that Events are refused: a tenant can cause many."""


class NodeEventQueue:
    """A queue of at most LIMIT Events. `noted` hears of each one that is queued."""

    def __init__(self, noted: Callable[[NodeEvent], None] = lambda _: None) -> None:
        self._noted = noted
        self._line: deque[NodeEvent] = deque()
        self._news = asyncio.Event()
        self.unposted = Tally(
            "events_unposted_total",
            "Events that no API server keeps, by what became of them instead.",
            ("reason", "outcome"),
        )

    def say(self, event: NodeEvent) -> None:
        """Queue the event unless it equals the last one in the queue. Never waits."""
        if self._line and self._line[-1] == event:
            return
        if len(self._line) >= LIMIT:
            self.unposted.add(self._line.popleft().reason, "dropped")
        self._line.append(event)
        self._noted(event)
        self._news.set()

    async def first(self) -> NodeEvent:
        """Wait for the first event in the queue; it stays in the queue."""
        while not self._line:
            self._news.clear()
            await self._news.wait()
        return self._line[0]

    @property
    def waiting(self) -> tuple[NodeEvent, ...]:
        """All events in the queue, the first one first."""
        return tuple(self._line)

    def put_behind(self, event: NodeEvent) -> None:
        """Let others go first if it is about a pod: its namespace alone may take no Event now."""
        if event.pod and self._line and self._line[0] is event:
            self._line.rotate(-1)

    def done(self, event: NodeEvent, outcome: str = "") -> None:
        """Remove the event if it is the first one in the queue.

        `outcome`: what happened to an event that was not posted; empty: it was posted.
        """
        if outcome:
            self.unposted.add(event.reason, outcome)
        if self._line and self._line[0] is event:
            self._line.popleft()


class Announcer:
    """Posts the queued events; without an API server to post them to it logs them."""

    def __init__(self, api: PodApi | None, notices: NodeEventQueue) -> None:
        self._api = api
        self._notices = notices
        self._refused = Throttle(WARN_PERIOD)

    async def run(self) -> NoReturn:
        """Post one event after the other, for ever."""
        while True:
            event = await self._notices.first()
            if self._api is None:
                level = log.warning if event.warning else log.info
                of = {"ns": event.namespace, "pod": event.pod} if event.pod else {}
                level("event.logged", reason=event.reason, **of, text=event.text)
                self._notices.done(event, "logged")
                continue
            try:
                await self._api.post_event(event)
            except ApiError as error:
                if error.status in range(400, 500) and error.status != 429:
                    if (others := self._refused.admit()) is not None:
                        text = str(error)
                        log.warning("event.refused", reason=event.reason, others=others, err=text)
                    self._notices.done(event, "refused")
                else:
                    self._notices.put_behind(event)
                    await asyncio.sleep(error.retry_after or AGAIN)
            else:
                self._notices.done(event)


# Writes an Event when a GPU of this Node is cordoned or uncordoned, by whatever program.


class CordonEvents:
    """Follows the cordon annotation of the Node. What it is at the first look makes no Event."""

    def __init__(
        self,
        node: Cell[NodeView | None],
        inventory: Cell[Inventory],
        say: Callable[[NodeEvent], None],
    ) -> None:
        self._node = node
        self._inventory = inventory
        self._say = say

    async def run(self) -> None:
        """Follow the Node until the cell closes."""
        before: frozenset[str] | None = None
        async for node in self._node.follow():
            if node is None:
                continue
            now = frozenset(read_cordon(node.annotations.get(CORDON)))
            for event in cordon_events(
                now if before is None else before, now, self._inventory.value.gpus
            ):
                self._say(event)
            before = now


# Writes Events when GPUs change or are left out, and the Node condition GpuDegraded.

CALM: Final = 30.0
"""Seconds that a change which may reverse (`turning`) must last before its Event."""

WAKING: Final = 30.0
"""Seconds without an answer before a GPU is reported as left out: it may be initialising."""


class GpuEvents:
    """Writes Events for the differences from one inventory to the next.

    The first inventory makes no Event, so a restarted agent does not repeat Events. `left_out`: the
    GPUs about which LeftOut writes Events.
    """

    def __init__(
        self,
        inventory: Cell[Inventory],
        ledger: Cell[Ledger],
        pods: Cell[PodTable],
        left_out: Cell[tuple[GpuFault, ...]],
        say: Callable[[NodeEvent], None],
    ) -> None:
        self._inventory = inventory
        self._ledger = ledger
        self._pods = pods
        self._left_out = left_out
        self._say = say
        self._said: Inventory | None = None
        self._unsaid: dict[GpuUuid, float] = {}
        """The GPUs whose Events are held back, and since when (loop time)."""

    async def run(self) -> None:
        """Follow the inventory until the cell closes."""
        changes = self._inventory.follow()
        loop = asyncio.get_running_loop()
        while True:
            due = min(self._unsaid.values()) + CALM if self._unsaid else None
            try:
                async with asyncio.timeout_at(due):
                    inventory = await anext(changes)
            except TimeoutError:
                inventory = self._inventory.value
            except StopAsyncIteration:
                return
            if inventory.generation == 0:  # the driver was not asked yet
                continue
            said, now = self._said or inventory, loop.time()
            began = {uuid: self._unsaid.get(uuid, now) for uuid in turning(said, inventory)}
            self._unsaid = {uuid: since for uuid, since in began.items() if now < since + CALM}
            self._said = believed(said, inventory, self._unsaid)
            left_out = {fault.gpu for fault in self._left_out.value}
            # A row stays for a while after its pod has ended.
            rows, pods = self._ledger.value.rows, self._pods.value
            holding = Ledger(tuple(row for row in rows if takes_room(row, pods)))
            for event in gpu_events(said, self._said, holding, left_out):
                self._say(event)


class LeftOut:
    """Writes an Event for each GPU that is left out, and another when the reason changes.

    - For a GPU that does not answer, it waits WAKING seconds: GPUs take seconds to initialise.
    - A lost or unhealthy GPU that is still in the inventory gets no Event here, because GpuEvents
      has written one. Exception: health checks are off.
    """

    def __init__(
        self,
        left_out: Cell[tuple[GpuFault, ...]],
        inventory: Cell[Inventory],
        say: Callable[[NodeEvent], None],
    ) -> None:
        self._left_out = left_out
        self._inventory = inventory
        self._say = say

    async def run(self) -> None:
        """Follow what is left out until the cell closes."""
        seen: frozenset[GpuFault] = frozenset()
        async with asyncio.TaskGroup() as tasks:
            waiting: set[asyncio.Task[None]] = set()
            async for faults in self._left_out.follow():
                for fault in faults:
                    if fault in seen:
                        continue
                    if fault.trouble is Trouble.SILENT:
                        waiting.add(task := tasks.create_task(self._tell_later(fault)))
                        task.add_done_callback(waiting.discard)
                    else:
                        self._tell(fault)
                seen = frozenset(faults)
            for task in waiting:
                task.cancel()

    async def _tell_later(self, fault: GpuFault) -> None:
        await asyncio.sleep(WAKING)
        if fault in self._left_out.value:
            self._tell(fault)

    def _tell(self, fault: GpuFault) -> None:
        known = self._inventory.value.find(GpuUuid(fault.gpu))
        if (
            known is not None
            and known.health.cause != Cause.OFF
            and (fault.lost or not known.health.serving)
        ):
            return  # GpuEvents has told it
        text = f"GPU {fault.gpu} is not shared: {fault.text} [GpuLeftOut]"
        self._say(NodeEvent("GpuLeftOut", text, warning=True))


class GpuCondition:
    """Keeps the Node condition GpuDegraded up to date. `write` creates or replaces it."""

    def __init__(
        self,
        write: Callable[[NodeCondition], Awaitable[None]],
        inventory: Cell[Inventory],
        clock: Clock,
    ) -> None:
        self._write = write
        self._inventory = inventory
        self._clock = clock
        self._written: NodeCondition | None = None

    async def run(self) -> None:
        """Follow the inventory until the cell closes. Raises ApiError; it can be started again.

        It does not write a condition that differs only in `since`.
        """
        async for inventory in self._inventory.follow():
            if inventory.generation == 0:
                continue
            wanted, written = gpu_degraded(inventory, self._clock.now()), self._written
            if written is not None:
                if (wanted.status, wanted.message) == (written.status, written.message):
                    continue
                if wanted.status == written.status:  # it has lasted since then
                    wanted = msgspec.structs.replace(wanted, since=written.since)
            await self._write(wanted)
            self._written = wanted


# Keeps the Node's register annotation equal to the inventory.
#
# - The reporter writes only if the two differ in meaning, whoever wrote the annotation.
# - It never writes an empty list. It repeats a failed write, soon once a lost API server is back.
# - If another writer keeps changing the annotation, it stops for 10 minutes and posts an Event.
# - It stamps every 30 s only for schedulers up to and including 2.7.1: they drop a node after 60 s.

DELAYS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
JITTER = 0.5
SPREAD = 1.0
"""Seconds over which nodes spread their writes of a changed inventory, and their writes to an API
server that is back. A changed health is written at once."""
ROUNDS = 5
FIGHT = 600.0
"""After ROUNDS corrections within FIGHT seconds, the reporter stops for FIGHT seconds."""
CONFLICT = (
    f"another writer keeps changing the Node annotation {REGISTER}: stop the other device plugin of"
    " this node; the next try is in 10 minutes or when the GPUs change"
)
TICK = 0.001
"""Seconds: less than a clock may resolve. A write that is due so soon is made now."""
STAMP_EVERY = 30.0
"""Seconds between stamps."""

UNSEEN = "the Node has not been seen yet"


class Reason(enum.StrEnum):
    """Why the annotation is written."""

    MISSING = "missing"
    NODE_CREATED = "node-created"
    INVENTORY = "inventory"
    HEALTH = "health"
    SCORE = "score"
    """Only the score annotation differs."""
    FOREIGN = "foreign"
    """Another writer changed what the agent wrote."""
    STAMP = "stamp"
    """Nothing differs, but the scheduler needs a stamp."""


class ReportState(msgspec.Struct, frozen=True):
    """Whether the API server holds the report of the inventory; `reason`: why not."""

    reported: bool = False
    reason: str = UNSEEN


class ReportCells(msgspec.Struct, frozen=True):
    """The facts that the reporter reads, and `state`, which it alone writes.

    `returns`: how often the API server came back after it was lost.
    """

    inventory: Cell[Inventory]
    node: Cell[NodeView | None]
    returns: Cell[int]
    settings: Cell[ReportSettings]
    state: Cell[ReportState]


Target = tuple[str, str, str | None]
"""The UID of the Node, and the texts of its register and score annotations."""


class DueWrite(msgspec.Struct, frozen=True):
    """One write to the Node `uid` that is due."""

    uid: str
    report: NodeReport
    reason: Reason

    @property
    def target(self) -> Target:
        """What the write is about. Equal targets: the same write."""
        return self.uid, self.report.register, self.report.score


class Reporter:
    """Writes the annotation. `writes` counts by reason, `failures` by HTTP status."""

    def __init__(
        self,
        api: NodeApi,
        cells: ReportCells,
        saw: Callable[[NodeView], None],
        say: Callable[[NodeEvent], None],
        clock: Clock,
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
        self._say = say
        self._clock = clock
        self._random = random
        self._backoff = Backoff(DELAYS, JITTER, random)
        self._news = asyncio.Event()
        self._written: Target | None = None
        self._due: float | None = None
        self._stamped: float | None = None
        self._failed: tuple[Target, ApiError, float] | None = None
        self._rounds: deque[float] = deque()
        self._truce: tuple[Target, float] | None = None

    async def run(self) -> None:
        """Keep the annotation equal to the inventory for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._notice(self._cells.inventory))
            group.create_task(self._notice(self._cells.node))
            group.create_task(self._notice(self._cells.settings))
            group.create_task(self._come_back())
            group.create_task(self._keep())

    async def _notice(
        self, cell: Cell[Inventory] | Cell[NodeView | None] | Cell[ReportSettings]
    ) -> None:
        async for _ in cell.follow():
            self._news.set()

    async def _come_back(self) -> None:
        """Repeat a failed write soon after the API server is back, unless it asked to wait."""
        async for _ in self._cells.returns.follow():
            if self._failed is None:
                continue
            target, error, retry_at = self._failed
            if not _asks_to_wait(error):
                soon = asyncio.get_running_loop().time() + self._random.uniform(0.0, SPREAD)
                self._failed = target, error, min(retry_at, soon)
                self._backoff.reset()
                self._news.set()

    async def _keep(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        while True:
            self._news.clear()
            need = self._need()
            if isinstance(need, str):
                self._rest(need)
                await self._news.wait()
                continue
            if need.reason is Reason.STAMP and self._failed is None:
                self._rest("")
            left = self._turn(need, loop.time()) - loop.time()
            if left < TICK:
                await self._write(need)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._news.wait()

    def _rest(self, reason: str) -> None:
        """Publish that nothing differs (`reason` is empty), or why there is no report yet."""
        self._cells.state.set(ReportState(reported=not reason, reason=reason))
        self._due = None

    def _need(self) -> DueWrite | str:
        """The write that is due, or why there is no report yet (empty: nothing differs)."""
        node, settings = self._cells.node.value, self._cells.settings.value
        if node is None:
            return UNSEEN
        report = report_of(self._cells.inventory.value, node.annotations, settings)
        if report is None:
            return "no GPU has been found yet"
        if report.is_said:
            if settings.profile.stamps:
                return DueWrite(node.uid, report, Reason.STAMP)
            return ""
        reason = Reason.HEALTH if report.is_health_alone else Reason.INVENTORY
        if self._written is not None and self._written[0] != node.uid:
            reason = Reason.NODE_CREATED
        elif self._written == (node.uid, report.register, report.score):
            reason = Reason.FOREIGN
        elif REGISTER not in node.annotations:
            reason = Reason.MISSING
        elif not report.register_differs:
            reason = Reason.SCORE
        return DueWrite(node.uid, report, reason)

    def _turn(self, need: DueWrite, now: float) -> float:
        """The loop time at which the write may go out."""
        turn = now
        if need.reason is Reason.STAMP:
            turn = now if self._stamped is None else self._stamped + STAMP_EVERY
        elif not need.report.changes_health:  # a changed health is told without the SPREAD
            if self._due is None:
                self._due = now + self._random.uniform(0.0, SPREAD)
            turn = self._due
        if self._failed is not None:
            target, error, retry_at = self._failed
            # Another write than the one that failed waits only if the server asked for it.
            if target == need.target or _asks_to_wait(error):
                turn = max(turn, retry_at)
        return max(turn, self._truce_until(need, now))

    def _truce_until(self, need: DueWrite, now: float) -> float:
        """The loop time at which corrections may go on; a changed inventory ends the wait."""
        if self._truce is not None and self._truce[0] == need.target and now < self._truce[1]:
            self._cells.state.set(ReportState(reported=False, reason=CONFLICT))
            return self._truce[1]
        if self._truce is not None:
            self._truce = None
            self._rounds.clear()
        while self._rounds and self._rounds[0] <= now - FIGHT:
            self._rounds.popleft()
        if need.reason is not Reason.FOREIGN or len(self._rounds) < ROUNDS:
            return 0.0
        self._truce = (need.target, now + FIGHT)
        log.error("report.conflict", rounds=len(self._rounds))
        self._cells.state.set(ReportState(reported=False, reason=CONFLICT))
        self._say(NodeEvent("ReportConflict", CONFLICT, warning=True))
        return now + FIGHT

    async def _write(self, need: DueWrite) -> None:
        loop = asyncio.get_running_loop()
        changes = {} if need.reason is Reason.STAMP else need.report.changes
        stamp = None
        if self._cells.settings.value.profile.stamps:
            stamp = encode_reported(self._clock.now())
        try:
            node = await self._api.annotate_node({**changes, HANDSHAKE: stamp})
        except ApiError as error:
            delay = max(self._backoff.next(), error.retry_after or 0.0)
            if self._failed is None:
                log.warning("report.failed", err=str(error), again_in=round(delay, 3))
            self._failed = (need.target, error, loop.time() + delay)
            self.failures.add(str(error.status or "none"))
            self._cells.state.set(ReportState(reported=False, reason=str(error)))
            return
        self._failed = self._due = None
        self._backoff.reset()
        self._stamped = loop.time()
        is_written = bool(node.resource_version)  # else the agent only observes
        if is_written:
            self.writes.add(need.reason.value)
        if need.reason is not Reason.STAMP:
            if need.reason is Reason.FOREIGN:
                self._rounds.append(self._stamped)
            self._written = need.target
            if is_written:
                log.info("report.written", reason=need.reason.value, node_uid=need.uid)
            if SCORE in changes and need.report.lopsided:
                pairs = ", ".join(f"{one} and {other}" for one, other in need.report.lopsided)
                text = f"a link may be broken, because only one of its two GPUs reports it: {pairs}"
                log.warning("report.lopsided_links", pairs=len(need.report.lopsided))
                self._say(NodeEvent("AsymmetricGPUP2PLink", text, warning=True))
        self._saw(node)


def _asks_to_wait(error: ApiError) -> bool:
    """Whether the API server asked to wait before the next write."""
    return error.retry_after is not None or isinstance(error, ApiThrottled)
