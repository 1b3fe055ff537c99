"""Reconcile: the ledger against the kubelet, after each answer, each new kubelet, each minute.

It confirms rows and says where the kubelet booked other GPUs than were offered and answered, takes
over holders that the ledger does not know (a node that switches to this agent, a lost state file),
and closes rows by which nobody can live any more. Who decides the shares decides when that is.
"""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NoReturn

import structlog

from agent.core.cluster.pods import Phase, PodTable, PodUid, Role
from agent.core.containers.container_edits import container_directory
from agent.core.errors import AgentError, Refusal, StateError, WitnessThrottled
from agent.core.inventory.slices import SliceId
from agent.core.ports import Clock, HookDirs, KubeletRecords, Witness
from agent.core.reconcile.findings import EVER, Adoption, Findings, ReconcileFacts
from agent.core.reconcile.pace import (
    DEADLINE,
    PAUSE,
    PERIOD,
    QUIET,
    RETRIES,
    SETTLING,
    SETTLING_PAUSE,
    THROTTLED_PAUSE,
)
from agent.core.reconcile.reconcile import mismatch
from agent.core.state.holdings import Holding, KubeletEpoch
from agent.core.state.ledger import ContainerKey, Ledger, Row
from agent.kit.again import again
from agent.kit.cell import Cell
from agent.kit.lull import Lull
from agent.kit.news import News
from agent.kit.tally import Tally
from agent.services.reconcile.changes import AdoptedRows, applied, take_over
from agent.services.reconcile.directories import Directories

log = structlog.get_logger(__name__)

SETTLE = 0.1
"""Seconds after an answer before the kubelet is asked: it books the answer when it has it."""

YOUNG = 4.0
"""Seconds after which an answer is left to the next complete look."""

QUIET_WITHIN = 10.0
"""Seconds after which a List is made all the same."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReconcileViews:
    """What is compared. `epoch` names the kubelet that is there now.

    `rivals` counts the other plugins that are gone: what they answered is not known yet. `taken`
    are rows in somebody's hands, shared with the allocation: what is being answered is not closed,
    and what is being closed is not answered.
    """

    pods: Cell[PodTable]
    ledger: Cell[Ledger]
    epoch: Cell[KubeletEpoch | None]
    taken: set[ContainerKey] = dataclasses.field(default_factory=set)
    rivals: Cell[int] = dataclasses.field(default_factory=lambda: Cell(0))


@dataclasses.dataclass(frozen=True, slots=True)
class ReconcilePeers:
    """Whom it asks, and where it cleans up. `calls` are the kubelet's requests under way."""

    witness: Witness
    records: KubeletRecords
    hooks: HookDirs
    clock: Clock
    calls: Lull = dataclasses.field(default_factory=Lull)


@dataclasses.dataclass(frozen=True, slots=True)
class ReconcileRule:
    """What differs by who decides the shares.

    `judge` holds the ledger against what was seen, for the present name of our `resource`. `adopt`
    makes a row of an answer, None: it cannot. `within`: seconds after which a List is made although
    Allocates run; None: never, for the ids that it can un-mark decide who has what. `sweeps`: a
    directory of nobody can be told, so leaked ones are looked for.
    """

    judge: Callable[[Ledger, ReconcileFacts, str], Findings]
    resource: Callable[[], str]
    adopt: Callable[[Adoption], Awaitable[Row | None]]
    within: float | None = QUIET_WITHIN
    sweeps: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class _Heard:
    """What the kubelet `epoch` said, and the directories that were found, as in Seen."""

    holdings: Sequence[Holding]
    epoch: KubeletEpoch | None
    complete: bool
    directories: frozenset[str] = frozenset()


class Reconcile:
    """Keeps the ledger in agreement with the kubelet. `commit` is the ledger's."""

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
        """A complete look now, after each new kubelet, each minute and when a row's grace ends.

        Also when another plugin for our resource is gone, and after an answer of which nobody knows
        the pod. A short one after each other answer.
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
                self._idle = {}  # what this kubelet does not know, it may only not know yet
            rivals = self._views.rivals.value
            failures = 0 if await self._look() else failures + 1
            if self._views.rivals.value == rivals:
                await self._between(epoch, news, self._period(epoch, failures))

    def _period(self, epoch: KubeletEpoch, failures: int) -> float:
        """Seconds until the next complete look."""
        if 0 < failures <= len(RETRIES):
            return RETRIES[failures - 1]
        is_new = asyncio.get_running_loop().time() - self._met < SETTLING
        rows = self._views.ledger.value.rows
        return SETTLING_PAUSE if is_new and any(row.epoch != epoch for row in rows) else PERIOD

    async def _between(self, epoch: KubeletEpoch, news: News, period: float) -> None:
        """Until the next complete look is due: short looks at what was just answered."""
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
                return  # only a List tells who that is
            if fresh:
                await self._confirm(fresh)
            await news.wait(min(left, PAUSE) if self._asked else left)

    def _until_due(self, most: float) -> float:
        """Seconds until a row may be over, `most` at most."""
        if self._due is None:
            return most
        return min(most, (self._due - self._peers.clock.now()).total_seconds())

    def _fresh(self, epoch: KubeletEpoch) -> tuple[Row, ...]:
        """Rows answered to this kubelet that it has not confirmed and was not just asked about."""
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
                    holding = await again(get, WitnessThrottled, THROTTLED_PAUSE)
            except (AgentError, TimeoutError) as error:
                log.debug("reconcile.unanswered", pod=pod, err=str(error))
                break
            if holding is not None:
                holdings.append(holding)
        await self._apply(_Heard(holdings, epoch, complete=False))

    async def _look(self) -> bool:
        """A complete look; False when it should be taken again soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rule.within):
                await self._peers.calls.come(QUIET)
        elapsed, self._due = asyncio.get_running_loop().time(), None
        rows = self._views.ledger.value.rows
        self._asked.update((row.key, elapsed) for row in rows if row.holder is None)
        epoch = self._views.epoch.value
        try:
            async with asyncio.timeout(DEADLINE):
                holdings = await again(self._peers.witness.list, WitnessThrottled, THROTTLED_PAUSE)
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
        """Hold the ledger against the answers; False when something is left to do.

        They are those of the kubelet that was there before it was asked: of a later one nothing is
        known.
        """
        recorded: Mapping[ContainerKey, frozenset[SliceId]] | None = None
        if heard.complete or any(row.role is Role.INIT for row in self._views.ledger.value.rows):
            recorded = await self._recorded()
        ledger = self._views.ledger.value
        self._failed = self._seen_failed(ledger)
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
        """Whether the row is ours to close: it is not being answered with just now."""
        if key in self._views.taken and key not in self._closing:
            return False
        self._views.taken.add(key)
        self._closing.add(key)
        return True

    def _release(self, *rows: Row) -> None:
        keys = {row.key for row in rows}
        self._views.taken.difference_update(keys)
        self._closing.difference_update(keys)

    async def _removed(self, rows: Sequence[Row]) -> list[Row]:
        """Those of the rows that have no directory any more; the others stay until it is gone.

        In this order nothing is left behind by a kill.
        """
        over: list[Row] = []
        for row in rows:
            if await self._is_removed(row):
                over.append(row)
            else:
                self._release(row)
        return over

    async def _is_removed(self, row: Row) -> bool:
        if not row.has_directory:
            return True
        try:
            name = container_directory(row.key.pod_uid, row.key.container)
        except Refusal:  # of a file that was tampered with
            return True
        return await self._directories.remove(name)

    def _seen_failed(self, ledger: Ledger) -> Mapping[PodUid, dt.datetime]:
        """Since when the failed pods that have rows are known to be failed."""
        now, pods = self._peers.clock.now(), self._views.pods.value.pods
        failed = (
            uid
            for uid in {row.key.pod_uid for row in ledger.rows}
            if uid in pods and pods[uid].phase is Phase.FAILED
        )
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
        now, keys = self._peers.clock.now(), [row.key for row in over]
        try:
            await self._commit(
                lambda ledger: applied(base, ledger, findings, adopted.rows, now).drop(keys)
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
        """Count and log the mismatches whose Events are owed now."""
        for key in findings.mismatched:
            row = self._views.ledger.value.find(key)
            if row is not None and row.told:
                self.mismatches.add()
                log.warning(
                    "ledger.mismatch", ns=row.namespace, pod=row.pod, err=str(mismatch(row))
                )
