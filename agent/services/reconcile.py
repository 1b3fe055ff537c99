"""Reconcile: the ledger against the kubelet, after each answer, each new kubelet, each minute.

It confirms rows, takes over holders that the ledger does not know (a node that switches to this
agent, a lost state file), and closes rows of pods that nobody knows any more.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import NoReturn

import structlog

from agent.core.container_edits import container_directory
from agent.core.errors import AgentError, StateError, WitnessThrottled, WitnessUnsupported
from agent.core.holdings import Holding, KubeletEpoch
from agent.core.ledger import ContainerKey, Ledger, Row
from agent.core.pods import PodTable, Role
from agent.core.ports import Clock, HookDirs, KubeletRecords, Witness
from agent.core.reconcile import Adoption, Findings, Seen, compare
from agent.kit.cell import Cell
from agent.kit.news import news

log = structlog.get_logger(__name__)

PERIOD = 60.0
"""Seconds between complete looks."""

SETTLE = 0.1
"""Seconds after an answer before the kubelet is asked: it books the answer when it has it."""

ATTEMPTS = 4
"""Looks at one answer before the next complete look takes over."""

DEADLINE = 2.0
"""Seconds for one question to the kubelet."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReconcileViews:
    """What is compared. `epoch` names the kubelet that is there now."""

    pods: Cell[PodTable]
    ledger: Cell[Ledger]
    epoch: Callable[[], KubeletEpoch | None]
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
        self.unconfirmed: Cell[int] = Cell(0)
        self.drifted: Cell[int] = Cell(0)

    async def run(self) -> NoReturn:
        """A complete look now, after each new kubelet and each minute; a short one per answer."""
        await self._views.pods.until(lambda table: table.synced)
        while True:
            epoch = self._views.epoch()
            await self._look(complete=True)
            await self._between(epoch)

    async def _between(self, epoch: KubeletEpoch | None) -> None:
        """Until the next complete look is due: short looks at what was just answered."""
        loop = asyncio.get_running_loop()
        due = loop.time() + PERIOD
        while (left := due - loop.time()) > 0 and self._views.epoch() == epoch:
            fresh = self._fresh(epoch)
            if fresh:
                await self._confirm(fresh)
            await news(self._views.ledger, within=min(left, PERIOD / 60 if fresh else left))

    def _fresh(self, epoch: KubeletEpoch | None) -> tuple[Row, ...]:
        """Rows that this kubelet was answered for and has not confirmed."""
        return tuple(
            row
            for row in self._views.ledger.value.rows
            if row.epoch == epoch and not row.confirmed and self._young(row)
        )

    def _young(self, row: Row) -> bool:
        age = self._peers.clock.now() - row.answered_at
        pod = self._views.pods.value.pods.get(row.key.pod_uid)
        return age.total_seconds() < ATTEMPTS and pod is not None and not pod.terminal

    async def _confirm(self, rows: tuple[Row, ...]) -> None:
        await asyncio.sleep(SETTLE)
        holdings: list[Holding] = []
        for namespace, pod in dict.fromkeys((row.namespace, row.pod) for row in rows):
            try:
                async with asyncio.timeout(DEADLINE):
                    holding = await self._peers.witness.get(namespace, pod)
            except (AgentError, TimeoutError) as error:
                log.debug("reconcile.unanswered", pod=pod, err=str(error))
                return
            if holding is not None:
                holdings.append(holding)
        await self._apply(holdings, complete=False)

    async def _look(self, *, complete: bool) -> None:
        try:
            async with asyncio.timeout(DEADLINE):
                holdings = await self._peers.witness.list()
        except (WitnessThrottled, WitnessUnsupported, TimeoutError) as error:
            log.debug("reconcile.unanswered", err=str(error))
            return
        except AgentError as error:
            log.info("reconcile.no_kubelet", err=str(error))
            return
        await self._apply(list(holdings), complete=complete)

    async def _apply(self, holdings: list[Holding], *, complete: bool) -> None:
        ledger = self._views.ledger.value
        recorded: frozenset[ContainerKey] | None = None
        if any(row.role is Role.INIT for row in ledger.rows):
            recorded = await self._peers.records.read(self._views.resource)
        seen = Seen(
            table=self._views.pods.value,
            holdings=holdings,
            epoch=self._views.epoch() or KubeletEpoch(),
            now=self._peers.clock.now(),
            complete=complete,
            recorded=recorded,
        )
        findings = compare(ledger, seen, self._views.resource)
        if complete:
            self.unconfirmed.set(findings.unconfirmed)
        await self._write(findings)

    async def _write(self, findings: Findings) -> None:
        adopted = [row for one in findings.adopt if (row := self._peers.adopt(one)) is not None]
        if not (findings.confirmed or findings.vanished or adopted):
            return
        try:
            await self._commit(lambda ledger: _applied(ledger, findings, adopted))
        except StateError as error:
            log.warning("reconcile.put_off", err=str(error))
            return
        if findings.drifted:
            self.drifted.set(self.drifted.value + findings.drifted)
        for row in adopted:
            log.info("ledger.adopted", ns=row.namespace, pod=row.pod, ctr=row.key.container)
        for key in findings.vanished:
            log.info("ledger.closed", pod_uid=key.pod_uid, ctr=key.container)
            await self._clean_up(key)

    async def _clean_up(self, key: ContainerKey) -> None:
        """The directory of a closed row: no container can hold it any more."""
        try:
            await self._peers.hooks.remove(container_directory(key.pod_uid, key.container))
        except AgentError as error:
            log.warning("hooks.not_removed", pod_uid=key.pod_uid, err=str(error))


def _applied(ledger: Ledger, findings: Findings, adopted: list[Row]) -> Ledger:
    """The findings on the newest ledger: a row that changed meanwhile keeps its change."""
    for row in findings.confirmed:
        present = ledger.find(row.key)
        if present is not None and present.edits == row.edits:
            ledger = ledger.put(row)
    for row in adopted:
        if ledger.find(row.key) is None:
            ledger = ledger.put(row)
    return ledger.drop(findings.vanished)
