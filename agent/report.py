"""Keeps the report on the Node true, and tells people: Events and the condition of the Node."""

import asyncio
import datetime as dt
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, Literal, NoReturn

import msgspec
import structlog

from agent.allocate.room import takes_room
from agent.cluster import (
    CORDON,
    GPU_DEGRADED,
    HANDSHAKE,
    REGISTER,
    NodeCondition,
    NodeEvent,
    NodeView,
    PodTable,
    PodUid,
)
from agent.errors import ApiError, ApiThrottled
from agent.hami.annotations import (
    NodeReport,
    ReportProfile,
    ReportSettings,
    encode_reported,
    report_of,
)
from agent.health.judge import past
from agent.kit.cell import Cell, News
from agent.kit.tasks import Allowance, Backoff
from agent.kit.timing import Tally
from agent.ledger import Ledger
from agent.model import Cause, Condition, GpuFault, GpuUuid, Health, Inventory, SharedGpu, Trouble
from agent.node import cordon_events, read_cordon
from agent.ports import Clock, NodeApi

# Posts Events about this Node in order, with best effort. An Event is never the only record.

log = structlog.get_logger(__name__)

LIMIT = 256
"""Events that may wait. When more come, the oldest is dropped and counted."""

AGAIN = 5.0
"""Seconds until a post that failed is tried again."""

WARN_PERIOD = 60.0
"""Seconds between two warnings that Events are refused: a tenant can cause many."""


class NodeEventQueue:
    """A queue of at most LIMIT Events, `waiting`. `noted` hears of each one that is queued."""

    def __init__(self, noted: Callable[[NodeEvent], None] = lambda _: None) -> None:
        self._noted = noted
        self.waiting: deque[NodeEvent] = deque()
        self._news = asyncio.Event()
        self._refused = Allowance(1, WARN_PERIOD)
        self.unposted = Tally(
            "events_unposted_total",
            "Events that no API server keeps, by what became of them instead.",
            ("reason", "outcome"),
        )

    def say(self, event: NodeEvent) -> None:
        """Queue the event unless it equals the last one in the queue. Never waits."""
        if self.waiting and self.waiting[-1] == event:
            return
        if len(self.waiting) >= LIMIT:
            self.unposted.add(self.waiting.popleft().reason, "dropped")
        self.waiting.append(event)
        self._noted(event)
        self._news.set()

    async def post_all(self, post: Callable[[NodeEvent], Awaitable[None]] | None) -> NoReturn:
        """Post one event after the other, for ever; None: log them, there is no API server."""
        while True:
            while not self.waiting:
                self._news.clear()
                await self._news.wait()

            event, outcome = self.waiting[0], ""
            try:
                if post is not None:
                    await post(event)
                else:
                    level = log.warning if event.warning else log.info
                    of = {"ns": event.namespace, "pod": event.pod} if event.pod else {}
                    level("event.logged", reason=event.reason, **of, text=event.text)
                    outcome = "logged"
            except ApiError as error:
                if error.status not in range(400, 500) or error.status == 429:
                    if event.pod and self.waiting and self.waiting[0] is event:
                        self.waiting.rotate(-1)  # its namespace alone may take no Event now
                    await asyncio.sleep(error.retry_after or AGAIN)
                    continue
                if (others := self._refused.admit()) is not None:
                    reason, err = event.reason, str(error)
                    log.warning("event.refused", reason=reason, others=others, err=err)
                outcome = "refused"

            if outcome:  # the API server keeps, and its client counts, what was posted
                self.unposted.add(event.reason, outcome)
            # A full queue may have dropped it meanwhile.
            if self.waiting and self.waiting[0] is event:
                self.waiting.popleft()


async def follow_cordons(
    node: Cell[NodeView | None], inventory: Cell[Inventory], say: Callable[[NodeEvent], None]
) -> None:
    """Write an Event when a GPU is cordoned or uncordoned, by whatever program.

    The cordon annotation of the Node as it is first seen makes no Event.
    """
    before: str | None = None
    async for view in node.follow():
        if view is not None:
            text = view.annotations.get(CORDON, "")
            if before is not None and text != before:
                was, now = read_cordon(before), read_cordon(text)
                for event in cordon_events(was, now, inventory.value.gpus):
                    say(event)
            before = text


# What people are told about GPUs: Events between two inventories, and the condition GpuDegraded.

WELL: Final = "answering again; the agent receives events"
TEXT_LIMIT: Final = 1024


def gpu_events(
    old: Inventory, new: Inventory, ledger: Ledger, left_out: Collection[str] = ()
) -> tuple[NodeEvent, ...]:
    """The Events for the differences between `old` and `new`.

    - On the Node: GpuUnhealthy, GpuRecovered, GpuUnmonitored, GpuDriverUnresponsive, GpuReleased
      and GpuInventoryChanged. Several GPUs with the same text share one Event.
    - On each pod that holds a GPU which became unusable: GpuDegradedForPod. If only the pod's name
      is known, the Event is on the Node.

    `left_out`: GPUs for which another Event says why they are no longer shared.
    """
    return (*_of_health(old, new), *_of_inventory(old, new, left_out), *_of_pods(old, new, ledger))


def may_turn(said: SharedGpu, gpu: SharedGpu | None) -> bool:
    """Whether the only change of a GPU may reverse within seconds, so that its Event should wait.

    - A silent GPU answers again; or an unhealthy or silent GPU comes or goes. Resets and a driver
      that answers irregularly look like this.
    - A healthy GPU is gone, but still in the inventory: the next probe makes it unhealthy.
    - A GPU was taken back and has not answered yet.

    A change for the worse is never among them.
    """
    before = said.health
    was_unwell = not _is_well(before) and before.cause != Cause.OFF
    if gpu is None:
        return was_unwell
    if _state(before) == _state(gpu.health):
        is_gone = not gpu.present and not gpu.there and gpu.health.cause != Cause.OFF
        return said.present != gpu.present and (is_gone or was_unwell)
    if before.cause == Cause.RELEASED and gpu.health.silent:
        return True

    is_better = _is_well(gpu.health) or (before.silent and gpu.health.cause == Cause.MONITOR)
    return is_better and was_unwell and not before.ill


def gpus_in_words(gpus: Iterable[SharedGpu]) -> str:
    """The GPUs in words, sorted by index."""
    in_order = sorted(gpus, key=lambda gpu: (gpu.gpu.index, gpu.uuid))
    if len(in_order) == 1:
        return in_order[0].gpu.title
    return f"GPUs {', '.join(gpu.gpu.label for gpu in in_order)}"


def pods_holding(ledger: Ledger, gpus: Collection[GpuUuid], table: PodTable) -> tuple[str, ...]:
    """The pods that have slices of these GPUs, as namespace/name.

    A row without a known pod is left out, and so is a pod that has ended, while that can be seen.
    """
    rows = ledger.rows if table.stale else ledger.living(table).rows
    using = (row for row in rows if row.holder and not set(gpus).isdisjoint(row.gpus))
    known = {(row.namespace, row.pod) for row in using}
    return tuple(sorted("/".join(pod) for pod in known))


def _of_health(old: Inventory, new: Inventory) -> Iterator[NodeEvent]:
    by_news: dict[NodeEvent, list[SharedGpu]] = {}
    for gpu in new.gpus:
        before = old.find(gpu.uuid)
        news = _news(before.health if before else None, gpu.health)
        if news is not None:
            by_news.setdefault(news, []).append(gpu)

    for news, gpus in by_news.items():
        yield msgspec.structs.replace(news, text=f"{gpus_in_words(gpus)}: {news.text}")


def _news(before: Health | None, health: Health) -> NodeEvent | None:
    """The Event about a health that differs from `before` (None: the GPU was not there)."""
    if before is not None and _state(before) == _state(health):
        # Also where it asks for less: a GPU that is back and cools down needs no reboot any more,
        # and whoever reads Events alone would go on to reboot the node.
        is_told = health.ill and health.action != before.action
        return NodeEvent("GpuUnhealthy", health.text, warning=True) if is_told else None

    if _is_well(health):
        # Of a GPU that was not there, people hear only that it is not healthy.
        if before is None or before.cause == Cause.OFF:
            return None
        text = f"healthy again, after: {past(before)}"
        if before.condition is Condition.UNMONITORED:
            text = "taken back, and healthy" if before.cause == Cause.RELEASED else WELL
        return NodeEvent("GpuRecovered", text, warning=False)

    if health.cause == Cause.RELEASED:
        return NodeEvent("GpuReleased", health.text, warning=False)
    if health.silent and not health.serving:
        return NodeEvent("GpuUnhealthy", f"not served any more: {health.text}", warning=True)
    reason = "GpuDriverUnresponsive" if health.silent else "GpuUnmonitored"
    return NodeEvent("GpuUnhealthy" if health.ill else reason, health.text, warning=True)


def _is_well(health: Health) -> bool:
    return health.condition in {Condition.OK, Condition.WATCH}


def _state(health: Health) -> tuple[object, ...]:
    """The part of health that an Event reports. Bad equals lost, and ok equals watched."""
    if health.ill or _is_well(health):
        return (health.ill,)
    return (health.cause, health.serving)


def _of_inventory(old: Inventory, new: Inventory, left_out: Collection[str]) -> Iterator[NodeEvent]:
    present = {gpu.uuid: gpu for gpu in old.gpus if gpu.present}
    still = {gpu.uuid: gpu for gpu in new.gpus if gpu.present}
    lost = {gpu.uuid for gpu in new.gpus if gpu.health.condition is Condition.LOST}
    explained = {*still, *lost, *left_out}
    changes = (
        ("no longer shared", [g for u, g in present.items() if u not in explained]),
        ("shared now", [g for u, g in still.items() if u not in present and g.serving]),
    )

    text = "; ".join(f"{change}: {gpus_in_words(gpus)}" for change, gpus in changes if gpus)
    if text:
        yield NodeEvent("GpuInventoryChanged", text, warning=False)


def _of_pods(old: Inventory, new: Inventory, ledger: Ledger) -> Iterator[NodeEvent]:
    """One Event for each pod, about the first of its GPUs that became unusable."""
    well = {gpu.uuid for gpu in old.gpus if not _harm(gpu)}
    fallen = {gpu.uuid: gpu for gpu in new.gpus if gpu.uuid in well and _harm(gpu)}
    pods: dict[tuple[str, str, PodUid], SharedGpu] = {}
    for row in ledger.rows if fallen else ():
        gpu = next((fallen[uuid] for uuid in row.gpus if uuid in fallen), None)
        if gpu is not None and row.holder:
            pods.setdefault((row.namespace, row.pod, row.pod_uid), gpu)

    for (namespace, pod, uid), gpu in pods.items():
        who = "the pod" if uid else f"pod {namespace}/{pod}"
        text = f"{gpus_in_words([gpu])}, which {who} holds: {_harm(gpu)}."
        text += " The agent does not stop the pod."
        event = NodeEvent("GpuDegradedForPod", text, warning=True)
        # Without the UID of the pod, the Event is on the Node.
        of_pod = msgspec.structs.replace(event, namespace=namespace, pod=pod, pod_uid=uid)
        yield of_pod if uid else event


def _harm(gpu: SharedGpu) -> str:
    """What is wrong with the GPU for containers that hold it; empty if it is only filtered out."""
    if not gpu.health.serving:
        return gpu.health.text
    if not gpu.there:
        return gpu.obstacle or "it is not on the node any more"
    return "it was switched to MIG mode, which is not shared" if gpu.gpu.mig_enabled else ""


def gpu_degraded(inventory: Inventory, now: dt.datetime) -> NodeCondition:
    """The Node condition GpuDegraded: whether GPUs of this node are not served, and which.

    `since` is the earliest `since` of the unhealthy GPUs, so it survives a restart. If none is
    unhealthy and some are only absent, it is `now`.
    """
    # A GPU that is kept only because a container holds a slice of it does not count.
    gpus = [gpu for gpu in inventory.gpus if gpu.present or gpu.wanted]
    ill = [gpu for gpu in gpus if not gpu.serving]
    if ill:
        text = "; ".join(f"{gpu.gpu.title} {gpu.unavailable_reason}" for gpu in ill)[:TEXT_LIMIT]
        since = min((gpu.health.since for gpu in ill if not gpu.health.serving), default=now)
    else:
        few = {0: "there are no GPUs to share", 1: "the only GPU is served"}
        text = few.get(len(gpus), f"all {len(gpus)} GPUs are served")
        since = max((gpu.health.since for gpu in gpus), default=now)

    reason = "NotServed" if ill else "AllServed"
    return NodeCondition(GPU_DEGRADED, status=bool(ill), reason=reason, message=text, since=since)


# Writes Events when GPUs change or are left out, and the Node condition GpuDegraded.

CALM: Final = 30.0
"""Seconds that a change which may reverse (may_turn) must last before its Event."""

WAKING: Final = 30.0
"""Seconds without an answer before a GPU is reported as left out: it may be initialising."""


async def follow_gpus(
    inventory: Cell[Inventory],
    ledger: Cell[Ledger],
    pods: Cell[PodTable],
    left_out: Cell[tuple[GpuFault, ...]],
    say: Callable[[NodeEvent], None],
) -> None:
    """Write Events for the differences from one inventory to the next.

    The first inventory makes no Event, so a restarted agent does not repeat Events. `left_out`: the
    GPUs about which follow_left_out() writes Events.
    """
    loop, news = asyncio.get_running_loop(), News(inventory)
    said: Inventory | None = None
    unsaid: dict[GpuUuid, float] = {}
    """The GPUs whose Events are held back, and until when (loop time)."""

    while True:
        found, now = inventory.value, loop.time()
        if found.generation:  # before, the driver was not asked
            before = said or found
            turning = (gpu.uuid for gpu in before.gpus if may_turn(gpu, found.find(gpu.uuid)))
            turns = {uuid: unsaid.get(uuid, now + CALM) for uuid in turning}
            unsaid = {uuid: until for uuid, until in turns.items() if now < until}
            kept = (gpu for gpu in before.gpus if gpu.uuid in unsaid)
            fresh = (gpu for gpu in found.gpus if gpu.uuid not in unsaid)
            said = msgspec.structs.replace(found, gpus=(*fresh, *kept))

            explained = {fault.gpu for fault in left_out.value}
            # A row stays for a while after its pod has ended.
            rows = (row for row in ledger.value.rows if takes_room(row, pods.value))
            for event in gpu_events(before, said, Ledger(tuple(rows)), explained):
                say(event)

        await news.wait(min(unsaid.values()) - now if unsaid else None)


async def follow_left_out(
    left_out: Cell[tuple[GpuFault, ...]],
    inventory: Cell[Inventory],
    say: Callable[[NodeEvent], None],
) -> None:
    """Write an Event for each GPU that is left out, and another when the reason changes.

    - For a GPU that does not answer, it waits WAKING seconds: GPUs take seconds to initialise.
    - A lost or unhealthy GPU that is still in the inventory gets no Event here, because
      follow_gpus() has written one. Exception: health checks are off.
    """
    loop, news = asyncio.get_running_loop(), News(left_out)
    due: dict[GpuFault, float] = {}
    """Each fault, and when its Event is due (loop time); infinite: it was written."""

    while True:
        now = loop.time()
        due = {
            fault: due.get(fault, now + (WAKING if fault.trouble is Trouble.SILENT else 0.0))
            for fault in left_out.value
        }
        for fault in [fault for fault, at in due.items() if at <= now]:
            due[fault] = math.inf
            known = inventory.value.find(GpuUuid(fault.gpu))
            is_said = (
                known is not None
                and known.health.cause != Cause.OFF
                and (fault.lost or not known.health.serving)
            )
            if not is_said:
                text = f"GPU {fault.gpu} is not shared: {fault.text} [GpuLeftOut]"
                say(NodeEvent("GpuLeftOut", text, warning=True))

        left = min(due.values(), default=math.inf) - now
        await news.wait(left if left < math.inf else None)


async def keep_condition(
    write: Callable[[NodeCondition], Awaitable[None]],
    inventory: Cell[Inventory],
    node: Cell[NodeView | None],
    clock: Clock,
) -> NoReturn:
    """Keep the Node condition GpuDegraded up to date; `write` creates or replaces it.

    A Node that is created again has none. A condition that differs only in `since` is not written.
    Raises ApiError; it can be started again.
    """
    written: tuple[str, NodeCondition] | None = None
    """What was written, and the UID of the Node."""
    news = News(inventory, node)

    while True:
        found, seen = inventory.value, node.value
        if seen is not None and found.generation:  # before, the driver was not asked
            wanted = gpu_degraded(found, clock.now())
            if written is not None and (seen.uid, wanted.status) == (written[0], written[1].status):
                # It has lasted since then.
                wanted = msgspec.structs.replace(wanted, since=written[1].since)
            if (seen.uid, wanted) != written:
                await write(wanted)
                written = seen.uid, wanted

        await news.wait()


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


Reason = Literal[
    "missing",
    "node-created",
    "inventory",
    "health",  # of a GPU that is reported; others may differ in more
    "score",  # only the score annotation differs
    "foreign",  # another writer changed what the agent wrote
    "stamp",  # nothing differs, but the scheduler needs a stamp
]
"""Why the annotation is written."""


class ReportCells(msgspec.Struct, frozen=True):
    """The facts that the reporter reads.

    `returns`: how often the API server came back after it was lost.
    """

    inventory: Cell[Inventory]
    node: Cell[NodeView | None]
    returns: Cell[int]
    settings: Cell[ReportSettings]


Target = tuple[str, str, str | None]
"""The UID of the Node, and the texts of its register and score annotations."""


class DueWrite(msgspec.Struct, frozen=True):
    """One write to the Node that is due. Equal targets: the same write."""

    target: Target
    report: NodeReport
    reason: Reason


class Reporter:
    """Writes the annotation. `writes` counts by reason, `failures` by HTTP status.

    `unreported`: why the API server does not hold the report of the inventory; empty: it does.

    If it `observes`, it writes nothing, and `pending` has what it would write: annotations, None
    removes one. Stamps are not among them.
    """

    def __init__(
        self,
        api: NodeApi,
        cells: ReportCells,
        saw: Callable[[NodeView], None],
        say: Callable[[NodeEvent], None],
        clock: Clock,
        random: random.Random,
        *,
        observes: bool = False,
    ) -> None:
        self.unreported = Cell(UNSEEN)
        self.pending: Mapping[str, str | None] = {}
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
        self._observes = observes

        self._backoff = Backoff(DELAYS, JITTER, random)
        self._returns = cells.returns.value
        """The returns of the API server that were taken into account."""
        self._written: Target | None = None
        self._due: float | None = None
        self._stamped: float | None = None
        self._failed: tuple[Target, bool, float] | None = None
        """What failed, whether the API server asked to wait, and when it is tried again."""

        self._rounds: deque[float] = deque(maxlen=ROUNDS)
        """When the last corrections of another writer's text were made (loop time)."""
        self._conflict = 0.0
        """Until when the fight lasts that was told last (loop time)."""

    async def run(self) -> NoReturn:
        """Keep the annotation equal to the inventory for ever."""
        loop, cells = asyncio.get_running_loop(), self._cells
        news = News(cells.inventory, cells.node, cells.settings, cells.returns)
        while True:
            if cells.returns.value != self._returns:
                self._returns = cells.returns.value
                # The API server is back: a failed write is repeated soon, unless it asked to wait.
                if self._failed is not None and not self._failed[1]:
                    target, is_asked, retry_at = self._failed
                    soon = loop.time() + self._random.uniform(0.0, SPREAD)
                    self._failed = target, is_asked, min(retry_at, soon)
                    self._backoff.reset()

            need, left = self._need(), None
            if self._observes:
                self._show(need)
            elif isinstance(need, str):
                self._rest(need)
            else:
                if need.reason == "stamp" and self._failed is None:
                    self._rest("")
                left = self._turn(need, loop.time()) - loop.time()
                if left < TICK:
                    await self._write(need)
                    continue

            await news.wait(left)

    def _rest(self, reason: str) -> None:
        """Publish that nothing differs (`reason` is empty), or why there is no report yet."""
        self.unreported.set(reason)
        self._due = None

    def _show(self, need: DueWrite | str) -> None:
        """Log what would be written, if that is news. The Node counts as reported."""
        self._rest(need if isinstance(need, str) else "")

        node, pending = self._cells.node.value, {}
        if node is not None and isinstance(need, DueWrite):
            held, changes = node.annotations, need.report.changes
            pending = {key: text for key, text in changes.items() if held.get(key) != text}
            if pending and pending != self.pending:
                log.info("observe.would_write", node=node.name, annotations=pending)
        self.pending = pending

    def _need(self) -> DueWrite | str:
        """The write that is due, or why there is no report yet (empty: nothing differs)."""
        node, settings = self._cells.node.value, self._cells.settings.value
        if node is None:
            return UNSEEN

        report = report_of(self._cells.inventory.value, node.annotations, settings)
        if report is None:
            return "no GPU has been found yet"
        target = node.uid, report.register, report.score
        if not report.changes:  # the Node says the same
            return (
                DueWrite(target, report, "stamp") if settings.profile is ReportProfile.COLON else ""
            )

        reason: Reason = "health" if report.changes_health else "inventory"
        if self._written is not None and self._written[0] != node.uid:
            reason = "node-created"
        elif self._written == target:
            reason = "foreign"
        elif REGISTER not in node.annotations:
            reason = "missing"
        elif not report.register_differs:
            reason = "score"

        return DueWrite(target, report, reason)

    def _turn(self, need: DueWrite, now: float) -> float:
        """The loop time at which the write may be made."""
        turn = now
        if need.reason == "stamp":
            turn = now if self._stamped is None else self._stamped + STAMP_EVERY
        elif not need.report.changes_health:  # a changed health is told without the SPREAD
            if self._due is None:
                self._due = now + self._random.uniform(0.0, SPREAD)
            turn = self._due

        if self._failed is not None:
            target, is_asked, retry_at = self._failed
            # Another write than the one that failed waits only if the server asked for it.
            if is_asked or target == need.target:
                turn = max(turn, retry_at)

        # A write for another reason, such as a changed inventory, ends the wait of a fight.
        rounds = self._rounds
        if need.reason == "foreign" and len(rounds) == ROUNDS and rounds[-1] - rounds[0] < FIGHT:
            ends = rounds[-1] + FIGHT
            if now < ends:
                self.unreported.set(CONFLICT)
                turn = max(turn, ends)
                if ends != self._conflict:
                    self._conflict = ends
                    log.error("report.conflict", rounds=len(rounds))
                    self._say(NodeEvent("ReportConflict", CONFLICT, warning=True))
        return turn

    async def _write(self, need: DueWrite) -> None:
        loop = asyncio.get_running_loop()
        changes = need.report.changes
        is_stamped = self._cells.settings.value.profile is ReportProfile.COLON
        stamp = encode_reported(self._clock.now()) if is_stamped else None

        try:
            node = await self._api.annotate_node({**changes, HANDSHAKE: stamp})
        except ApiError as error:
            delay = max(self._backoff.next(), error.retry_after or 0.0)
            if self._failed is None:
                log.warning("report.failed", err=str(error), again_in=round(delay, 3))
            is_asked = error.retry_after is not None or isinstance(error, ApiThrottled)
            self._failed = need.target, is_asked, loop.time() + delay
            self.failures.add(str(error.status or "none"))
            self.unreported.set(str(error))
            return

        self._failed = self._due = None
        self._backoff.reset()
        self._stamped = loop.time()
        self.writes.add(need.reason)

        if need.reason != "stamp":
            if need.reason != "foreign":
                self._rounds.clear()
            else:
                self._rounds.append(self._stamped)

            self._written = need.target
            log.info("report.written", reason=need.reason, node_uid=need.target[0])
        self._saw(node)
