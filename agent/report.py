"""Keeps the report on the Node true, and tells people: Events and the condition of the Node."""

import asyncio
import dataclasses
import datetime as dt
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, Literal, NoReturn

import msgspec
import structlog

from agent.cluster import (
    CORDON,
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
from agent.model import Cause, Condition, GpuFault, GpuUuid, Health, Inventory, SharedGpu
from agent.node import read_cordon
from agent.ports import Clock, NodeApi

# Posts Events about this Node in order, with best effort. An Event is never the only record.

log = structlog.get_logger(__name__)

LIMIT = 256
"""Events that may wait. When more come, the oldest is dropped."""

AGAIN = 5.0
"""Seconds until a post that failed is tried again."""

WARN_PERIOD = 60.0
"""Seconds between two warnings that Events are refused: a tenant can cause many."""


class NodeEventQueue:
    """A queue of at most LIMIT Events, `waiting`. `noted` hears of each one that is queued."""

    def __init__(self, noted: Callable[[NodeEvent], None] = lambda _: None) -> None:
        self._noted = noted
        self.waiting: deque[NodeEvent] = deque(maxlen=LIMIT)
        self._news = asyncio.Event()
        self._refused = Allowance(1, WARN_PERIOD)

    def say(self, event: NodeEvent) -> None:
        """Queue the event unless it equals the last one in the queue. Never waits."""
        if self.waiting and self.waiting[-1] == event:
            return
        self.waiting.append(event)
        self._noted(event)
        self._news.set()

    async def post_all(self, post: Callable[[NodeEvent], Awaitable[None]] | None) -> NoReturn:
        """Post one event after the other, for ever; None: log them, there is no API server."""
        while True:
            while not self.waiting:
                self._news.clear()
                await self._news.wait()

            event = self.waiting[0]
            try:
                if post is not None:
                    await post(event)
                else:
                    level = log.warning if event.warning else log.info
                    of = {"ns": event.namespace, "pod": event.pod} if event.pod else {}
                    level("event.logged", reason=event.reason, **of, text=event.text)
            except ApiError as error:
                if error.status not in range(400, 500) or error.status == 429:
                    if event.pod and self.waiting and self.waiting[0] is event:
                        self.waiting.rotate(-1)  # its namespace alone may take no Event now
                    await asyncio.sleep(error.retry_after or AGAIN)
                    continue
                if (others := self._refused.admit()) is not None:
                    reason, err = event.reason, str(error)
                    log.warning("event.refused", reason=reason, others=others, err=err)
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
        # A Node that is away for a moment keeps its cordon: it comes back with it, or without.
        text = before if view is None else view.annotations.get(CORDON, "")
        if before in (None, text):  # the first sight, or no change
            before = text
            continue
        was, now, before = {*read_cordon(before)}, {*read_cordon(text)}, text
        for gpu in (one.gpu for one in inventory.value.gpus if one.uuid in was ^ now):
            if gpu.uuid in now:
                words = "is cordoned: HAMi's scheduler (2.10 and later) places no new pods"
                say(NodeEvent("GpuCordoned", f"{gpu.title} {words}", warning=False))
            else:
                words = f"{gpu.title} is no longer cordoned"
                say(NodeEvent("GpuUncordoned", words, warning=False))


# What people are told about GPUs: Events between two inventories, and the condition GpuDegraded.

TEXT_LIMIT: Final = 1024


def gpu_events(
    old: Inventory, new: Inventory, ledger: Ledger, left_out: Collection[str] = ()
) -> tuple[NodeEvent, ...]:
    """The Events for the differences between `old` and `new`.

    Those about health and inventory are on the Node; GPUs with the same text share one.
    GpuDegradedForPod is on each pod that holds a GPU which became unusable. `left_out`: GPUs for
    which another Event says why they are no longer shared.
    """
    return (*_of_health(old, new), *_of_inventory(old, new, left_out), *_of_pods(old, new, ledger))


def gpus_in_words(gpus: Iterable[SharedGpu]) -> str:
    """The GPUs in words, sorted by index."""
    in_order = sorted(gpus, key=lambda gpu: (gpu.gpu.index, gpu.uuid))
    if len(in_order) == 1:
        return in_order[0].gpu.title
    return f"GPUs {', '.join(gpu.gpu.label for gpu in in_order)}"


def pods_holding(ledger: Ledger, gpus: Collection[GpuUuid], table: PodTable) -> tuple[str, ...]:
    """The known pods that have slices of these GPUs, as namespace/name, without ended ones."""
    rows = ledger.rows if table.stale else ledger.living(table).rows
    using = (row for row in rows if row.holder and not set(gpus).isdisjoint(row.gpus))
    return tuple(sorted({f"{row.namespace}/{row.pod}" for row in using}))


def _of_health(old: Inventory, new: Inventory) -> Iterator[NodeEvent]:
    by_news: dict[NodeEvent, list[SharedGpu]] = {}
    for gpu in new.gpus:
        before = old.find(gpu.uuid)
        news = _news(before.health if before else None, gpu.health)
        if news is not None:
            by_news.setdefault(news, []).append(gpu)

    for news, gpus in by_news.items():
        each = ", each" if len(gpus) > 1 else ""
        yield msgspec.structs.replace(news, text=f"{gpus_in_words(gpus)}{each}: {news.text}")


def _news(before: Health | None, health: Health) -> NodeEvent | None:
    """The Event about a health that differs from `before` (None: the GPU was not there)."""
    if before is not None and _state(before) == _state(health):
        return None
    if _is_well(health):
        # Of a GPU that was not there, people hear only that it is not healthy.
        # A failed probe ends nothing: the next one decides.
        if before is None or before.cause == Cause.OFF or health.cause == Cause.PROBE:
            return None
        now = f"served again, and watched: {health.text}" if health.text else "healthy again"
        return NodeEvent("GpuRecovered", f"{now}, after: {past(before)}", warning=False)

    if health.cause == Cause.RELEASED:
        return NodeEvent("GpuReleased", health.text, warning=False)
    reason = "GpuDriverUnresponsive" if health.silent else "GpuUnmonitored"
    if health.ill or (health.silent and not health.serving):
        reason = "GpuUnhealthy"
    return NodeEvent(reason, health.text, warning=True)


def _is_well(health: Health) -> bool:
    return health.condition in {Condition.OK, Condition.WATCH}


def _state(health: Health) -> tuple[object, ...]:
    """The part of health that an Event reports. Bad equals lost, and ok equals watched."""
    if _is_well(health):
        return ()
    # What an unhealthy GPU needs counts, also where it needs less: one that is back and cools down
    # needs no reboot of the node any more.
    return (health.action,) if health.ill else (health.cause, health.serving)


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
        if uid:  # without it, the Event is on the Node
            event = msgspec.structs.replace(event, namespace=namespace, pod=pod, pod_uid=uid)
        yield event


def _harm(gpu: SharedGpu) -> str:
    """What is wrong with the GPU for containers that hold it; empty if it is only filtered out."""
    if not gpu.health.serving:
        return gpu.health.text
    if not gpu.there:
        return gpu.obstacle or "it is not on the node any more"
    return "it was switched to MIG mode, which is not shared" if gpu.gpu.mig_enabled else ""


def gpu_degraded(inventory: Inventory, now: dt.datetime) -> NodeCondition:
    """The Node condition GpuDegraded: whether GPUs of this node are not served, and which.

    `since` is the earliest one of the unhealthy GPUs, so it survives a restart.
    """
    # A GPU that is kept only because a container holds a slice of it does not count.
    gpus = [gpu for gpu in inventory.gpus if gpu.present or gpu.wanted]
    ill = [gpu for gpu in gpus if not gpu.serving]
    if ill:
        text = "; ".join(f"{gpu.gpu.title} {gpu.unavailable_reason}" for gpu in ill)[:TEXT_LIMIT]
        since = min((gpu.health.since for gpu in ill if not gpu.health.serving), default=now)
    else:
        text = f"all GPUs are served: {len(gpus)}" if gpus else "there are no GPUs to share"
        since = max((gpu.health.since for gpu in gpus), default=now)

    reason = "NotServed" if ill else "AllServed"
    return NodeCondition(status=bool(ill), reason=reason, message=text, since=since)


# Writes Events when GPUs change or are left out, and the Node condition GpuDegraded.


async def follow_gpus(
    inventory: Cell[Inventory],
    ledger: Cell[Ledger],
    pods: Cell[PodTable],
    left_out: Cell[tuple[GpuFault, ...]],
    say: Callable[[NodeEvent], None],
) -> None:
    """Write Events for the differences from one inventory to the next.

    The first one makes no Event, so a restarted agent repeats none. `left_out`: follow_left_out()
    writes their Events.
    """
    said: Inventory | None = None
    async for found in inventory.follow():
        if said is not None:
            explained = {fault.gpu for fault in left_out.value}
            # A row stays for a while after its pod has ended.
            rows = (row for row in ledger.value.rows if row.takes_room(pods.value))
            for event in gpu_events(said, found, Ledger(tuple(rows)), explained):
                say(event)
        said = found if found.generation else None  # before, the driver was not asked


async def follow_left_out(
    left_out: Cell[tuple[GpuFault, ...]],
    inventory: Cell[Inventory],
    say: Callable[[NodeEvent], None],
) -> None:
    """Write an Event for each GPU that is left out, and another when the reason changes.

    Not for a lost or unhealthy GPU of the inventory, unless health checks are off: follow_gpus().
    """
    before: tuple[GpuFault, ...] = ()
    async for faults in left_out.follow():
        for fault in faults:
            known = inventory.value.find(GpuUuid(fault.gpu))
            is_told = (
                known is not None
                and known.health.cause != Cause.OFF
                and (fault.lost or not known.health.serving)
            )
            if fault not in before and not is_told:
                text = f"{fault.title} is not shared: {fault.text} [GpuLeftOut]"
                say(NodeEvent("GpuLeftOut", text, warning=True))
        before = faults


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
    # No Node has an empty UID: nothing is written yet.
    uid, written, news = "", gpu_degraded(inventory.value, clock.now()), News(inventory, node)
    while True:
        found, seen = inventory.value, node.value
        if seen is not None and found.generation:  # before, the driver was not asked
            wanted = gpu_degraded(found, clock.now())
            if seen.uid == uid and wanted.status == written.status:
                # It has lasted since then.
                wanted = msgspec.structs.replace(wanted, since=written.since)
            if (seen.uid, wanted) != (uid, written):
                await write(wanted)
                uid, written = seen.uid, wanted
        await news.wait()


# Keeps the Node's register annotation equal to the inventory.
#
# - The reporter writes only if the two differ in meaning, and never an empty list.
# - If another writer keeps changing the annotation, it corrects that seldom and posts an Event.
# - It stamps every 30 s only for schedulers up to and including 2.7.1: they drop a node after 60 s.

DELAYS = (1.0, 2.0, 5.0, 10.0, 15.0)
JITTER = 0.5
SPREAD = 1.0
"""Seconds over which nodes spread their writes, unless a health has changed."""

CORRECTIONS = 5, 120.0
"""Of another writer's text: so many at once, then one in so many seconds."""

CONFLICT = (
    f"another writer keeps changing the Node annotation {REGISTER}, which is corrected every 2"
    " minutes: stop the other device plugin of this node"
)

TICK = 0.001
"""Seconds: less than a clock may resolve."""

STAMP_EVERY = 30.0
"""Seconds between stamps."""

UNSEEN = "the Node has not been seen yet"

Reason = Literal["inventory", "health", "foreign", "stamp"]
"""Why the annotation is written: foreign: another writer changed it; stamp: nothing differs."""


class ReportCells(msgspec.Struct, frozen=True):
    """The facts that the reporter reads. `returns` counts how often the API server came back."""

    inventory: Cell[Inventory]
    node: Cell[NodeView | None]
    returns: Cell[int]
    settings: Cell[ReportSettings]


@dataclasses.dataclass(eq=False)
class Reporter:
    """Writes the annotation. `writes` counts by reason, `failures` by HTTP status.

    `unreported`: why the API server does not hold the report of the inventory; empty: it does. If
    it `observes`, it writes nothing: `pending` has what it would write (None removes one).
    """

    api: NodeApi
    cells: ReportCells
    saw: Callable[[NodeView], None]
    say: Callable[[NodeEvent], None]
    clock: Clock
    random: random.Random
    observes: bool = False

    def __post_init__(self) -> None:
        self.unreported = Cell(UNSEEN)
        self.pending: Mapping[str, str | None] = {}
        self.writes = Tally(
            "report_writes_total", "Writes of the register annotation.", ("reason",)
        )
        self.failures = Tally(
            "report_failures_total", "Writes of the register annotation that failed.", ("code",)
        )

        self._backoff = Backoff(DELAYS, JITTER, self.random)
        self._corrections = Allowance(*CORRECTIONS)
        self._written: tuple[str, str, str | None] | None = None
        """The Node's UID, and the texts of its register and score annotations."""
        self._spread: float | None = None
        """When a changed inventory may be written (loop time)."""
        self._stamped = -math.inf

    async def run(self) -> NoReturn:
        """Keep the annotation equal to the inventory for ever."""
        loop, cells = asyncio.get_running_loop(), self.cells
        news = News(cells.inventory, cells.node, cells.settings)
        while True:
            node, settings, left = cells.node.value, cells.settings.value, None
            held = {} if node is None else node.annotations
            report = report_of(cells.inventory.value, held, settings)
            if node is None or report is None:
                self._rest(UNSEEN if node is None else "no GPU has been found yet")
                self.pending = {}
            elif self.observes:
                self._rest("")
                self._show(node, report)
            elif not report.changes and settings.profile is not ReportProfile.COLON:
                self._rest("")
            else:
                target = node.uid, report.register, report.score
                reason: Reason = "health" if report.changes_health else "inventory"
                if not report.changes:
                    reason = "stamp"
                elif self._written == target:
                    reason = "foreign"
                left = self._due(report, reason, loop.time()) - loop.time()
                if left < TICK:
                    await self._write(report, reason, target)
                    continue
                if not report.changes:
                    self._rest("")
            await news.wait(left)

    def _rest(self, reason: str) -> None:
        """Publish that nothing differs (`reason` is empty), or why there is no report yet."""
        self.unreported.set(reason)
        self._spread = None

    def _show(self, node: NodeView, report: NodeReport) -> None:
        """Log what would be written, if that is news. The Node counts as reported."""
        changes = report.changes.items()
        pending = {key: text for key, text in changes if node.annotations.get(key) != text}
        if pending and pending != self.pending:
            log.info("observe.would_write", node=node.name, annotations=pending)
        self.pending = pending

    def _due(self, report: NodeReport, reason: Reason, now: float) -> float:
        """The loop time at which the write may be made."""
        if reason == "stamp":
            return self._stamped + STAMP_EVERY
        due = now
        if not report.changes_health:  # a changed health is told without the SPREAD
            if self._spread is None:
                self._spread = now + self.random.uniform(0.0, SPREAD)
            due = self._spread

        # A write for another reason, such as a changed inventory, does not wait for this.
        wait = self._corrections.wait(now) if reason == "foreign" else 0.0
        if wait and self.unreported.set(CONFLICT):
            log.error("report.conflict")
            self.say(NodeEvent("ReportConflict", CONFLICT, warning=True))
        return max(due, now + wait)

    async def _write(
        self, report: NodeReport, reason: Reason, target: tuple[str, str, str | None]
    ) -> None:
        """Write; after a failure, wait until it may be tried again."""
        loop, cells = asyncio.get_running_loop(), self.cells
        is_stamped = cells.settings.value.profile is ReportProfile.COLON
        stamp = encode_reported(self.clock.now()) if is_stamped else None
        news = News(cells.returns)
        self._spread = None

        try:
            node = await self.api.annotate_node({**report.changes, HANDSHAKE: stamp})
        except ApiError as error:
            delay = max(self._backoff.next(), error.retry_after or 0.0)
            if self.unreported.set(str(error)):
                log.warning("report.failed", err=str(error), again_in=round(delay, 3))
            self.failures.add(str(error.status or "none"))
            # An API server that is back ends a wait that is the agent's own. A change does not: in
            # an outage, a storm of XIDs would be a storm of requests.
            if error.retry_after is not None or isinstance(error, ApiThrottled):
                await asyncio.sleep(delay)
            else:
                await news.wait(delay)
            return

        self._backoff.reset()
        self._stamped = loop.time()
        self.writes.add(reason)
        if reason == "foreign":
            self._corrections.spend(self._stamped)
        if reason != "stamp":
            self._written = target
            log.info("report.written", reason=reason, node_uid=target[0])
        self.saw(node)
