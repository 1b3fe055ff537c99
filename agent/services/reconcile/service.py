"""Reconcile: the ledger against the kubelet, after each answer, each new kubelet, each minute.

It confirms rows and says where the kubelet booked other GPUs than were offered and answered, takes
over holders that the ledger does not know (a node that switches to this agent, a lost state file),
and closes rows of pods that nobody knows any more.
"""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import functools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NoReturn

import structlog

from agent.core.cluster.pods import Phase, PodTable, PodUid, Role
from agent.core.errors import AgentError, StateError, WitnessThrottled
from agent.core.ports import Clock, HookDirs, KubeletRecords, Witness
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
from agent.core.reconcile.reconcile import (
    EVER,
    Adoption,
    Findings,
    ReconcileFacts,
    compare,
    mismatch,
)
from agent.core.state.holdings import Holding, KubeletEpoch
from agent.core.state.ledger import ContainerKey, Ledger, Row
from agent.kit.again import again
from agent.kit.cell import Cell
from agent.kit.lull import Lull
from agent.kit.news import News
from agent.kit.tally import Tally
from agent.services.reconcile.changes import AdoptedRows, applied, graces, take_over
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
    """What is compared. `epoch` names the kubelet that is there now, `resource` is ours.

    `rivals` counts the other plugins that are gone: what they answered is not known yet.
    """

    pods: Cell[PodTable]
    ledger: Cell[Ledger]
    epoch: Cell[KubeletEpoch | None]
    resource: Cell[str]
    rivals: Cell[int] = dataclasses.field(default_factory=lambda: Cell(0))


@dataclasses.dataclass(frozen=True, slots=True)
class ReconcilePeers:
    """Whom it asks, and where it cleans up. `adopt` makes a row, None: it cannot.

    `calls` are the kubelet's requests under way.
    """

    witness: Witness
    records: KubeletRecords
    hooks: HookDirs
    clock: Clock
    adopt: Callable[[Adoption], Awaitable[Row | None]]
    calls: Lull = dataclasses.field(default_factory=Lull)


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
        commit: Callable[[Callable[[Ledger], Ledger]], Awaitable[None]],
    ) -> None:
        self._views = views
        self._peers = peers
        self._commit = commit
        self._silent = False
        self._directories = Directories(peers.hooks, views.ledger, peers.clock)
        self._looked_at = self._since = EVER
        self._failed: Mapping[PodUid, dt.datetime] = {}
        self._asked: dict[ContainerKey, float] = {}
        self._epoch: KubeletEpoch | None = None
        self._met = -math.inf
        self._found: frozenset[str] | None = None
        self.unconfirmed: Cell[int] = Cell(0)
        self.drifted: Cell[int] = Cell(0)
        self.mismatches = Tally(
            "allocation_mismatches",
            "Containers for which the kubelet booked other GPUs than were offered and answered.",
        )

    async def run(self) -> NoReturn:
        """A complete look now, after each new kubelet, each minute and when a row's grace ends.

        Also when another plugin for our resource is gone. A short one after each answer.
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
            (left := min(due - loop.time(), self._until_grace_ends())) > 0
            and self._views.epoch.value == epoch
            and self._views.rivals.value == rivals
        ):
            fresh = self._fresh(epoch)
            if fresh:
                await self._confirm(fresh)
            await news.wait(min(left, PAUSE) if self._asked else left)

    def _until_grace_ends(self) -> float:
        """Seconds until the first row since the last look may be closed; for ever: none may.

        No grace is shorter than the PERIOD, so no pod can be deleted and due between two looks.
        """
        ends = graces(self._views.ledger.value, self._views.pods.value, self._since)
        coming = [end for end in ends if end > self._looked_at]
        if not coming:
            return math.inf
        return (min(coming) - self._peers.clock.now()).total_seconds()

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
        pod = self._views.pods.value.pods.get(row.key.pod_uid)
        return 0 <= age.total_seconds() < YOUNG and pod is not None and not pod.terminal

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
            async with asyncio.timeout(QUIET_WITHIN):
                await self._peers.calls.come(QUIET)
        self._looked_at = self._peers.clock.now()
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
        recorded: frozenset[ContainerKey] | None = None
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
        )
        findings = compare(ledger, seen, (self._views.resource.value,))
        if heard.complete:
            self.unconfirmed.set(findings.unconfirmed)
            self.drifted.set(findings.drifted)
        taken = await take_over(findings, seen, ledger, self._peers.adopt)
        written = await self._write(ledger, findings, taken)
        await self._directories.clean_up()
        if heard.complete and written:
            await self._directories.sweep(seen)
        return written and not taken.unread

    def _seen_failed(self, ledger: Ledger) -> Mapping[PodUid, dt.datetime]:
        """Since when the failed pods that have rows are known to be failed."""
        now, pods = self._peers.clock.now(), self._views.pods.value.pods
        failed = (
            uid
            for uid in {row.key.pod_uid for row in ledger.rows}
            if uid in pods and pods[uid].phase is Phase.FAILED
        )
        return {uid: min(self._failed.get(uid, now), now) for uid in failed}

    async def _recorded(self) -> frozenset[ContainerKey] | None:
        try:
            async with asyncio.timeout(DEADLINE):
                return await self._peers.records.read(self._views.resource.value)
        except TimeoutError:
            log.warning("reconcile.records_unread", after=DEADLINE)
            return None

    async def _write(self, base: Ledger, findings: Findings, taken: AdoptedRows) -> bool:
        self._directories.closing(findings.vanished)
        if not (findings.confirmed or findings.vanished or taken.rows or taken.kept):
            return True
        now = self._peers.clock.now()
        try:
            await self._commit(lambda ledger: applied(base, ledger, findings, taken, now))
        except StateError as error:
            log.warning("reconcile.put_off", err=str(error))
            return False
        self._tell(findings)
        taken.tell()
        for key in findings.vanished:
            log.info("ledger.closed", pod_uid=key.pod_uid, ctr=key.container)
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
