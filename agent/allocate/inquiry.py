"""Hami mode: asks the kubelet and the API server until a decision can be made, and makes the row.

Answers are kept for one call only. Each peer has a time of its own, in which only the running time
of our own loop counts.
"""

import asyncio
import contextlib
import datetime as dt
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from itertools import chain
from typing import NoReturn, Protocol, TypeVar

import msgspec
import structlog

from agent.allocate.candidates import (
    NOT_HERE,
    UNREAD,
    AskKubelet,
    AwaitLock,
    AwaitOthers,
    CheckRunning,
    Evidence,
    Grant,
    KubeletStart,
    KubeletView,
    ListPods,
    LookAtNode,
    LookAtPod,
    MatchSettings,
    Question,
    ReadRecords,
    UnlockedPods,
    pair_groups,
)
from agent.allocate.edits import EditRequest, check_library, container_edits, cuda_order
from agent.allocate.match import decide, rejected_pod
from agent.allocate.prefer import nearest, steer
from agent.allocate.room import GpuUse
from agent.allocate.service import (
    DISK_BUDGET,
    AllocateCall,
    AllocateCalls,
    AllocateStep,
    starved_refusal,
)
from agent.cluster import NodeView, PodKey, PodTable, PodUid
from agent.errors import (
    AgentError,
    ApiError,
    KubeletError,
    Refusal,
    RefusalReason,
    StateError,
    WitnessThrottled,
    WitnessUnsupported,
)
from agent.hami.pod import former_locks, held_lock
from agent.kit.cell import Cell
from agent.kit.tasks import Allowance, retry
from agent.kit.timing import Budget, Lag, Starved
from agent.kit.turns import Turns
from agent.ledger import (
    ContainerKey,
    Decider,
    EditSettings,
    GrantedShare,
    Holder,
    Holding,
    HookFacts,
    KubeletEpoch,
    Ledger,
    Row,
)
from agent.model import GpuUuid, Inventory, Share, SliceId
from agent.ports import Clock, Containers, HookDirs, KubeletRecords, Witness
from agent.reconcile import DEADLINE, THROTTLED_PAUSE, Adoption

log = structlog.get_logger(__name__)

T = TypeVar("T")

# The facts that an Allocate reads, and the peers it may ask.


class AllocationViews(msgspec.Struct, frozen=True):
    """The facts that a decision reads.

    - `registered`: the greatest amounts registered for each GPU in the last 60 s.
    - `match`, `edits`: how pods are matched and how answers are made.
    - `outlived`: the locks that still stood when the pod that was answered under them was gone.
    """

    pods: Cell[PodTable]
    node: Cell[NodeView | None]
    inventory: Cell[Inventory]
    ledger: Cell[Ledger]
    outlived: Cell[Mapping[str, PodUid]]
    match: Cell[MatchSettings]
    edits: Cell[EditSettings]
    registered: Callable[[], Mapping[GpuUuid, GpuUse]] = dict


class Refresh(Protocol):
    """LISTs this node's pods. Raises ApiError."""

    def __call__(self, *, is_owners: bool) -> Awaitable[PodTable]: ...  # noqa: D102


class AllocationPeers(msgspec.Struct, frozen=True):
    """The peers that an inquiry asks.

    - `refresh`: makes the one LIST of this node's pods; `is_owners`: the lock's owner may need it.
    - `look_at_pod`: GETs the UID of the pod that has a name now. `look_at_node`: GETs the Node.
    - `epoch`: the present kubelet instance. `streams`: how many list streams it has open.
    - `look`: opens the Node's watch at once if it is down. After an outage the scheduler and the
      kubelet may be back before it.
    - `lag`: extends the deadlines of all calls.
    """

    witness: Witness
    records: KubeletRecords
    containers: Containers
    hooks: HookDirs
    refresh: Refresh
    look_at_pod: Callable[[str, str], Awaitable[PodUid]]
    look_at_node: Callable[[], Awaitable[None]]
    epoch: Callable[[], KubeletEpoch | None]
    streams: Cell[int]
    clock: Clock
    look: Callable[[], None]
    lag: Lag = msgspec.field(default_factory=Lag)


# How long an inquiry waits for whom.

WAIT_BURST = 16
WAIT_REFILL = 5.0
"""Waits of calls that nothing came of, for the node: so many at once, and then one every five
seconds. While a call waits the kubelet admits nobody, and a tenant can make pods without end that
are waited for in vain."""

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


class Inquiry:
    """The inquiry of one call. Without a `call` it is a preference's, and asks no API server.

    All calls share `waits`. `start`: of the present kubelet.
    """

    def __init__(
        self,
        views: AllocationViews,
        peers: AllocationPeers,
        calls: AllocateCalls,
        call: AllocateCall | None,
        *,
        waits: Allowance,
        start: KubeletStart,
    ) -> None:
        self._views = views
        self._peers = peers
        self._calls = calls
        self._call = call
        self._waits = waits
        self._settings = views.match.value
        self._known: dict[PodKey, Holding | None] = {}
        self._pod_uids_read: dict[PodKey, PodUid | None] = {}
        self._api = Budget(peers.lag, OWNER_BUDGET)
        self._kubelet = Budget(peers.lag, KUBELET_BUDGET)
        self._disk = call.disk if call else Budget(peers.lag, DISK_BUDGET)
        self._is_starved = False
        self._count = 0
        self._lagging_until: float | None = None
        # A preference gives nothing away: it needs no right where `unique` asks for none.
        is_free = call is None and self._settings.unlocked_pods is UnlockedPods.UNIQUE
        self._seen = Evidence(
            table=views.pods.value,
            ledger=views.ledger.value,
            lock=None,
            inventory=views.inventory.value,
            kubelet=KubeletView(KubeletEpoch(), start=start),
            now=peers.clock.now(),
            known={},
            waited=is_free,
            node_read=is_free,
        )
        """The answers so far; the views in it are those of the last step."""

    async def grant(self, count: int) -> Grant | None:
        """The decision for `count` slices. Raises Refusal.

        None: this is a preference, and the decision needs the API server because the watches did
        not catch up.
        """
        self._count = count
        for _ in range(MAX_QUESTIONS):
            evidence = self._newest()
            try:
                step = decide(count, evidence, self._settings)
            except Refusal as refusal:
                # Which pod asks and by what right was not found out, for want of CPU.
                if self._is_starved and refusal.gate.value.startswith("HA-2"):
                    raise starved_refusal() from refusal
                raise
            if isinstance(step, Grant):
                return step
            if self._call or isinstance(step, AskKubelet | ReadRecords | CheckRunning):
                await self._perform(step)
            elif isinstance(step, LookAtPod):
                pod = evidence.table.named(step.namespace, step.name)  # a preference binds nobody
                self._pod_uids_read[(step.namespace, step.name)] = pod.uid if pod else NOT_HERE
            elif isinstance(step, AwaitOthers):
                return None
            elif isinstance(step, LookAtNode):  # a preference takes no lock
                self._learn(node_read=True)
            elif self._is_restarting(evidence) or not await self._caught_up(step, evidence):
                return None
        raise Refusal(
            RefusalReason.OUT_OF_TIME, "The agent could not decide; report this.", transient=True
        )

    def told(self, *, known: bool) -> frozenset[PodKey]:
        """The names that the kubelet said it knows, or does not know."""
        return frozenset(key for key, one in self._known.items() if (one is not None) == known)

    async def names(self) -> frozenset[PodKey] | None:
        """All names that the kubelet knows, if dead containers may be asking; None: not known."""
        if not self._is_restarting(self._newest()):
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
        return any(row.epoch != evidence.kubelet.epoch for row in rows)

    def rejected_pod(self, count: int) -> PodUid | None:
        """The pod that the kubelet will not ask for again after this refusal, or None."""
        return rejected_pod(count, self._newest(), self._settings)

    def _newest(self) -> Evidence:
        """The newest views, with the answers to this call."""
        views, node = self._views, self._views.node.value
        epoch = self._peers.epoch() or KubeletEpoch()
        turn = self._call.turn if self._call else None
        beside = tuple(one.all_there for one in turn.beside) if turn else ()
        if turn and turn.overtaken:
            beside = (None,)  # it is not known what was under way when the call began
        self._seen = msgspec.structs.replace(
            self._seen,
            table=views.pods.value,
            ledger=self._calls.with_pending(views.ledger.value),
            lock=held_lock(node),
            released_locks=former_locks(node, asyncio.get_running_loop().time()),
            inventory=views.inventory.value,
            kubelet=msgspec.structs.replace(self._seen.kubelet, epoch=epoch),
            now=self._peers.clock.now(),
            known=self._known,
            pod_uids_read=self._pod_uids_read,
            registered=views.registered(),
            claimed=self._calls.claimed(epoch, self._views.pods.value),
            used_locks=self._calls.used_locks,
            outlived=views.outlived.value,
            absent=turn.absent if turn else frozenset(),
            present=turn.present if turn else frozenset(),
            beside=beside,
        )
        return self._seen

    def _learn(self, **answers: object) -> None:
        self._seen = msgspec.structs.replace(self._seen, **answers)

    def _learn_of_kubelet(self, **answers: object) -> None:
        self._learn(kubelet=msgspec.structs.replace(self._seen.kubelet, **answers))

    async def _perform(self, question: Question) -> None:
        asked = "api-server"
        if isinstance(question, AskKubelet | ReadRecords | AwaitOthers):
            asked = "kubelet"
        elif isinstance(question, CheckRunning):
            asked = "runtime"
        # A preference is not measured: the kubelet waits for Allocates.
        with self._calls.waiting(asked) if self._call else contextlib.nullcontext():
            await self._answer(question)

    async def _answer(self, question: Question) -> None:
        match question:
            case AskKubelet():
                async with self._kubelet.within():
                    await self._ask_in_turn(question)
            case ReadRecords():
                async with self._from_disk("the kubelet's checkpoint"):
                    read = await self._peers.records.read(self._settings.resource)
                self._learn_of_kubelet(recorded=None if read is None else frozenset(read))
                self._learn(records_read=True)
            case CheckRunning():
                async with self._from_disk("the containers' cgroups"):
                    alive = await self._peers.containers.running(question.ids)
                alive = question.ids if alive is None else alive  # silence proves no death
                self._learn_of_kubelet(alive=self._seen.kubelet.alive | alive)
                self._learn(checked=self._seen.checked | question.ids)
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
                self._learn(alone=True)

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
            if self._known.get(key) is not None or not self._seen.kubelet.witnessed:
                return

    async def _ask(self, namespace: str, name: str) -> None:
        pauses = iter(UNANSWERED_PAUSES)
        get = functools.partial(self._peers.witness.get, namespace, name)
        while True:
            try:
                self._known[(namespace, name)] = await retry(get, WitnessThrottled, THROTTLED_PAUSE)
            except WitnessUnsupported:
                self._learn_of_kubelet(witnessed=False)
                return
            except KubeletError as error:
                pause = next(pauses, None)
                if pause is None:
                    raise Refusal(
                        RefusalReason.WITNESS_SILENT,
                        f"The kubelet does not say which pod it is admitting ({error}); the pod's "
                        "controller starts it again.",
                        transient=True,
                    ) from error
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
        if not self._waits.allows(loop.time()):
            return False
        try:
            async with time:
                await cell.until(holds)
        except TimeoutError:
            self._waits.spend(loop.time())
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
        self._learn(listed=True, list_failed=failed)

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
                self._pod_uids_read[key] = await self._peers.look_at_pod(*key)
        except ApiError as error:
            log.warning("pods.get_failed", pod="/".join(key), err=str(error))
            self._pod_uids_read[key] = UNREAD

    async def _look_at_node(self) -> None:
        failed = False
        try:
            async with self._asking(API_BUDGET, owner=False):
                await self._peers.look_at_node()
        except ApiError as error:
            log.warning("node.get_failed", err=str(error))
            failed = True
        self._learn(node_read=True, node_unread=failed)

    async def _await_lock(self, wanted: AwaitLock) -> None:
        before = held_lock(self._views.node.value)
        owner = (wanted.namespace, wanted.name)

        def is_there(node: NodeView | None) -> bool:
            lock = held_lock(node)
            if lock is None or not wanted.name:
                return lock is not None and lock != before
            return lock.owner == owner

        self._learn(waited=True)
        self._peers.look()
        await self._shown(self._peers.lag.within(LOCK_PAUSE), self._views.node, is_there)


# Hami mode: decides what a container gets by the annotation that HAMi's scheduler wrote.

PROMPT = dt.timedelta(seconds=0.5)
"""A list that the kubelet begins to take this soon after its socket appeared comes before its first
admission, 0.9 to 1.0 s after the socket."""

LOOK_DEADLINE = 0.4
"""Seconds for a look at the cgroups that must be over by then."""

PREFER_BUDGET = 0.2
"""Seconds for GetPreferredAllocation. The kubelet calls it just before Allocate."""


# After a lost kubelet checkpoint PodResources says "known, no slices" of a pod that runs, of one
# whose container died, and of one that is being admitted. What the kubelet asks for depends on
# what it saw when it started. The agent looks when the kubelet begins to take its list (run):
#
# - The kubelet takes the set of running containers from the runtime, 0.35 s before its socket
#   appears. The agent reads the cgroups, if the list was taken within 0.5 s after the socket.
# - It admits the pods that were there, one by one, from 0.9 s after its socket on, and asks in
#   the order of the spec for each container that has no record and is not in that set, also if it
#   has died since. A pod without a cgroup was dead: its first container that has not started
#   since is next.
# - It asks for nothing in an admission before it took the list: it starts those pods unasked.
#   Only a pod that was made since then counts as new.
# - It asks for any container that dies later, in parallel and in any order; after a refusal for
#   the next one, and 8 to 10 s later again. All others are unknown: only a single possible
#   container is served. A status proves no death: the former kubelet may have started the
#   container again without telling.
#
# Refused (HA-2002): several possible containers of one count, in one pod or in several. A new pod
# that holds the node lock is served all the same: the kubelet knew it when it began the call, and
# no other is new. Refused (HA-2010) while the API server cannot be asked: a pod that has run, for
# a pod that no view shows may be the one.


class SchedulerShares:
    """A ShareSource: the pod's annotation says what each container gets.

    Only the number of the kubelet's ids counts. The ids themselves may differ after a restart,
    which is never a reason to refuse.
    """

    def __init__(self, views: AllocationViews, peers: AllocationPeers) -> None:
        self._views = views
        self._peers = peers
        self._waits = Allowance(WAIT_BURST, WAIT_REFILL)
        self._start = KubeletStart()
        self._started: tuple[KubeletEpoch | None, str] = None, ""
        """The kubelet instance of `_start`, and the resource that it began to take."""
        self.calls = AllocateCalls(Turns(peers.epoch), peers.lag)

    async def run(self) -> NoReturn:
        """See each kubelet begin to take the lists, for ever, and which pods have no cgroup then.

        From then on it asks for the containers of each pod that it admits; before, if it has lost
        its checkpoint, it does not know the resource, and starts them without asking. A new kubelet
        starts no container before its first admission.
        """
        async for streams in self._peers.streams.follow():
            epoch, now = self._peers.epoch(), self._peers.clock.now()
            kubelet = epoch, self._views.match.value.resource
            if streams == 0 or epoch is None or kubelet == self._started:
                continue
            is_prompt = dt.timedelta(0) <= now - epoch.since < PROMPT
            self._start = KubeletStart() if is_prompt else KubeletStart(asks_since=now)
            self._started = kubelet
            if is_prompt:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_DEADLINE):
                        self._start = KubeletStart(begun=await self._peers.containers.begun())
        raise AssertionError("the list streams are never closed")

    async def decide(self, ids: tuple[SliceId, ...], call: AllocateCall) -> None:
        """Set the row of the call, from which its effects follow. Raises Refusal."""
        inquiry, epoch = self._inquiry(call), self._epoch()
        try:
            async with call.disk.within():
                with self.calls.waiting("hook-path"):
                    facts = await self._peers.hooks.facts()
            call.step = AllocateStep.MATCH
            grant = await inquiry.grant(len(ids))
        except (Refusal, StateError, TimeoutError, asyncio.CancelledError):
            refused = inquiry.rejected_pod(len(ids))
            if refused is not None and epoch == self._epoch():  # else a new kubelet asks again
                self.calls.mark_rejected(refused, self._views.pods.value, epoch)
            raise
        if grant is None:  # pragma: no cover -- only a preference gives up
            raise Refusal(RefusalReason.OUT_OF_TIME, "The agent could not decide; report this.")
        call.is_replay = call.turn.yields = grant.replay is not None
        call.oversold = grant.oversold
        offered = self.calls.take_offer(grant.key)
        pod, container = grant.candidate.pod, grant.candidate.container
        if grant.replay is not None:
            # It keeps its answer, byte for byte, and gets the ids of this call.
            call.row = msgspec.structs.replace(
                grant.replay,
                slice_ids=tuple(sorted(ids)),
                answered_at=self._peers.clock.now(),
                epoch=self._epoch(),
                confirmed=False,
                offered=offered,
            )
            return
        first = self._first(Adoption(pod, container, ids), grant.group, grant.shares, facts)
        call.row = msgspec.structs.replace(first, offered=offered, lock=grant.lock)
        check_library(facts, container)

    def refused(self, refusal: Refusal, call: AllocateCall) -> None:
        """Exclude a pod that is refused at its admission: the kubelet does not ask for it again."""
        row, pods, epoch = call.row, self._views.pods.value, self._epoch()
        if row is None or call.is_replay or refusal.gate is RefusalReason.OVERLAP:
            return
        if row.epoch != epoch:  # a new kubelet asks again
            return
        pod = pods.pods.get(row.key.pod_uid)
        if pod is None or not pod.has_run:
            self.calls.mark_rejected(row.key.pod_uid, pods, epoch)

    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        """`size` of the available ids: on the annotated GPUs if possible, else on near ones."""
        turn, inquiry, grant = self.calls.turns.begin(), self._inquiry(None), None
        try:
            # The Allocate that follows is for the same container: of no pod that is not known now.
            async with asyncio.timeout(PREFER_BUDGET):
                turn.all_there = await inquiry.names()
                grant = await inquiry.grant(size)
        except (AgentError, TimeoutError) as error:
            log.debug("prefer.unsteered", reason=str(error) or "out of time")
        finally:
            turn.absent, turn.present = inquiry.told(known=False), inquiry.told(known=True)
        ledger = self.calls.with_pending(self._views.ledger.value)
        held = frozenset(chain.from_iterable(ledger.held_ids().values()))
        chosen = None
        if grant is not None:
            wanted = tuple(share.uuid for share in grant.shares)
            chosen = steer(available, must_include, wanted, held)
            self.calls.take_offer(grant.key)
            if chosen is not None:
                self.calls.offers.append(grant.key)
        if chosen is None:
            gpus = {shared.uuid: shared.gpu for shared in self._views.inventory.value.gpus}
            chosen = nearest(available, must_include, size, gpus, held)
        turn.ids = frozenset(chosen)
        return chosen

    async def adopt(self, found: Adoption) -> Row | None:
        """The row of a container that was answered and that the ledger does not know.

        Another agent answered it, or the ledger was lost. The scheduler's annotation says what it
        holds. If the kubelet has no ids for it, the kubelet lost its checkpoint and may ask again.
        None: the annotation cannot be read, or names a GPU that is not on this node.
        """
        try:
            async with asyncio.timeout(DEADLINE):
                facts = await self._peers.hooks.facts()
            paired = pair_groups(found.pod.groups or (), found.pod.asking(found.container.resource))
            for pair in paired:
                if pair.container == found.container.name:
                    row = self._first(found, pair.group_index, pair.shares, facts)
                    epoch = row.epoch if found.ids else KubeletEpoch()
                    return msgspec.structs.replace(row, confirmed=bool(found.ids), epoch=epoch)
        except (AgentError, TimeoutError) as error:
            why = str(error) or "out of time"
            log.warning("ledger.not_adopted", pod=found.pod.name, err=why)
        return None

    def _first(
        self, found: Adoption, group: int, shares: tuple[Share, ...], facts: HookFacts
    ) -> Row:
        """A new row, with its edits: they are made once. `group`: its place in `…-allocated`."""
        pod, container, named = found.pod, found.container, []
        for share in shares:
            gpu = self._views.inventory.value.find(share.uuid)
            if gpu is None:  # the inventory changed between the decision and here
                raise Refusal(
                    RefusalReason.UNKNOWN_GPU,
                    f"GPU {share.uuid} was removed during this call; create the pod again.",
                    transient=True,
                )
            registered, minor = gpu.registered_mib, gpu.gpu.minor
            named.append(GrantedShare(share, gpu.gpu.pci, registered, minor, gpu.gpu.index))
        granted = cuda_order(named)
        request = EditRequest(
            pod_uid=pod.uid,
            container=container.name,
            control_disabled=container.control_disabled,
            shares=granted,
        )
        return Row(
            key=ContainerKey(pod.uid, container.name),
            holder=Holder(pod.namespace, pod.name, container.name),
            role=container.role,
            group=group,
            shares=tuple(grant.share for grant in granted),
            slice_ids=tuple(sorted(found.ids)),
            edits=container_edits(request, self._views.edits.value, facts),
            answered_at=self._peers.clock.now(),
            epoch=self._epoch(),
            resource=container.resource,
            priority=container.priority,
        )

    def _inquiry(self, call: AllocateCall | None) -> Inquiry:
        """The inquiry of an Allocate; None: of a preference."""
        epoch, start = self._epoch(), self._start
        if self._started != (epoch, self._views.match.value.resource):
            start = KubeletStart(
                asks_since=epoch.since
            )  # such as one whose socket was only touched
        return Inquiry(self._views, self._peers, self.calls, call, waits=self._waits, start=start)

    def _epoch(self) -> KubeletEpoch:
        return self._peers.epoch() or KubeletEpoch()
