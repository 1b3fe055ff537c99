"""Reconciles the ledger with the kubelet, and the directories with the ledger."""

import asyncio
import contextlib
import datetime as dt
import functools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
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

log = structlog.get_logger(__name__)

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
            again, before = False, self.state.value
            # During an attempt, what stayed before still counts.
            if not cleared.more or cleared.kept > before.kept:
                if cleared.kept and not before.kept:
                    log.warning("hooks.kept", directories=cleared.kept, err=cleared.why)
                    self._say(kept_event(cleared))
                self.state.set(cleared)
            if not cleared.more:
                return True
            await asyncio.sleep(CLEARING_PAUSE)


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

SWEEP_PERIOD = 3600.0
"""Seconds between searches for leaked directories: of no row and of no pod of this node."""


async def unread(_: Adoption) -> Row | None:
    """None: plain mode has no source for another plugin's answer."""
    return None


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
        self._swept_at = -math.inf
        self._since = EVER
        self._due: dt.datetime | None = None
        self._idle: Mapping[ContainerKey, dt.datetime] = {}
        self._closing: set[ContainerKey] = set()
        self._failed: Mapping[PodUid, dt.datetime] = {}
        self._asked: dict[ContainerKey, float] = {}
        self._epoch: KubeletEpoch | None = None
        self._met = 0.0
        self._names: frozenset[str] | None = None if rule.sweeps else frozenset()
        """The directories that a start finds; None: not searched yet."""
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
        views, loop = self._views, asyncio.get_running_loop()
        await views.pods.until(lambda table: table.synced)
        self._since = self._peers.clock.now()
        news = News(views.ledger, views.epoch, views.rivals)
        failures = 0
        while True:
            epoch = views.epoch.value
            if epoch is None:
                await news.wait()
                continue
            if epoch != self._epoch:
                self._epoch, self._met = epoch, loop.time()
                self._idle = {}  # a new kubelet does not know all its pods yet
            rivals = views.rivals.value
            failures = 0 if await self._look(epoch) else failures + 1
            if 0 < failures <= len(RETRIES):
                period = RETRIES[failures - 1]
            else:
                is_new = loop.time() - self._met < SETTLING
                is_behind = any(row.epoch != epoch for row in views.ledger.value.rows)
                period = SETTLING_PAUSE if is_new and is_behind else PERIOD
            due = loop.time() + period
            while views.epoch.value == epoch and views.rivals.value == rivals:
                left = due - loop.time()
                if self._due is not None:
                    left = min(left, (self._due - self._peers.clock.now()).total_seconds())
                fresh = self._fresh(epoch)
                if left <= 0 or any(row.holder is None for row in fresh):
                    break  # only a List can name the pod
                if fresh:
                    await self._confirm(fresh)
                await news.wait(min(left, PAUSE) if self._asked else left)

    def _fresh(self, epoch: KubeletEpoch) -> list[Row]:
        """Unconfirmed rows of this kubelet that it was not asked about in the last PAUSE."""
        elapsed, now = asyncio.get_running_loop().time(), self._peers.clock.now()
        self._asked = {key: at for key, at in self._asked.items() if elapsed - at < PAUSE}
        fresh: list[Row] = []
        for row in self._views.ledger.value.rows:
            if row.confirmed or row.epoch != epoch or row.key in self._asked:
                continue
            pod = self._views.pods.value.pods.get(row.pod_uid)
            is_there = row.holder is None or (pod is not None and not pod.terminal)
            if is_there and 0 <= (now - row.answered_at).total_seconds() < YOUNG:
                fresh.append(row)
        return fresh

    async def _confirm(self, rows: Sequence[Row]) -> None:
        """Ask the kubelet about the pods of these rows."""
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
        await self._apply(holdings, epoch or KubeletEpoch(), complete=False)

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
        if self._names is None and (found := await self._directories()) is not None:
            self._names = frozenset(found)
        done = await self._apply(holdings, epoch, complete=True)
        if done and self._names is not None:
            self._names = frozenset()
        return done

    async def _apply(
        self, holdings: Sequence[Holding], epoch: KubeletEpoch, *, complete: bool
    ) -> bool:
        """Compare the ledger with the kubelet's answers and correct it; `complete`: to a List.

        False: something is left to do.
        """
        views, rule = self._views, self._rule
        recorded: Mapping[ContainerKey, frozenset[SliceId]] | None = None
        if complete or any(row.role is Role.INIT for row in views.ledger.value.rows):
            try:
                async with asyncio.timeout(DEADLINE):
                    recorded = await self._peers.records.read(rule.resource())
            except TimeoutError:
                log.warning("reconcile.records_unread", after=DEADLINE)
        ledger, table, now = views.ledger.value, views.pods.value, self._peers.clock.now()
        failed = (pod.uid for pod in table.pods.values() if pod.phase is Phase.FAILED)
        self._failed = {uid: min(self._failed.get(uid, now), now) for uid in failed}
        seen = ReconcileFacts(
            table=table,
            holdings=holdings,
            epoch=epoch,
            now=now,
            complete=complete,
            recorded=recorded,
            directories=(self._names or frozenset()) if complete else frozenset(),
            since=self._since,
            failed=self._failed,
            idle=self._idle,
        )
        # A commit that was given up may have dropped its rows later.
        self._release(self._closing - {row.key for row in ledger.rows})
        findings = rule.judge(ledger, seen, rule.resource())
        # A row that a call is answering is left to the next look.
        busy = views.taken - self._closing
        mine = [row for row in findings.over if row.key not in busy]
        self._closing.update(row.key for row in mine)
        views.taken.update(self._closing)
        if complete:
            self._idle, self._due = findings.idle, findings.due
            self.unconfirmed.set(findings.unconfirmed)
            self.drifted.set(findings.drifted)
        adopted, unread = await self._adopted(findings, seen, ledger)
        over = await self._removed(mine)
        written = await self._write(ledger, findings, adopted, over)
        if complete and written and rule.sweeps:
            await self._sweep(seen)
        return written and not unread and len(over) == len(findings.over)

    def _release(self, keys: set[ContainerKey]) -> None:
        self._views.taken.difference_update(keys)
        self._closing.difference_update(keys)

    async def _adopted(
        self, findings: Findings, seen: ReconcileFacts, ledger: Ledger
    ) -> tuple[list[Row], int]:
        """New rows for containers that the ledger did not know, and how many were not readable.

        If a container's answer cannot be read, its row only keeps its ids in use, and a later look
        tries again.
        """
        rows: list[Row] = []
        strangers = list(findings.strangers)
        unread = 0
        explains = explained_by(ledger)
        for adoption in findings.adopt:
            row = await self._rule.adopt(adoption)
            if row is not None:
                rows.append(row)
                continue
            unread += 1
            pod, container = adoption.pod, adoption.container
            holder = Holder(pod.namespace, pod.name, container.name)
            if adoption.ids and not explains(holder, adoption.ids):
                strangers.append(Stranger(holder, adoption.ids, container.resource))
        rows += (stranger.row(seen.now, seen.epoch) for stranger in strangers)
        return rows, unread

    async def _removed(self, rows: Sequence[Row]) -> list[Row]:
        """Remove the rows' directories. Returns the rows whose directory is gone.

        The directory goes before the row, so that a crash leaves no directory without a row.
        """
        over: list[Row] = []
        with contextlib.suppress(TimeoutError):  # the others wait for the next look
            for row in rows:
                name = ""
                # A row may come from a state file that was changed by hand.
                with contextlib.suppress(Refusal):
                    if row.has_directory:
                        name = container_directory(row.key.pod_uid, row.key.container)
                if not name or await self._remove(name):
                    over.append(row)
        self._release({row.key for row in rows if row not in over})
        return over

    async def _write(
        self, base: Ledger, findings: Findings, adopted: Sequence[Row], over: Sequence[Row]
    ) -> bool:
        """Commit the findings about `base`. False: they could not be written."""
        if not (findings.confirmed or adopted or over):
            return True

        def change(ledger: Ledger) -> Ledger:
            # Rows that changed since `base` stay as they are.
            for row in findings.confirmed:
                present = ledger.find(row.key)
                if present is not None and present == base.find(row.key):
                    ledger = ledger.put(row)
            for row in adopted:
                if ledger.find(row.key) is None:
                    ledger = ledger.put(row)
            return ledger.drop(row.key for row in over)

        try:
            await self._commit(change)
        except StateError as error:
            log.warning("reconcile.put_off", err=str(error))
            return False
        self._release({row.key for row in over})
        for key in findings.mismatched:  # settlement posts their Events
            new = self._views.ledger.value.find(key)
            if new is not None and new.mismatched:
                self.mismatches.add()
                log.warning(
                    "ledger.mismatch", ns=new.namespace, pod=new.pod, err=str(mismatch(new))
                )
        for row in adopted:
            event = "ledger.kept_unread" if row.adopted else "ledger.adopted"
            tell = log.warning if row.adopted else log.info
            container = row.holder and row.holder.container
            tell(event, ns=row.namespace, pod=row.pod, ctr=container)
        for row in over:
            log.info("ledger.closed", pod_uid=row.key.pod_uid, ctr=row.key.container)
        return True

    async def _directories(self) -> Mapping[str, dt.datetime] | None:
        """Each container directory, with its last change; None: the disk failed or was silent."""
        try:
            async with asyncio.timeout(DEADLINE):
                return await self._peers.hooks.found()
        except (AgentError, TimeoutError) as error:
            log.warning("hooks.not_searched", err=str(error) or "out of time")
            return None

    async def _sweep(self, seen: ReconcileFacts) -> None:
        """Remove leaked directories if the last successful search is SWEEP_PERIOD ago."""
        elapsed = asyncio.get_running_loop().time()
        if elapsed - self._swept_at < SWEEP_PERIOD or (found := await self._directories()) is None:
            return
        self._swept_at, now = elapsed, self._peers.clock.now()
        ages = {name: now - changed for name, changed in found.items()}
        with contextlib.suppress(TimeoutError):
            for name in leaked(ages, self._views.ledger.value, seen):
                log.info("hooks.leaked", directory=name)
                await self._remove(name)

    async def _remove(self, name: str) -> bool:
        """Remove the container directory. False: this one cannot be removed.

        Raises TimeoutError: the disk does not answer, so it is useless to try another directory.
        """
        try:
            async with asyncio.timeout(DEADLINE):
                await self._peers.hooks.remove(name)
        except AgentError as error:
            log.warning("hooks.not_removed", directory=name, err=str(error))
            return False
        except TimeoutError:
            log.warning("hooks.not_removed", directory=name, err="out of time")
            raise
        return True
