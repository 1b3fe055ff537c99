"""One Allocate's questions: asks the outside world until the decision is made.

Every answer is kept for this call only. Nothing here waits without a bound: the caller's deadline
ends the whole inquiry.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Container, Mapping

import structlog

from agent.codec.nodelock import held_lock
from agent.core.candidates import Books, all_confirmed
from agent.core.errors import (
    ApiError,
    Gate,
    KubeletError,
    Refusal,
    WitnessThrottled,
    WitnessUnsupported,
)
from agent.core.evidence import (
    AskKubelet,
    AwaitLock,
    CheckRunning,
    Evidence,
    Grant,
    ListPods,
    Question,
    ReadRecords,
)
from agent.core.gpu import GpuUuid
from agent.core.holdings import Holding, KubeletEpoch
from agent.core.inventory import Inventory
from agent.core.ledger import ContainerKey, Ledger
from agent.core.match_settings import MatchSettings, UnlockedPods
from agent.core.matching import decide, may_be_meant, used_up
from agent.core.pods import NodeView, PodTable, PodUid
from agent.core.ports import Clock, Containers, KubeletRecords, Witness
from agent.core.room import Use
from agent.kit.cell import Cell

log = structlog.get_logger(__name__)

THROTTLED_PAUSE = 0.02
"""Seconds until PodResources is asked again after it was over its rate limit."""

UNANSWERED_PAUSES = (0.01, 0.05)
"""Seconds until PodResources is asked again after a failure: the connection to a kubelet that was
restarted is lost once, which must not cost a pod."""

LOCK_PAUSE = 0.25
"""Seconds that the Node's watch is given to catch up with the pods'."""

WATCH_PAUSE = 0.1
"""Seconds that our watches are given to show what the kubelet, by a watch of its own, knows
already: a preference that does not wait for it would name GPUs at random."""

LIST_PAUSE = 0.4
"""Seconds that the API server is given for the one LIST."""

MAX_QUESTIONS = 256
"""More than the pods of any node: a decision that asks more is a defect, and is refused."""


@dataclasses.dataclass(frozen=True, slots=True)
class Views:
    """The facts that a decision reads. `registered`: the greatest amounts of the last minute."""

    pods: Cell[PodTable]
    node: Cell[NodeView | None]
    inventory: Cell[Inventory]
    ledger: Cell[Ledger]
    registered: Callable[[], Mapping[GpuUuid, Use]] = dict


@dataclasses.dataclass(frozen=True, slots=True)
class Peers:
    """Whom an inquiry asks. `refresh` makes the one LIST of this node's pods.

    `epoch` names the kubelet that is there now. `look` has the Node's watch opened at once where it
    is down: after an outage the scheduler and the kubelet may be back before it.
    """

    witness: Witness
    records: KubeletRecords
    containers: Containers
    refresh: Callable[[], Awaitable[PodTable]]
    epoch: Callable[[], KubeletEpoch | None]
    clock: Clock
    look: Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Underway:
    """What this process has under way at a moment.

    `ledger` has the rows that are being written; the others are as in Evidence and Books.
    """

    ledger: Ledger
    claimed: frozenset[PodUid]
    in_doubt: Container[PodUid]
    asked_last: Mapping[PodUid, str]


@dataclasses.dataclass(frozen=True, slots=True)
class _Done:
    """What this inquiry did so far."""

    recorded: frozenset[ContainerKey] | None = None
    records_read: bool = False
    alive: frozenset[str] = frozenset()
    checked: frozenset[str] = frozenset()
    can_ask: bool = True
    listed: bool = False
    list_failed: bool = False
    waited: bool = False


class Inquiry:
    """The evidence of one call, growing answer by answer."""

    def __init__(
        self, views: Views, peers: Peers, settings: MatchSettings, *, patient: bool
    ) -> None:
        self._views = views
        self._peers = peers
        self._settings = settings
        self._patient = patient
        self._known: dict[tuple[str, str], Holding | None] = {}
        self._state = _Done()
        self._lagging_until: float | None = None

    async def grant(self, count: int, underway: Callable[[], Underway]) -> Grant | None:
        """The decision for `count` slices. Raises Refusal.

        `underway` is read anew for each attempt. None: the decision would need the API server, our
        watches do not catch up, and this inquiry is not `patient`.
        """
        for _ in range(MAX_QUESTIONS):
            evidence = self._evidence(underway())
            step = decide(count, evidence, self._settings)
            if isinstance(step, Grant):
                if not self._is_hasty(step):
                    return step
                step = ListPods()
            if self._patient or not isinstance(step, ListPods | AwaitLock):
                await self._perform(step)
            elif self._is_restarting(evidence) or not await self._caught_up(step, evidence):
                return None
        raise Refusal(Gate.OUT_OF_TIME, "The agent could not decide; report this.", transient=True)

    def _is_restarting(self, evidence: Evidence) -> bool:
        """Whether the kubelet may be starting dead containers whose records it has lost.

        It does so beside its other work, and dies when the earlier of two requests is granted: a
        preference that is waited for would let a whole other request pass.
        """
        return not all_confirmed(
            evidence.table,
            evidence.ledger,
            evidence.books,
            self._settings.resource,
            evidence.known,
        )

    def _is_hasty(self, grant: Grant) -> bool:
        """Whether a pod that our watch has not shown yet may be asking in this one's place.

        Of a pod whose record the kubelet has lost it says the same as of one that it admits, for as
        long as the container is not started again. A pod is bound before the kubelet admits it, so
        a LIST that begins now has it. Without the API server the risk is taken: a running pod would
        pay for the refusal.
        """
        return self._patient and grant.replay is not None and not self._state.listed

    def used_up(self, count: int, underway: Underway) -> PodUid | None:
        """The deleted pod that will not ask again, now that its request was refused, or None."""
        return used_up(count, self._evidence(underway), self._settings)

    def may_be_meant(self, count: int, underway: Underway) -> frozenset[PodUid]:
        """Pods that had answers, for one of which the refused request may have been."""
        return may_be_meant(count, self._evidence(underway), self._settings)

    def _evidence(self, underway: Underway) -> Evidence:
        done = self._state
        return Evidence(
            table=self._views.pods.value,
            ledger=underway.ledger,
            lock=held_lock(self._views.node.value),
            inventory=self._views.inventory.value,
            books=Books(
                self._peers.epoch() or KubeletEpoch(),
                done.recorded,
                done.alive,
                done.can_ask,
                underway.asked_last,
            ),
            now=self._peers.clock.now(),
            known=self._known,
            registered=self._views.registered(),
            records_read=done.records_read,
            checked=done.checked,
            listed=done.listed,
            list_failed=done.list_failed,
            waited=done.waited,
            claimed=underway.claimed,
            in_doubt=underway.in_doubt,
        )

    async def _perform(self, question: Question) -> None:
        match question:
            case AskKubelet():
                await self._ask(question.namespace, question.name)
            case ReadRecords():
                recorded = await self._peers.records.read(self._settings.resource)
                self._state = dataclasses.replace(self._state, recorded=recorded, records_read=True)
            case CheckRunning():
                alive = await self._peers.containers.running(question.ids)
                self._state = dataclasses.replace(
                    self._state,
                    alive=self._state.alive | alive,
                    checked=self._state.checked | question.ids,
                )
            case ListPods():
                await self._list()
            case AwaitLock():
                await self._await_lock()

    async def _ask(self, namespace: str, name: str) -> None:
        pauses = iter(UNANSWERED_PAUSES)
        while True:
            try:
                self._known[(namespace, name)] = await self._peers.witness.get(namespace, name)
            except WitnessThrottled:
                await asyncio.sleep(THROTTLED_PAUSE)
            except WitnessUnsupported:
                self._state = dataclasses.replace(self._state, can_ask=False)
                return
            except KubeletError as error:
                pause = next(pauses, None)
                if pause is None:
                    raise _silent(error) from error
                await asyncio.sleep(pause)
            else:
                return

    async def _caught_up(self, step: ListPods | AwaitLock, seen: Evidence) -> bool:
        """Whether the watch that `step` is about tells more than was seen, before time is over.

        A lock need not come where the pod is served without one.
        """
        lax = self._settings.unlocked_pods is not UnlockedPods.STRICT
        if isinstance(step, AwaitLock) and lax:
            self._state = dataclasses.replace(self._state, waited=True)
            return True
        now = asyncio.get_running_loop().time()
        if self._lagging_until is None:
            self._lagging_until = now + WATCH_PAUSE
        try:
            async with asyncio.timeout(self._lagging_until - now):
                if isinstance(step, ListPods):
                    await self._views.pods.until(lambda table: table != seen.table)
                else:
                    self._peers.look()
                    await self._views.node.until(lambda node: held_lock(node) != seen.lock)
        except TimeoutError:
            return False
        return True

    async def _list(self) -> None:
        failed = False
        try:
            async with asyncio.timeout(LIST_PAUSE):
                await self._peers.refresh()
        except (ApiError, TimeoutError) as error:
            log.warning("pods.list_failed", err=str(error) or "out of time")
            failed = True
        self._known.clear()
        self._state = dataclasses.replace(self._state, listed=True, list_failed=failed)

    async def _await_lock(self) -> None:
        before = held_lock(self._views.node.value)
        self._peers.look()
        try:
            async with asyncio.timeout(LOCK_PAUSE):
                await self._views.node.until(lambda node: held_lock(node) not in {None, before})
        except TimeoutError:
            log.debug("lock.unchanged", waited=LOCK_PAUSE)
        self._state = dataclasses.replace(self._state, waited=True)


def _silent(error: KubeletError) -> Refusal:
    return Refusal(
        Gate.WITNESS_SILENT,
        f"The kubelet does not say which pod it is admitting ({error}); the pod's controller "
        "starts it again.",
        transient=True,
    )
