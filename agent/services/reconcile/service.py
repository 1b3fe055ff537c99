"""Reconcile: the ledger against the kubelet, after each answer, each new kubelet, each minute.

It confirms rows and says where the kubelet booked other GPUs than were offered and answered, takes
over holders that the ledger does not know (a node that switches to this agent, a lost state file),
and closes rows of pods that nobody knows any more.
"""

import asyncio
import dataclasses
import datetime as dt
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import NoReturn

import structlog

from agent.core.errors import AgentError, StateError
from agent.core.holdings import Holding, KubeletEpoch
from agent.core.ledger import ContainerKey, Ledger, Row
from agent.core.pods import PodTable, Role
from agent.core.ports import Clock, HookDirs, KubeletRecords, Witness
from agent.core.reconcile import (
    VANISHED_GRACE,
    Adoption,
    Findings,
    Seen,
    compare,
    mismatch,
    mismatch_event,
)
from agent.kit.cell import Cell
from agent.kit.news import News
from agent.kit.tally import Tally
from agent.services.reconcile.directories import Directories

log = structlog.get_logger(__name__)

PERIOD = 60.0
"""Seconds between complete looks."""

SETTLE = 0.1
"""Seconds after an answer before the kubelet is asked: it books the answer when it has it."""

PAUSE = 1.0
"""Seconds between looks at an answer that the kubelet has not booked yet."""

YOUNG = 4.0
"""Seconds after which an answer is left to the next complete look."""

RETRIES = (1.0, 2.0, 5.0, 15.0)
"""Seconds until the next complete look after the first ones in a row that failed."""

DEADLINE = 2.0
"""Seconds for one question to the kubelet."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReconcileViews:
    """What is compared. `epoch` names the kubelet that is there now."""

    pods: Cell[PodTable]
    ledger: Cell[Ledger]
    epoch: Cell[KubeletEpoch | None]
    resource: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReconcilePeers:
    """Whom it asks, and where it cleans up. `adopt` makes the row of a holder, None: it cannot."""

    witness: Witness
    records: KubeletRecords
    hooks: HookDirs
    clock: Clock
    adopt: Callable[[Adoption], Row | None]


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
        self._looked_at = dt.datetime.min.replace(tzinfo=dt.UTC)
        self._asked: dict[ContainerKey, float] = {}
        self.unconfirmed: Cell[int] = Cell(0)
        self.drifted: Cell[int] = Cell(0)
        self.mismatches = Tally(
            "allocation_mismatches",
            "Containers for which the kubelet booked other GPUs than were offered and answered.",
        )

    async def run(self) -> NoReturn:
        """A complete look now, after each new kubelet, each minute and when a row's grace ends.

        A short one after each answer.
        """
        await self._views.pods.until(lambda table: table.synced)
        news = News(self._views.ledger, self._views.epoch)
        failures = 0
        while True:
            epoch = self._views.epoch.value
            if epoch is None:
                await news.wait()
                continue
            failures = 0 if await self._look() else failures + 1
            period = RETRIES[failures - 1] if 0 < failures <= len(RETRIES) else PERIOD
            await self._between(epoch, news, period)

    async def _between(self, epoch: KubeletEpoch, news: News, period: float) -> None:
        """Until the next complete look is due: short looks at what was just answered."""
        loop = asyncio.get_running_loop()
        due = loop.time() + period
        while (
            left := min(due - loop.time(), self._until_grace_ends())
        ) > 0 and self._views.epoch.value == epoch:
            fresh = self._fresh(epoch)
            if fresh:
                await self._confirm(fresh)
            await news.wait(min(left, PAUSE) if self._asked else left)

    def _until_grace_ends(self) -> float:
        """Seconds until the first row since the last look may be closed; for ever: none may.

        No grace is shorter than the PERIOD, so no pod can be deleted and due between two looks.
        """
        ends = graces(self._views.ledger.value, self._views.pods.value)
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
        return age.total_seconds() < YOUNG and pod is not None and not pod.terminal

    async def _confirm(self, rows: tuple[Row, ...]) -> None:
        await asyncio.sleep(SETTLE)
        elapsed = asyncio.get_running_loop().time()
        self._asked.update((row.key, elapsed) for row in rows)
        holdings: list[Holding] = []
        listed = (row for row in rows if row.role is not Role.INIT)
        for namespace, pod in dict.fromkeys((row.namespace, row.pod) for row in listed):
            try:
                async with asyncio.timeout(DEADLINE):
                    holding = await self._peers.witness.get(namespace, pod)
            except (AgentError, TimeoutError) as error:
                log.debug("reconcile.unanswered", pod=pod, err=str(error))
                break
            if holding is not None:
                holdings.append(holding)
        await self._apply(holdings, complete=False)

    async def _look(self) -> bool:
        """A complete look; False when it should be taken again soon."""
        self._looked_at = self._peers.clock.now()
        try:
            async with asyncio.timeout(DEADLINE):
                holdings = await self._peers.witness.list()
        except (AgentError, TimeoutError) as error:
            if not self._silent:
                log.info("reconcile.unanswered", err=str(error) or "out of time")
            self._silent = True
            return False
        self._silent = False
        return await self._apply(list(holdings), complete=True)

    async def _apply(self, holdings: list[Holding], *, complete: bool) -> bool:
        """Hold the ledger against the answers; False when something is left to do."""
        recorded: frozenset[ContainerKey] | None = None
        if any(row.role is Role.INIT for row in self._views.ledger.value.rows):
            recorded = await self._recorded()
        ledger = self._views.ledger.value
        seen = Seen(
            table=self._views.pods.value,
            holdings=holdings,
            epoch=self._views.epoch.value or KubeletEpoch(),
            now=self._peers.clock.now(),
            complete=complete,
            recorded=recorded,
        )
        findings = compare(ledger, seen, self._views.resource)
        if complete:
            self.unconfirmed.set(findings.unconfirmed)
            self.drifted.set(findings.drifted)
        adopted = [row for one in findings.adopt if (row := self._peers.adopt(one)) is not None]
        written = await self._write(ledger, findings, adopted)
        await self._directories.clean_up()
        if complete and written:
            await self._directories.sweep(seen)
        return written and len(adopted) == len(findings.adopt)

    async def _recorded(self) -> frozenset[ContainerKey] | None:
        try:
            async with asyncio.timeout(DEADLINE):
                return await self._peers.records.read(self._views.resource)
        except TimeoutError:
            log.warning("reconcile.records_unread", after=DEADLINE)
            return None

    async def _write(self, base: Ledger, findings: Findings, adopted: list[Row]) -> bool:
        self._directories.closing(findings.vanished)
        if not (findings.confirmed or findings.vanished or adopted):
            return True
        now = self._peers.clock.now()
        try:
            await self._commit(lambda ledger: _applied(base, ledger, findings, adopted, now))
        except StateError as error:
            log.warning("reconcile.put_off", err=str(error))
            return False
        self._tell(findings)
        for row in adopted:
            log.info("ledger.adopted", ns=row.namespace, pod=row.pod, ctr=row.key.container)
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


def graces(ledger: Ledger, table: PodTable) -> Iterator[dt.datetime]:
    """When the rows of deleted pods may be closed."""
    deleted = {stone.pod.uid: stone.deleted_at for stone in table.tombstones}
    for row in ledger.rows:
        if row.key.pod_uid not in table.pods:
            yield deleted.get(row.key.pod_uid, row.answered_at) + VANISHED_GRACE


def _applied(
    base: Ledger, ledger: Ledger, findings: Findings, adopted: list[Row], now: dt.datetime
) -> Ledger:
    """The findings about `base` on the newest ledger: rows that changed meanwhile stay."""
    for row in findings.confirmed:
        present = ledger.find(row.key)
        if present is not None and present == base.find(row.key):
            ledger = ledger.put(row)
            if row.key in findings.mismatched:
                ledger = ledger.owe(mismatch_event(row, now))
    for row in adopted:
        if ledger.find(row.key) is None:
            ledger = ledger.put(row)
    return ledger.drop(findings.vanished)
