"""Reconciles the ledger with the kubelet, and the directories with the ledger."""

import asyncio
import contextlib
import datetime as dt
import functools
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, NoReturn

import msgspec
import structlog

from agent.cluster import NodeEvent, Phase, PodTable, PodUid, Role
from agent.errors import AgentError, Refusal, StateError, WitnessThrottled
from agent.hookdirs import Cleared, DiskRoom, kept_event
from agent.kit.cell import Cell, News
from agent.kit.tasks import retry
from agent.kit.timing import Lull, Tally, until_tick
from agent.ledger import (
    ContainerKey,
    Holder,
    Holding,
    KubeletEpoch,
    Ledger,
    Row,
    container_directory,
    mismatch,
)
from agent.model import SliceId
from agent.ports import Clock, HookDirs, KubeletRecords, Witness
from agent.reconcile.rules import (
    DEADLINE,
    EVER,
    PAUSE,
    PERIOD,
    QUIET,
    RETRIES,
    SETTLING,
    SETTLING_PAUSE,
    THROTTLED_PAUSE,
    Adoption,
    Findings,
    ReconcileFacts,
    Stranger,
    explained_by,
    leaked,
)

# Turns the findings of a reconcile into one change of the ledger.

log = structlog.get_logger(__name__)


class AdoptedRows(msgspec.Struct, frozen=True):
    """New rows for containers that the ledger did not know.

    If a container's answer cannot be read, its row only keeps its ids in use. `unread`: how many
    answers could not be read; a later reconcile tries again.
    """

    rows: tuple[Row, ...] = ()
    unread: int = 0

    def tell(self) -> None:
        """Log each row."""
        for row in self.rows:
            named = {
                "ns": row.namespace,
                "pod": row.pod,
                "ctr": row.holder and row.holder.container,
            }
            if row.adopted:
                log.warning("ledger.kept_unread", **named)
            else:
                log.info("ledger.adopted", **named)


async def unread(_: Adoption) -> Row | None:
    """None: plain mode has no source for another plugin's answer."""
    return None


async def take_over(
    findings: Findings,
    seen: ReconcileFacts,
    ledger: Ledger,
    adopt: Callable[[Adoption], Awaitable[Row | None]],
) -> AdoptedRows:
    """Make the new rows. `adopt` makes the row of one container; None: its answer is unreadable."""
    rows: list[Row] = []
    strangers = list(findings.strangers)
    unread = 0
    explains = explained_by(ledger)
    for adoption in findings.adopt:
        row = await adopt(adoption)
        if row is not None:
            rows.append(row)
            continue
        unread += 1
        pod, container = adoption.pod, adoption.container
        holder = Holder(pod.namespace, pod.name, container.name)
        if adoption.ids and not explains(holder, adoption.ids):
            strangers.append(Stranger(holder, adoption.ids, container.resource))
    kept = (stranger.row(seen.now, seen.epoch) for stranger in strangers)
    return AdoptedRows((*rows, *kept), unread)


def applied(base: Ledger, ledger: Ledger, findings: Findings, adopted: Iterable[Row]) -> Ledger:
    """`ledger` with the findings about `base`. Rows that changed since `base` stay as they are."""
    for row in findings.confirmed:
        present = ledger.find(row.key)
        if present is not None and present == base.find(row.key):
            ledger = ledger.put(row)
    for row in adopted:
        if ledger.find(row.key) is None:
            ledger = ledger.put(row)
    return ledger


# Removes container directories of closed rows, and leaked ones.
#
# A leaked directory belongs to no row and to no pod of this node.

SWEEP_PERIOD = 3600.0
"""Seconds between searches for leaked directories. The first search is at the start."""


class Directories:
    """Removes container directories. A failure is logged, never raised."""

    def __init__(self, hooks: HookDirs, ledger: Cell[Ledger], clock: Clock) -> None:
        self._hooks = hooks
        self._ledger = ledger
        self._clock = clock
        self._swept_at = -math.inf

    async def names(self) -> frozenset[str] | None:
        """The names of all container directories; None: the disk failed or did not answer."""
        try:
            async with asyncio.timeout(DEADLINE):
                return frozenset(await self._hooks.found())
        except (AgentError, TimeoutError) as error:
            log.warning("hooks.not_searched", err=str(error) or "out of time")
            return None

    async def sweep(self, seen: ReconcileFacts) -> None:
        """Remove leaked directories if the last successful search is SWEEP_PERIOD ago."""
        elapsed = asyncio.get_running_loop().time()
        if elapsed - self._swept_at < SWEEP_PERIOD:
            return
        try:
            async with asyncio.timeout(DEADLINE):
                found = await self._hooks.found()
        except (AgentError, TimeoutError) as error:
            log.warning("hooks.not_searched", err=str(error) or "out of time")
            return
        self._swept_at = elapsed
        now = self._clock.now()
        ages = {name: now - changed for name, changed in found.items()}
        for name in leaked(ages, self._ledger.value, seen):
            log.info("hooks.leaked", directory=name)
            try:
                await self.remove(name)
            except TimeoutError:
                return

    async def remove(self, name: str) -> bool:
        """Remove the directory. False: this one cannot be removed.

        Raises TimeoutError: the disk does not answer, so it is useless to try another directory.
        """
        try:
            async with asyncio.timeout(DEADLINE):
                await self._hooks.remove(name)
        except AgentError as error:
            log.warning("hooks.not_removed", directory=name, err=str(error))
            return False
        except TimeoutError:
            log.warning("hooks.not_removed", directory=name, err="out of time")
            raise
        return True


# Removes container directories that were set aside, in small parts; reports what stays, and room.
#
# Nothing waits for it: new directories are made meanwhile, however much a tenant has left.

CLEARING_PERIOD: Final = 3600.0
"""Seconds between attempts to remove what stays."""

RETRY: Final = 60.0
"""Seconds until the next attempt after the disk failed or did not answer."""

ROOM_PERIOD: Final = 60.0
"""Seconds between two looks at the space that is left."""

CLEARING_PAUSE: Final = 0.05
"""Seconds between two parts. A part takes about as long, so others have the disk half the time."""

CLEARING_DEADLINE: Final = 30.0
"""Seconds for one part. A single file can have terabytes."""


class Clearing:
    """Sole writer of `state` and `room`. `set_aside` changes when there is something to remove.

    `say` posts one Event about the Node when directories stay, and no other until none stays.
    """

    def __init__(
        self, hooks: HookDirs, set_aside: Cell[int], say: Callable[[NodeEvent], None]
    ) -> None:
        self._hooks = hooks
        self._set_aside = set_aside
        self._say = say
        self.state: Cell[Cleared] = Cell(Cleared())
        self.room: Cell[DiskRoom] = Cell(DiskRoom())

    async def run(self) -> NoReturn:
        """Clear at the start, when something was set aside, and each PERIOD."""
        loop = asyncio.get_running_loop()
        news = News(self._set_aside)
        due = loop.time()
        while True:
            again = loop.time() >= due
            done = await self._clear(again=again)
            if again:
                due = loop.time() + (CLEARING_PERIOD if done else RETRY)
            elif not done:
                due = min(due, loop.time() + RETRY)
            await news.wait(max(due - loop.time(), 0.0))

    async def follow_room(self) -> NoReturn:
        """Set `room` each ROOM_PERIOD; not known while the disk fails or does not answer."""
        while True:
            room = DiskRoom()
            try:
                async with asyncio.timeout(CLEARING_DEADLINE):
                    room = await self._hooks.room()
            except (AgentError, TimeoutError) as error:
                log.warning("hooks.not_measured", err=str(error) or "out of time")
            self.room.set(room)
            await asyncio.sleep(until_tick(ROOM_PERIOD))

    async def _clear(self, *, again: bool) -> bool:
        """Remove all that can be removed. False: the disk failed."""
        while True:
            try:
                async with asyncio.timeout(CLEARING_DEADLINE):
                    cleared = await self._hooks.clear(again=again)
            except (AgentError, TimeoutError) as error:
                log.warning("hooks.not_cleared", err=str(error) or "out of time")
                return False
            again = False
            self._publish(cleared)
            if not cleared.more:
                return True
            await asyncio.sleep(CLEARING_PAUSE)

    def _publish(self, cleared: Cleared) -> None:
        """Set the state. During an attempt, what stayed before still counts."""
        before = self.state.value
        if cleared.more and cleared.kept <= before.kept:
            return
        if cleared.kept and not before.kept:
            log.warning("hooks.kept", directories=cleared.kept, err=cleared.why)
            self._say(kept_event(cleared))
        self.state.set(cleared)


# Compares the ledger with the kubelet after each answer, for each new kubelet and each minute.
#
# It confirms rows, and reports a mismatch if the kubelet booked other GPUs than were offered. It
# adopts containers that the ledger does not know: another plugin answered them, or the state file
# was lost. It closes rows that no container can use any more; the rules for that differ by mode.

SETTLE = 0.1
"""Seconds from an answer to the question whether the kubelet has booked it."""

YOUNG = 4.0
"""Seconds after an answer in which a Get asks for it alone. Later the next List confirms it."""

QUIET_WITHIN = 10.0
"""Seconds that a List waits at most for a time without an Allocate."""


class ReconcileViews(msgspec.Struct, frozen=True):
    """The facts that are compared. `epoch`: the present kubelet instance.

    - `rivals`: how many other plugins for the resource are gone; their answers are not known yet.
    - `taken`: the rows that a call is answering or the reconcile is closing, shared with Allocate:
      a row is never answered and closed at the same time.
    """

    pods: Cell[PodTable]
    ledger: Cell[Ledger]
    epoch: Cell[KubeletEpoch | None]
    taken: set[ContainerKey] = msgspec.field(default_factory=set)
    rivals: Cell[int] = msgspec.field(default_factory=lambda: Cell(0))


class ReconcilePeers(msgspec.Struct, frozen=True):
    """The ports that a reconcile uses. `calls`: the kubelet's requests under way."""

    witness: Witness
    records: KubeletRecords
    hooks: HookDirs
    clock: Clock
    calls: Lull = msgspec.field(default_factory=Lull)


class ReconcileRule(msgspec.Struct, frozen=True):
    """What differs between hami mode and plain mode.

    - `judge`: compares the ledger with the facts, for the present name of the `resource`.
    - `adopt`: makes the row of a container that was answered; None: its answer is unreadable.
    - `within`: seconds after which a List is made although Allocates run. None: never, because a
      List can un-mark ids that decide who has what.
    - `sweeps`: leaked directories can be recognised, so they are removed.
    """

    judge: Callable[[Ledger, ReconcileFacts, str], Findings]
    resource: Callable[[], str]
    adopt: Callable[[Adoption], Awaitable[Row | None]]
    within: float | None = QUIET_WITHIN
    sweeps: bool = True


class _Heard(msgspec.Struct, frozen=True):
    """The answers of the kubelet `epoch`, and the directories, as in ReconcileFacts."""

    holdings: Sequence[Holding]
    epoch: KubeletEpoch | None
    complete: bool
    directories: frozenset[str] = frozenset()


class Reconcile:
    """Keeps the ledger equal to what the kubelet holds. `commit` may raise StateError."""

    def __init__(
        self,
        *,
        views: ReconcileViews,
        peers: ReconcilePeers,
        rule: ReconcileRule,
        commit: Callable[[Callable[[Ledger], Ledger]], Awaitable[None]],
    ) -> None:
        self._views = views
        self._peers = peers
        self._rule = rule
        self._commit = commit
        self._silent = False
        self._directories = Directories(peers.hooks, views.ledger, peers.clock)
        self._since = EVER
        self._due: dt.datetime | None = None
        self._idle: Mapping[ContainerKey, dt.datetime] = {}
        self._closing: set[ContainerKey] = set()
        self._failed: Mapping[PodUid, dt.datetime] = {}
        self._asked: dict[ContainerKey, float] = {}
        self._epoch: KubeletEpoch | None = None
        self._met = 0.0
        self._found: frozenset[str] | None = None if rule.sweeps else frozenset()
        self.unconfirmed: Cell[int] = Cell(0)
        self.drifted: Cell[int] = Cell(0)
        self.mismatches = Tally(
            "allocation_mismatches",
            "Containers for which the kubelet booked other GPUs than were offered and answered.",
        )

    async def run(self) -> NoReturn:
        """Reconcile for ever.

        - With a List: at the start, for each new kubelet, each minute, when a row's grace ends,
          when another plugin is gone, and after an answer without a known pod.
        - With a Get of the pod: after each other answer.
        """
        await self._views.pods.until(lambda table: table.synced)
        self._since = self._peers.clock.now()
        news = News(self._views.ledger, self._views.epoch, self._views.rivals)
        failures = 0
        while True:
            epoch = self._views.epoch.value
            if epoch is None:
                await news.wait()
                continue
            if epoch != self._epoch:
                self._epoch, self._met = epoch, asyncio.get_running_loop().time()
                self._idle = {}  # a new kubelet does not know all its pods yet
            rivals = self._views.rivals.value
            failures = 0 if await self._look(epoch) else failures + 1
            if self._views.rivals.value == rivals:
                await self._between(epoch, news, self._period(epoch, failures))

    def _period(self, epoch: KubeletEpoch, failures: int) -> float:
        """Seconds until the next List."""
        if 0 < failures <= len(RETRIES):
            return RETRIES[failures - 1]
        is_new = asyncio.get_running_loop().time() - self._met < SETTLING
        rows = self._views.ledger.value.rows
        return SETTLING_PAUSE if is_new and any(row.epoch != epoch for row in rows) else PERIOD

    async def _between(self, epoch: KubeletEpoch, news: News, period: float) -> None:
        """Confirm fresh answers with Gets until the next List is due."""
        loop = asyncio.get_running_loop()
        due = loop.time() + period
        rivals = self._views.rivals.value
        while (
            (left := min(due - loop.time(), self._until_due(period))) > 0
            and self._views.epoch.value == epoch
            and self._views.rivals.value == rivals
        ):
            fresh = self._fresh(epoch)
            if any(row.holder is None for row in fresh):
                return  # only a List can name the pod
            if fresh:
                await self._confirm(fresh)
            await news.wait(min(left, PAUSE) if self._asked else left)

    def _until_due(self, most: float) -> float:
        """Seconds until the grace of a row ends, `most` at most."""
        if self._due is None:
            return most
        return min(most, (self._due - self._peers.clock.now()).total_seconds())

    def _fresh(self, epoch: KubeletEpoch) -> tuple[Row, ...]:
        """Unconfirmed rows of this kubelet that it was not asked about in the last PAUSE."""
        elapsed = asyncio.get_running_loop().time()
        self._asked = {key: at for key, at in self._asked.items() if elapsed - at < PAUSE}
        return tuple(
            row
            for row in self._views.ledger.value.rows
            if row.epoch == epoch
            and not row.confirmed
            and row.key not in self._asked
            and self._young(row)
        )

    def _young(self, row: Row) -> bool:
        age = self._peers.clock.now() - row.answered_at
        pod = self._views.pods.value.pods.get(row.pod_uid)
        is_there = row.holder is None or (pod is not None and not pod.terminal)
        return 0 <= age.total_seconds() < YOUNG and is_there

    async def _confirm(self, rows: tuple[Row, ...]) -> None:
        await asyncio.sleep(SETTLE)
        epoch = self._views.epoch.value
        elapsed = asyncio.get_running_loop().time()
        self._asked.update((row.key, elapsed) for row in rows)
        holdings: list[Holding] = []
        for namespace, pod in dict.fromkeys((row.namespace, row.pod) for row in rows):
            try:
                async with asyncio.timeout(DEADLINE):
                    get = functools.partial(self._peers.witness.get, namespace, pod)
                    holding = await retry(get, WitnessThrottled, THROTTLED_PAUSE)
            except (AgentError, TimeoutError) as error:
                log.debug("reconcile.unanswered", pod=pod, err=str(error))
                break
            if holding is not None:
                holdings.append(holding)
        await self._apply(_Heard(holdings, epoch, complete=False))

    async def _look(self, epoch: KubeletEpoch) -> bool:
        """Reconcile with a List of the kubelet `epoch`. False: it should be tried again soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rule.within):
                await self._peers.calls.come(QUIET)
        elapsed, self._due = asyncio.get_running_loop().time(), None
        rows = self._views.ledger.value.rows
        self._asked.update((row.key, elapsed) for row in rows if row.holder is None)
        try:
            async with asyncio.timeout(DEADLINE):
                holdings = await retry(self._peers.witness.list, WitnessThrottled, THROTTLED_PAUSE)
        except (AgentError, TimeoutError) as error:
            if not self._silent:
                log.info("reconcile.unanswered", err=str(error) or "out of time")
            self._silent = True
            return False
        self._silent = False
        if self._views.epoch.value != epoch:
            return False
        if self._found is None:
            self._found = await self._directories.names()
        heard = _Heard(holdings, epoch, complete=True, directories=self._found or frozenset())
        done = await self._apply(heard)
        if done and self._found is not None:
            self._found = frozenset()
        return done

    async def _apply(self, heard: _Heard) -> bool:
        """Compare the ledger with the answers and correct it. False: something is left to do."""
        recorded: Mapping[ContainerKey, frozenset[SliceId]] | None = None
        if heard.complete or any(row.role is Role.INIT for row in self._views.ledger.value.rows):
            recorded = await self._recorded()
        ledger = self._views.ledger.value
        self._failed = self._seen_failed()
        seen = ReconcileFacts(
            table=self._views.pods.value,
            holdings=heard.holdings,
            epoch=heard.epoch or KubeletEpoch(),
            now=self._peers.clock.now(),
            complete=heard.complete,
            recorded=recorded,
            directories=heard.directories,
            since=self._since,
            failed=self._failed,
            idle=self._idle,
        )
        # A commit that was given up may have dropped its rows later.
        known = {row.key for row in ledger.rows}
        self._release_keys(self._closing - known)
        findings = self._rule.judge(ledger, seen, self._rule.resource())
        mine = [row for row in findings.over if self._take(row.key)]
        if heard.complete:
            self._idle, self._due = findings.idle, findings.due
            self.unconfirmed.set(findings.unconfirmed)
            self.drifted.set(findings.drifted)
        adopted = await take_over(findings, seen, ledger, self._rule.adopt)
        over = await self._removed(mine)
        written = await self._write(ledger, findings, adopted, over)
        if heard.complete and written and self._rule.sweeps:
            await self._directories.sweep(seen)
        return written and not adopted.unread and len(over) == len(findings.over)

    def _take(self, key: ContainerKey) -> bool:
        """Reserve the row for closing. False: a call is answering it."""
        if key in self._views.taken and key not in self._closing:
            return False
        self._views.taken.add(key)
        self._closing.add(key)
        return True

    def _release(self, *rows: Row) -> None:
        self._release_keys({row.key for row in rows})

    def _release_keys(self, keys: set[ContainerKey]) -> None:
        self._views.taken.difference_update(keys)
        self._closing.difference_update(keys)

    async def _removed(self, rows: Sequence[Row]) -> list[Row]:
        """Remove the rows' directories. Returns the rows whose directory is gone.

        The directory goes before the row, so that a crash leaves no directory without a row.
        """
        over: list[Row] = []
        with contextlib.suppress(TimeoutError):  # the others wait for the next look
            for row in rows:
                if await self._is_removed(row):
                    over.append(row)  # noqa: PERF401 -- what went before the disk hung counts
        self._release(*(row for row in rows if row not in over))
        return over

    async def _is_removed(self, row: Row) -> bool:
        """Whether the row has no directory any more. Raises TimeoutError: see Directories."""
        if not row.has_directory:
            return True
        try:
            name = container_directory(row.key.pod_uid, row.key.container)
        except Refusal:  # the row comes from a state file that was changed by hand
            return True
        return await self._directories.remove(name)

    def _seen_failed(self) -> Mapping[PodUid, dt.datetime]:
        """The failed pods, with the time at which the agent saw them failed."""
        now, pods = self._peers.clock.now(), self._views.pods.value.pods.values()
        failed = (pod.uid for pod in pods if pod.phase is Phase.FAILED)
        return {uid: min(self._failed.get(uid, now), now) for uid in failed}

    async def _recorded(self) -> Mapping[ContainerKey, frozenset[SliceId]] | None:
        try:
            async with asyncio.timeout(DEADLINE):
                return await self._peers.records.read(self._rule.resource())
        except TimeoutError:
            log.warning("reconcile.records_unread", after=DEADLINE)
            return None

    async def _write(
        self, base: Ledger, findings: Findings, adopted: AdoptedRows, over: list[Row]
    ) -> bool:
        if not (findings.confirmed or adopted.rows or over):
            return True
        keys = [row.key for row in over]
        try:
            await self._commit(
                lambda ledger: applied(base, ledger, findings, adopted.rows).drop(keys)
            )
        except StateError as error:
            log.warning("reconcile.put_off", err=str(error))
            return False
        self._release(*over)
        self._tell(findings)
        adopted.tell()
        for row in over:
            log.info("ledger.closed", pod_uid=row.key.pod_uid, ctr=row.key.container)
        return True

    def _tell(self, findings: Findings) -> None:
        """Count and log the mismatches that are new. Settlement posts their Events."""
        for key in findings.mismatched:
            row = self._views.ledger.value.find(key)
            if row is not None and row.mismatched:
                self.mismatches.add()
                log.warning(
                    "ledger.mismatch", ns=row.namespace, pod=row.pod, err=str(mismatch(row))
                )
