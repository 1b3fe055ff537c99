"""Plain mode's rows against the kubelet: a List after each burst, at each new kubelet, each minute.

A List can un-mark ids that the kubelet is just giving out, so it waits until no Allocate has run
for a moment. Also run in hami mode, where it looks after what plain mode left, and asks nothing
when there is nothing.
"""

import asyncio
import dataclasses
import datetime as dt
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NoReturn

import structlog

from agent.core.ages import has_passed
from agent.core.allocation.plain import directory_of
from agent.core.cluster.pods import PodUid
from agent.core.containers.container_edits import container_directory
from agent.core.errors import AgentError, StateError, WitnessThrottled
from agent.core.inventory.slices import SliceId
from agent.core.ports import Clock, HookDirs, KubeletHolds, Witness
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
from agent.core.reconcile.plain import PlainFindings, PlainSeen, observe
from agent.core.state.holdings import KubeletEpoch
from agent.core.state.ledger import ContainerKey, Ledger, Row
from agent.core.state.plain_row import PlainRow, Stranger
from agent.kit.again import again
from agent.kit.cell import Cell
from agent.kit.lull import Lull
from agent.kit.news import News

log = structlog.get_logger(__name__)

YOUNG = dt.timedelta(seconds=4)
"""How long an answer that the kubelet has not booked yet is looked at more often."""

SHORTEST = 1.0
"""Seconds between looks at least, but for news."""

_Answers = frozenset[tuple[PodUid, dt.datetime]]


@dataclasses.dataclass(frozen=True, slots=True)
class PlainBooks:
    """What is compared. `resource` is our resource's name.

    `alone`: the node is in plain mode, nobody else reconciles.
    """

    ledger: Cell[Ledger]
    epoch: Cell[KubeletEpoch | None]
    resource: Cell[str]
    alone: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PlainPeers:
    """Whom it asks, and where it cleans up. `calls`: the kubelet's requests under way."""

    witness: Witness
    holds: KubeletHolds
    hooks: HookDirs
    clock: Clock
    calls: Lull
    chance: random.Random


class PlainReconcile:
    """Keeps plain mode's rows in agreement with the kubelet. `commit` is the ledger's.

    `taken` are rows in somebody's hands, shared with the allocation: what is being answered is not
    closed, and what is being closed is not answered.
    """

    def __init__(
        self,
        *,
        books: PlainBooks,
        peers: PlainPeers,
        commit: Callable[[Callable[[Ledger], Ledger]], Awaitable[None]],
        taken: set[PodUid],
    ) -> None:
        self._books = books
        self._peers = peers
        self._commit = commit
        self._taken = taken
        self._closing: set[PodUid] = set()
        self._epoch: KubeletEpoch | None = None
        self._met = 0.0
        self._looked: _Answers = frozenset()
        self._idle: Mapping[PodUid | ContainerKey, dt.datetime] = {}
        self._due: dt.datetime | None = None
        self._silent = False
        self.unconfirmed: Cell[int] = Cell(0)

    async def run(self) -> NoReturn:
        """Look whenever something is due, for ever."""
        news = News(self._books.ledger, self._books.epoch)
        failures = 0
        while True:
            epoch = self._books.epoch.value
            if epoch is None or not self._wanted():
                await news.wait()
                continue
            await self._peers.calls.come(QUIET)
            failures = 0 if await self._look(epoch) else failures + 1
            await self._pause(news, self._period(failures))

    def _wanted(self) -> bool:
        return self._books.alone or bool(self._books.ledger.value.plain)

    def _period(self, failures: int) -> float:
        """Seconds until the next look without any news."""
        if 0 < failures <= len(RETRIES):
            return RETRIES[failures - 1]
        now = self._peers.clock.now()
        rows = self._books.ledger.value.plain
        if any(not row.confirmed and not has_passed(YOUNG, row.answered_at, now) for row in rows):
            return PAUSE
        known = asyncio.get_running_loop().time() - self._met
        if known < SETTLING and any(row.epoch != self._epoch for row in rows):
            return SETTLING_PAUSE
        if self._due is None:
            return PERIOD
        return min(max((self._due - now).total_seconds(), SHORTEST), PERIOD)

    async def _pause(self, news: News, period: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + period
        while (left := due - loop.time()) > 0 and not self._is_new():
            await news.wait(left)

    def _is_new(self) -> bool:
        """Whether there is another kubelet, or an answer that was not looked for yet."""
        return self._books.epoch.value != self._epoch or not self._answers() <= self._looked

    def _answers(self) -> _Answers:
        rows = self._books.ledger.value.plain
        return frozenset((row.uid, row.answered_at) for row in rows if not row.adopted)

    async def _look(self, epoch: KubeletEpoch) -> bool:
        """Ask, compare, change; False when it should be tried again soon."""
        if epoch != self._epoch:
            self._met = asyncio.get_running_loop().time()
            self._idle = {}  # what this kubelet does not know, it may only not know yet
        self._epoch, self._looked = epoch, self._answers()
        try:
            async with asyncio.timeout(DEADLINE):
                holdings = await again(self._peers.witness.list, WitnessThrottled, THROTTLED_PAUSE)
                recorded = await self._recorded()
        except (AgentError, TimeoutError) as error:
            if not self._silent:
                log.info("reconcile.unanswered", err=str(error) or "out of time")
            self._silent = True
            return False
        self._silent = False
        if self._books.epoch.value != epoch:
            return False
        seen = PlainSeen(holdings, recorded, epoch, self._peers.clock.now(), self._idle)
        books = self._books
        names = (books.resource.value,)
        findings = observe(books.ledger.value, seen, names, alone=books.alone)
        self._idle, self._due = findings.idle, findings.due
        self.unconfirmed.set(findings.unconfirmed)
        return await self._apply(books.ledger.value, findings)

    async def _recorded(self) -> Sequence[frozenset[SliceId]] | None:
        """The ids in the kubelet's checkpoint file; None where it cannot be read."""
        return await self._peers.holds.held(self._books.resource.value)

    async def _apply(self, base: Ledger, findings: PlainFindings) -> bool:
        adopted = [self._adopted(one) for one in findings.strangers]
        mine = [row for row in findings.closed if self._take(row.uid)]
        over = [row for row in mine if await self._removed(row)]
        gone = [row for row in findings.closed_scheduled if await self._gone(row)]
        if findings.confirmed or findings.scheduled or adopted or over or gone:
            uids = frozenset(row.uid for row in over)
            keys = frozenset(row.key for row in gone)
            try:
                await self._commit(
                    lambda ledger: (
                        _applied(base, ledger, findings, adopted).drop_plain(uids).drop(keys)
                    )
                )
            except StateError as error:
                log.warning("reconcile.put_off", err=str(error))
                return False
            self._release(uids)
            _tell(adopted, over, gone)
        return (len(over), len(gone)) == (len(findings.closed), len(findings.closed_scheduled))

    def _take(self, uid: PodUid) -> bool:
        """Whether the row is ours to close: it is not being answered with just now."""
        if uid in self._taken and uid not in self._closing:
            return False
        self._taken.add(uid)
        self._closing.add(uid)
        return True

    def _release(self, uids: Collection[PodUid]) -> None:
        self._taken.difference_update(uids)
        self._closing.difference_update(uids)

    def _adopted(self, found: Stranger) -> PlainRow:
        """The row of a container that was answered by somebody else, or before the ledger was."""
        uid = PodUid(f"{self._peers.chance.getrandbits(128):032x}")
        return found.row(uid, self._peers.clock.now(), self._books.epoch.value or KubeletEpoch())

    async def _removed(self, row: PlainRow) -> bool:
        """Take the directory of a row that is over; the row follows, or stays until it is gone.

        In this order nothing is left behind by a kill.
        """
        if not row.has_directory or await self._cleared(directory_of(row)):
            return True
        self._release((row.uid,))
        return False

    async def _gone(self, row: Row) -> bool:
        return await self._cleared(container_directory(row.key.pod_uid, row.key.container))

    async def _cleared(self, name: str) -> bool:
        try:
            async with asyncio.timeout(DEADLINE):
                await self._peers.hooks.remove(name)
        except (AgentError, TimeoutError) as error:
            log.warning("hooks.not_removed", directory=name, err=str(error) or "out of time")
            return False
        return True


def _applied(
    base: Ledger, ledger: Ledger, findings: PlainFindings, adopted: list[PlainRow]
) -> Ledger:
    """What was learnt about `base` on the newest ledger: rows that changed meanwhile stay."""
    for row in findings.confirmed:
        if ledger.find_plain(row.uid) == base.find_plain(row.uid):
            ledger = ledger.put_plain(row)
    for kept in findings.scheduled:
        if ledger.find(kept.key) == base.find(kept.key):
            ledger = ledger.put(kept)
    for row in adopted:
        ledger = ledger.put_plain(row)
    return ledger


def _tell(adopted: list[PlainRow], over: list[PlainRow], gone: list[Row]) -> None:
    for row in adopted:
        if holder := row.holder:
            log.info("ledger.adopted", ns=holder.namespace, pod=holder.pod, ctr=holder.container)
    for row in over:
        holder = row.holder
        pod = {"ns": holder.namespace, "pod": holder.pod, "ctr": holder.container} if holder else {}
        log.info("ledger.closed", uid=row.uid, **pod)
    for closed in gone:
        log.info("ledger.closed", pod_uid=closed.key.pod_uid, ctr=closed.key.container)
