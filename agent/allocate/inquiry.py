"""Gathers the evidence for one Allocate: asks the kubelet and the API server until it can decide.

Answers are kept for this call only. Each peer has a time of its own, in which only the running time
of our own loop counts.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import msgspec
import structlog

from agent.allocate.calls import AllocationPeers, AllocationViews, Underway, Waits
from agent.allocate.candidates import (
    NOT_HERE,
    UNREAD,
    AskKubelet,
    AwaitLock,
    AwaitOthers,
    Books,
    CheckRunning,
    Evidence,
    Grant,
    KubeletStart,
    ListPods,
    LookAtNode,
    LookAtPod,
    Question,
    ReadRecords,
)
from agent.allocate.match import decide, in_vain
from agent.allocate.steps import MatchSettings, UnlockedPods, starved_refusal
from agent.cluster import NodeView, PodKey, PodUid
from agent.errors import (
    ApiError,
    KubeletError,
    Refusal,
    RefusalReason,
    WitnessThrottled,
    WitnessUnsupported,
)
from agent.hami.pod import former_locks, held_lock
from agent.kit.cell import Cell
from agent.kit.tasks import Allowance, retry
from agent.kit.timing import Budget, Starved
from agent.kit.turns import Turn
from agent.ledger import ContainerKey, Decider, Holding, KubeletEpoch
from agent.reconcile.rules import THROTTLED_PAUSE

log = structlog.get_logger(__name__)

T = TypeVar("T")

UNANSWERED_PAUSES = (0.01, 0.05)
"""Seconds until PodResources is asked again after a failure. A kubelet's restart breaks the
connection once; that must not fail a pod."""

LOCK_PAUSE = 0.25
"""Seconds that the Node's watch has to catch up with the pods' watch."""

WATCH_PAUSE = 0.1
"""Seconds that the agent's watches have to show a pod that the kubelet's watch has shown already.
Without this wait a preference would name any GPUs."""

OTHERS_PAUSE = 0.2
"""Seconds in which the call of a pod that the kubelet is admitting comes. If it comes, the one that
waits here is another's, and is refused as overtaken."""

LIST_PAUSE = 0.4
"""Seconds for a LIST after the first one."""

GET_PAUSE = 0.15
"""Seconds for the GET of a pod. That of the Node has what is left: without it a pod is refused."""

API_BUDGET = 0.6
"""Seconds for all requests to the API server together."""

OWNER_BUDGET = 2.0
"""The same for the pod that the node lock names, and while the watch may still show who asks. A
refusal fails a good pod, and the kubelet's own watch can be that much ahead of ours."""

KUBELET_BUDGET = 10.0
"""Seconds for all questions to the kubelet together. A busy one is slow, and it sets itself no
deadline."""

MAX_QUESTIONS = 256
"""More than the pods of any node. A decision that asks more has a defect and is refused."""


class _Done(msgspec.Struct, frozen=True):
    """What this inquiry did so far."""

    recorded: frozenset[ContainerKey] | None = None
    records_read: bool = False
    alive: frozenset[str] = frozenset()
    checked: frozenset[str] = frozenset()
    can_ask: bool = True
    listed: bool = False
    list_failed: bool = False
    waited: bool = False
    node_read: bool = False
    node_unread: bool = False
    alone: bool = False


class Inquiry:
    """The inquiry of one call; without `patient` it asks no API server.

    All calls share `vain`, and all Allocates `waits`. `disk`: the call's time for the disk.
    `start`: of the present kubelet. `absent`: the names that the kubelet did not know when it began
    this call's container.
    """

    def __init__(
        self,
        views: AllocationViews,
        peers: AllocationPeers,
        settings: MatchSettings,
        *,
        patient: bool,
        vain: Allowance,
        waits: Waits,
        disk: Budget,
        start: KubeletStart,
        turn: Turn | None,
    ) -> None:
        self._views = views
        self._peers = peers
        self._settings = settings
        self._patient = patient
        self._vain = vain
        self._waits = waits
        self._start = start
        self._turn = turn
        self._known: dict[PodKey, Holding | None] = {}
        self._looked: dict[PodKey, PodUid | None] = {}
        self._api = Budget(peers.lag, OWNER_BUDGET)
        self._kubelet = Budget(peers.lag, KUBELET_BUDGET)
        self._disk = disk
        self._is_starved = False
        self._count = 0
        is_free = not patient and settings.unlocked_pods is UnlockedPods.UNIQUE
        self._state = _Done(waited=is_free, node_read=is_free)
        self._lagging_until: float | None = None

    async def grant(self, count: int, underway: Callable[[], Underway]) -> Grant | None:
        """The decision for `count` slices. Raises Refusal.

        `underway` is read again for each attempt. None: the inquiry is not `patient`, and the
        decision needs the API server because the watches did not catch up.
        """
        self._count = count
        for _ in range(MAX_QUESTIONS):
            evidence = self._evidence(underway())
            try:
                step = decide(count, evidence, self._settings)
            except Refusal as refusal:
                # Which pod asks and by what right was not found out, for want of CPU.
                if self._is_starved and refusal.gate.value.startswith("HA-2"):
                    raise starved_refusal() from refusal
                raise
            if isinstance(step, Grant):
                return step
            if self._patient or isinstance(step, AskKubelet | ReadRecords | CheckRunning):
                await self._perform(step)
            elif isinstance(step, LookAtPod):
                pod = evidence.table.named(step.namespace, step.name)  # a preference binds nobody
                self._looked[(step.namespace, step.name)] = pod.uid if pod else NOT_HERE
            elif isinstance(step, AwaitOthers):
                return None
            elif isinstance(step, LookAtNode):  # a preference takes no lock
                self._state = msgspec.structs.replace(self._state, node_read=True)
            elif self._is_restarting(evidence) or not await self._caught_up(step, evidence):
                return None
        raise Refusal(
            RefusalReason.OUT_OF_TIME, "The agent could not decide; report this.", transient=True
        )

    def told(self, *, known: bool) -> frozenset[PodKey]:
        """The names that the kubelet said it knows, or does not know."""
        return frozenset(key for key, one in self._known.items() if (one is not None) == known)

    async def names(self, underway: Underway) -> frozenset[PodKey] | None:
        """All names that the kubelet knows, if dead containers may be asking; None: not known."""
        if not self._is_restarting(self._evidence(underway)):
            return None
        try:
            found = await retry(self._peers.witness.list, WitnessThrottled, THROTTLED_PAUSE)
        except KubeletError:
            return None
        self._known = {(one.namespace, one.pod): one for one in found}
        return frozenset(self._known)

    def _is_restarting(self, evidence: Evidence) -> bool:
        """Whether the kubelet may be restarting containers after it lost its checkpoint.

        It then starts several at once, and crashes when the earlier of two requests is granted.
        While a preference waits, a whole other request could pass.
        """
        rows = evidence.ledger.rows_by(Decider.SCHEDULER)
        return any(row.epoch != evidence.books.epoch for row in rows)

    def in_vain(self, count: int, underway: Underway) -> PodUid | None:
        """The pod that the kubelet will not ask for again after this refusal, or None."""
        return in_vain(count, self._evidence(underway), self._settings)

    def _evidence(self, underway: Underway) -> Evidence:
        done = self._state
        return Evidence(
            table=self._views.pods.value,
            ledger=underway.ledger,
            lock=held_lock(self._views.node.value),
            former=former_locks(self._views.node.value, asyncio.get_running_loop().time()),
            inventory=self._views.inventory.value,
            books=Books(
                self._peers.epoch() or KubeletEpoch(),
                done.recorded,
                done.alive,
                done.can_ask,
                self._start,
            ),
            now=self._peers.clock.now(),
            known=self._known,
            looked=self._looked,
            registered=self._views.registered(),
            records_read=done.records_read,
            checked=done.checked,
            listed=done.listed,
            list_failed=done.list_failed,
            waited=done.waited,
            node_read=done.node_read,
            node_unread=done.node_unread,
            claimed=underway.claimed,
            absent=self._turn.absent if self._turn else frozenset(),
            present=self._turn.present if self._turn else frozenset(),
            alone=done.alone,
            beside=self._beside(),
            spent=underway.spent,
            outlived=self._views.outlived.value,
        )

    def _beside(self) -> tuple[frozenset[PodKey] | None, ...]:
        if self._turn is None:
            return ()
        known = (one.all_there for one in self._turn.beside)
        return (None,) if self._turn.overtaken else tuple(known)

    async def _perform(self, question: Question) -> None:
        with self._waits.waiting(_asked(question)):
            await self._answer(question)

    async def _answer(self, question: Question) -> None:
        match question:
            case AskKubelet():
                async with self._kubelet.within():
                    await self._ask_in_turn(question)
            case ReadRecords():
                async with self._from_disk("the kubelet's checkpoint"):
                    read = await self._peers.records.read(self._settings.resource)
                recorded = None if read is None else frozenset(read)
                self._state = msgspec.structs.replace(
                    self._state, recorded=recorded, records_read=True
                )
            case CheckRunning():
                async with self._from_disk("the containers' cgroups"):
                    alive = await self._peers.containers.running(question.ids)
                self._state = msgspec.structs.replace(
                    self._state,
                    alive=self._state.alive | (question.ids if alive is None else alive),
                    checked=self._state.checked | question.ids,
                )
            case ListPods():
                await self._list()
            case LookAtPod():
                await self._look_at_pod((question.namespace, question.name))
            case AwaitLock():
                await self._await_lock(question)
            case LookAtNode():
                await self._look_at_node()
            case AwaitOthers():
                await asyncio.sleep(OTHERS_PAUSE)
                self._state = msgspec.structs.replace(self._state, alone=True)

    @contextlib.asynccontextmanager
    async def _from_disk(self, what: str) -> AsyncIterator[None]:
        try:
            async with self._disk.within():
                yield
        except Starved:
            raise
        except TimeoutError as error:
            raise Refusal(
                RefusalReason.OUT_OF_TIME,
                f"The node did not let the agent read {what} in time; ask the operator to check "
                "the node and its disk, and the pod's controller starts it again.",
                transient=True,
            ) from error

    async def _ask_in_turn(self, question: AskKubelet) -> None:
        for key in ((question.namespace, question.name), *question.others):
            await self._ask(*key)
            if self._known.get(key) is not None or not self._state.can_ask:
                return

    async def _ask(self, namespace: str, name: str) -> None:
        pauses = iter(UNANSWERED_PAUSES)
        get = functools.partial(self._peers.witness.get, namespace, name)
        while True:
            try:
                self._known[(namespace, name)] = await retry(get, WitnessThrottled, THROTTLED_PAUSE)
            except WitnessUnsupported:
                self._state = msgspec.structs.replace(self._state, can_ask=False)
                return
            except KubeletError as error:
                pause = next(pauses, None)
                if pause is None:
                    raise _silent(error) from error
                await asyncio.sleep(pause)
            else:
                return

    async def _caught_up(self, step: ListPods | AwaitLock, seen: Evidence) -> bool:
        """Whether the watch that `step` needs shows a change from `seen` within WATCH_PAUSE."""
        now = asyncio.get_running_loop().time()
        self._lagging_until = self._lagging_until or now + WATCH_PAUSE
        time = asyncio.timeout(self._lagging_until - now)
        if isinstance(step, ListPods):
            return await self._shown(time, self._views.pods, lambda table: table != seen.table)
        self._peers.look()
        return await self._shown(time, self._views.node, lambda node: held_lock(node) != seen.lock)

    async def _shown(
        self, time: AbstractAsyncContextManager[object], cell: Cell[T], holds: Callable[[T], bool]
    ) -> bool:
        """Whether `holds` becomes true in `time`; False at once after too many waits in vain."""
        loop = asyncio.get_running_loop()
        if not self._vain.allows(loop.time()):
            return False
        try:
            async with time:
                await cell.until(holds)
        except TimeoutError:
            self._vain.spend(loop.time())
            return False
        return True

    @contextlib.asynccontextmanager
    async def _asking(self, most: float, *, owner: bool) -> AsyncIterator[None]:
        """Bound a request to `most` seconds and the rest of API_BUDGET. Raises ApiError.

        For the owner of the node lock only the rest of OWNER_BUDGET bounds it. The kubelet's
        earlier answers still hold: while it waits for us, it admits no other pod.
        """
        left = self._api.left - OWNER_BUDGET + API_BUDGET
        try:
            async with self._api.within(None if owner else min(most, left)):
                yield
        except TimeoutError as error:
            self._is_starved |= isinstance(error, Starved)
            raise ApiError("out of time") from error

    async def _list(self) -> None:
        """LIST the pods. If that fails, a watch that is late may still show who asks."""
        seen, failed = self._views.pods.value, False
        is_owners = self._may_be_the_owners()
        most = LIST_PAUSE if seen.synced else API_BUDGET
        try:
            async with self._asking(most, owner=is_owners):
                await self._peers.refresh(is_owners=is_owners)
                if not seen.synced:
                    return  # this may be the first LIST, which began before the call
        except ApiError as error:
            log.warning("pods.list_failed", err=str(error))
            failed = True
        if failed and seen.synced and not seen.stale:
            time, known = self._api.within(), seen.pods.keys()
            if await self._shown(
                time, self._views.pods, lambda table: bool(table.pods.keys() - known)
            ):
                return
        self._state = msgspec.structs.replace(self._state, listed=True, list_failed=failed)

    def _may_be_the_owners(self) -> bool:
        """Whether the owner of the node lock may be asking, as far as views and kubelet tell."""
        lock = held_lock(self._views.node.value)
        if lock is None or lock.owner is None:
            return lock is not None
        pod = self._views.pods.value.named(*lock.owner)
        is_known = self._known.get(lock.owner, True) is not None
        return is_known and (
            pod is None or any(one.count == self._count for one in pod.gpu_containers)
        )

    async def _look_at_pod(self, key: PodKey) -> None:
        try:
            lock = held_lock(self._views.node.value)
            is_owner = lock is not None and lock.owner == key
            async with self._asking(GET_PAUSE, owner=is_owner):
                self._looked[key] = await self._peers.look_at_pod(*key)
        except ApiError as error:
            log.warning("pods.get_failed", pod="/".join(key), err=str(error))
            self._looked[key] = UNREAD

    async def _look_at_node(self) -> None:
        failed = False
        try:
            async with self._asking(API_BUDGET, owner=False):
                await self._peers.look_at_node()
        except ApiError as error:
            log.warning("node.get_failed", err=str(error))
            failed = True
        self._state = msgspec.structs.replace(self._state, node_read=True, node_unread=failed)

    async def _await_lock(self, wanted: AwaitLock) -> None:
        before = held_lock(self._views.node.value)
        owner = (wanted.namespace, wanted.name)

        def is_there(node: NodeView | None) -> bool:
            lock = held_lock(node)
            if lock is None or not wanted.name:
                return lock is not None and lock != before
            return lock.owner == owner

        self._state = msgspec.structs.replace(self._state, waited=True)
        self._peers.look()
        await self._shown(self._peers.lag.within(LOCK_PAUSE), self._views.node, is_there)


def _asked(question: Question) -> str:
    """Whom the question is for."""
    if isinstance(question, AskKubelet | ReadRecords | AwaitOthers):
        return "kubelet"
    return "runtime" if isinstance(question, CheckRunning) else "api-server"


def _silent(error: KubeletError) -> Refusal:
    return Refusal(
        RefusalReason.WITNESS_SILENT,
        f"The kubelet does not say which pod it is admitting ({error}); the pod's controller "
        "starts it again.",
        transient=True,
    )
